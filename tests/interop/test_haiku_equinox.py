"""Haiku and Equinox models as variables of a model_fn, as docs/how_to/from_flax_haiku_equinox.md shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import make
from testing.model_fns import MOMENTUM, regressing, train_by_hand
from testing.towers import assert_close, regression, replicate

import estimator as est
from estimator.core._rng import name_hash
from replicate import TOWER_AXIS

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")

pytestmark = pytest.mark.covers("11 Haiku")

ROWS = 8
MLP = hk.transform(lambda x: hk.nets.MLP([4, 1], activation=jnp.tanh)(x)[:, 0])


def make_mlp(key):
    return eqx.nn.MLP(in_size=3, out_size="scalar", width_size=4, depth=1, activation=jnp.tanh, key=key)


def cast_as(weights, x):
    """The inputs in the dtype of the weights, which is that of an `est.Policy`."""
    return x.astype(jax.tree.leaves(weights)[0].dtype)


def haiku_mlp(x):
    weights = est.get_variable("net", lambda key: MLP.init(key, x))
    return MLP.apply(weights, est.make_rng(), cast_as(weights, x))


def equinox_mlp(x):
    weights = est.get_variable("net", lambda key: eqx.filter(make_mlp(key), eqx.is_array))
    net = eqx.combine(weights, eqx.filter(make_mlp(jax.random.key(0)), eqx.is_array, inverse=True))
    return jax.vmap(net)(cast_as(weights, x))


def model_fn_of(forward):
    return regressing(forward, MOMENTUM)


def trained(model, batches):
    x, y = batches
    state = model.init(jax.random.key(0), x[0], y[0])
    after, spec = model.train_loop(state, batches)
    return state, after, spec


def by_hand(net, apply, batches):
    """The losses of a plain loop, and what it makes of the arrays in `net`."""
    return train_by_hand(net, lambda net, _, i, x, y: (jnp.mean((apply(net, x) - y) ** 2), None), batches)[:2]


def test_training_a_haiku_model_equals_a_hand_written_loop():
    batches = regression(ROWS)
    state, after, spec = trained(est.transform(model_fn_of(haiku_mlp)), batches)
    weights = jax.jit(MLP.init)(jax.random.fold_in(state.key, name_hash("net")), batches[0][0])
    assert_close(state.variables["net"], weights)
    losses, weights = by_hand(weights, lambda net, x: MLP.apply(net, None, x), batches)
    assert_close(spec.loss, losses)
    assert_close(after.variables["net"], weights)


def test_training_an_equinox_model_equals_a_hand_written_loop():
    batches = regression(ROWS)
    state, after, spec = trained(est.transform(model_fn_of(equinox_mlp)), batches)
    net = make_mlp(jax.random.fold_in(state.key, name_hash("net")))
    weights, rest = eqx.partition(net, eqx.is_array)
    assert_close(state.variables["net"], weights)
    losses, weights = by_hand(weights, lambda net, x: jax.vmap(eqx.combine(net, rest))(x), batches)
    assert_close(spec.loss, losses)
    assert_close(after.variables["net"], weights)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [haiku_mlp, equinox_mlp])
@pytest.mark.usefixtures("users_compiler")
def test_a_policy_is_what_casts_by_hand_are(forward):
    batches = regression(ROWS)
    state, after, spec = trained(est.transform(est.Policy("bfloat16")(model_fn_of(forward))), batches)
    _, rest = eqx.partition(make_mlp(jax.random.key(0)), eqx.is_array)

    def apply(net, x):
        net, x = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (net, x))
        output = MLP.apply(net, None, x) if forward is haiku_mlp else jax.vmap(eqx.combine(net, rest))(x)
        return output.astype(jnp.float32)

    losses, weights = by_hand(state.variables["net"], apply, batches)
    assert_close(spec.loss, losses)
    assert_close(after.variables["net"], weights)
    _, _, single = trained(est.transform(model_fn_of(forward)), batches)
    assert (spec.loss != single.loss).all()
    np.testing.assert_allclose(spec.loss, single.loss, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [haiku_mlp, equinox_mlp])
def test_towers_equal_one_big_batch(forward):
    batches = regression(ROWS)
    _, want, want_spec = trained(est.transform(model_fn_of(forward)), batches)
    _, got, spec = trained(est.transform(replicate(model_fn_of(forward), 2)), batches)
    assert_close((got.variables, got.slots, spec.loss), (want.variables, want.slots, want_spec.loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "name"), [(haiku_mlp, "net/mlp/~/linear_0/w"), (equinox_mlp, "net/layers/0/weight")]
)
def test_an_estimator_saves_the_model_by_readable_names_and_reads_it_again(forward, name, tmp_path):
    x, y = regression(ROWS)
    one = make(tmp_path, model_fn_of(forward)).train(lambda: list(zip(x, y, strict=True)))
    other = make(tmp_path, model_fn_of(forward))
    assert name in other.get_variable_names()
    np.testing.assert_array_equal(*(list(each.predict(lambda: [x[0]])) for each in (one, other)))


def normalized(axis):
    net = hk.transform_with_state(lambda x, train: hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)(x, train))
    first = est.VariableAggregation.ONLY_FIRST_TOWER

    def forward(x):
        weights = est.get_variable("net", lambda key: net.init(key, x, True)[0])
        state = est.get_variable("state", lambda key: net.init(key, x, True)[1], trainable=False, aggregation=first)
        output, state = net.apply(weights, state, est.make_rng(), x, True)
        est.assign("state", state)
        return output.sum(-1)

    return forward


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # Haiku's batch norm takes a float to the power of an integer
def test_a_haiku_batch_norm_over_all_towers_equals_one_big_batch():
    batches = regression(ROWS)
    _, want, _ = trained(est.transform(model_fn_of(normalized(None))), batches)
    model = est.transform(replicate(model_fn_of(normalized(TOWER_AXIS)), 2))
    _, got, _ = trained(model, batches)
    assert_close((got.variables, got.slots), (want.variables, want.slots))
    mean = got.variables["state"]["batch_norm/~/mean_ema"]
    assert mean["counter"] == len(batches[0])
    parts = batches[0].mean(1)
    np.testing.assert_allclose(
        mean["hidden"][0], parts[0] * 0.081 + parts[1] * 0.09 + parts[2] * 0.1, rtol=1e-5, atol=1e-6
    )


def test_an_equinox_model_with_its_functions_is_refused_with_the_way_out():
    def forward(x):
        return jax.vmap(est.get_variable("net", make_mlp))(x)

    message = r"every leaf of the initial value must be an array; .* at \.activation\."
    with pytest.raises(ValueError, match=message + r".*`eqx.filter\(model, eqx.is_array\)`"):
        trained(est.transform(model_fn_of(forward)), regression(ROWS))


@pytest.mark.parametrize("model", [MLP, make_mlp], ids=["haiku", "equinox"])
def test_flax_module_names_the_way_for_models_of_other_libraries(model):
    with pytest.raises(TypeError, match="For models of other libraries use `est.get_variable`"):
        trained(est.transform(model_fn_of(lambda x: est.flax_module(model, "net")(x))), regression(ROWS))
