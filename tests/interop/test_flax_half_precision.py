"""Flax modules under an `est.Policy`: they compute in its dtype as Flax does with `dtype=`; all else is in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import make
from testing.model_fns import minimizing, train_by_hand, train_nnx_by_hand
from testing.towers import assert_close, regression, replicate

import estimator as est
from estimator.core._rng import name_hash
from replicate import TOWER_AXIS, TowerOptimizer

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

KINDS = ["linen", "nnx"]
HALF = jnp.bfloat16
ROWS = 8


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote half precision to float32
        yield


class Linen(nn.Module):
    axis: str | None = None
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16, dtype=self.dtype)(x)
        x = nn.BatchNorm(not train, momentum=0.9, axis_name=self.axis, dtype=self.dtype)(x)
        return nn.Dense(1, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(jnp.tanh(x)))[:, 0]


class NNX(nnx.Module):
    def __init__(self, axis=None, own=None, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 16, dtype=own, rngs=rngs), nnx.Linear(16, 1, dtype=own, rngs=rngs)])
        self.batch_norm = nnx.BatchNorm(16, momentum=0.9, axis_name=axis, dtype=own, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(16, dtype=own, rngs=rngs)

    def __call__(self, x):
        x = self.batch_norm(self.layers[0](x))
        return self.layers[1](self.layer_norm(jnp.tanh(x)))[:, 0]


def model_fn_of(kind, seen=None, **how):
    def model_fn(features, labels, mode):
        if kind == "linen":
            output = est.flax_module(Linen(**how), "net")(features, train=mode == est.ModeKeys.TRAIN)
        else:
            output = est.flax_module(functools.partial(NNX, **how), "net")(features)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output})
        loss = est.losses.mean_squared_error(labels, output)
        optimizer = TowerOptimizer(optax.sgd(0.1, momentum=0.9))
        gradients = optimizer.compute_gradients(loss)
        if seen is not None:
            seen.append((output.dtype, {x.dtype for x in jax.tree.leaves([gradient for gradient, _ in gradients])}))
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(gradients))

    return model_fn


def trained(model_fn, state=None):
    x, y = regression(ROWS)
    model = est.transform(model_fn)
    state = model.init(jax.random.key(0), x[0], y[0]) if state is None else state
    return state, *model.train_loop(state, (x, y))


@functools.cache
def under_a_policy(kind):
    """The state that training on one device starts from, and what it comes to."""
    return trained(est.Policy(HALF)(model_fn_of(kind)))


def linen_by_hand(state):
    """The losses and variables of a loop whose layers have a dtype."""

    def loss_fn(params, stats, i, x, y):
        variables = {"params": params, "batch_stats": stats}
        output, updates = Linen(dtype=HALF).apply(variables, x, True, mutable=["batch_stats"])
        return jnp.mean((output.astype(jnp.float32) - y) ** 2), updates["batch_stats"]

    start = state.variables["net"], state.variables["net/batch_stats"]
    losses, params, stats = train_by_hand(start[0], loss_fn, regression(ROWS), start[1])
    return losses, {"net": params, "net/batch_stats": stats}


def nnx_by_hand(state):
    model = NNX(own=HALF, rngs=nnx.Rngs(jax.random.fold_in(state.key, name_hash("net"))))
    return train_nnx_by_hand(model, regression(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("users_compiler")
def test_a_policy_is_what_flax_computes_with_a_dtype_by_hand(kind):
    state, after, spec = trained(est.Policy(HALF)(model_fn_of(kind)))
    losses, variables = linen_by_hand(state) if kind == "linen" else nnx_by_hand(state)
    assert_close(spec.loss, losses)
    assert_close(after.variables, variables)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_computation_is_in_half_precision(kind):
    seen = []
    state, got, spec = under_a_policy(kind)
    x, y = regression(ROWS)
    jax.eval_shape(est.transform(est.Policy(HALF)(model_fn_of(kind, seen))).train_step, state, x[0], y[0])
    assert set(map(repr, seen)) == {repr((jnp.dtype(HALF), {jnp.dtype("float32")}))}
    _, want, want_spec = trained(model_fn_of(kind), state)
    assert {x.dtype for x in jax.tree.leaves((got.variables, got.slots, spec.loss))} == {jnp.dtype("float32")}
    assert (spec.loss != want_spec.loss).all()
    np.testing.assert_allclose(spec.loss, want_spec.loss, rtol=0.05)
    assert_close(got.variables["net/batch_stats"], want.variables["net/batch_stats"], rtol=0.05, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_towers_equal_one_big_batch(kind):
    state, want, want_spec = under_a_policy(kind)
    _, got, spec = trained(est.Policy(HALF)(replicate(model_fn_of(kind, axis=TOWER_AXIS), 2)), state)
    assert_close(spec.loss[0], want_spec.loss[0])
    # Each tower rounds its gradients to bfloat16, before they are summed in float32.
    assert_close(spec.loss, want_spec.loss, rtol=0.01)
    assert_close(got.variables, want.variables, rtol=0.01, atol=0.005)


@pytest.mark.slow
def test_a_checkpoint_is_in_float32(tmp_path):
    x, y = regression(ROWS)
    estimator = make(tmp_path, est.Policy(HALF)(model_fn_of("linen"))).train(lambda: list(zip(x, y, strict=True)))
    names = [name for name in estimator.get_variable_names() if name.startswith(("net", "optimizer"))]
    assert {str(estimator.get_variable_value(name).dtype) for name in names} == {"float32"}
    assert [p["output"].dtype for p in estimator.predict(lambda: x[0])] == [jnp.dtype(HALF)] * ROWS
    other = make(tmp_path, model_fn_of("linen"))  # without the policy
    assert np.isfinite(other.evaluate(lambda: [(x[0], y[0])])["loss"])


def test_a_loss_of_the_library_is_in_float32_and_one_by_hand_in_half_precision_is_named(messages):
    by_hand = minimizing(lambda x, y: jnp.mean(est.flax_module(nn.Dense(1, dtype=HALF), "net")(x) ** 2))
    assert trained(model_fn_of("linen", dtype=HALF))[2].loss.dtype == jnp.float32
    assert not messages()
    trained(replicate(by_hand, 2))
    assert [message for message in messages() if "loss" in message] == [
        "The loss is computed in bfloat16, which keeps two or three digits. Cast what it is made of, "
        "`logits.astype(jnp.float32)`, or use `est.losses`, which do."
    ]


class Raw(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (3, 2), x.dtype)


class RawNNX(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((3, 2), HALF))

    def __call__(self, x):
        return x @ self.w[...]


WORDS = np.arange(4)[:, None]
FLOATS = np.ones((4, 3), np.float32)


# A module, its input, and the dtype of its output.
OUTPUTS = {
    "parameters of its own": (Raw(), FLOATS, "bfloat16"),
    "parameters of its own, NNX": (RawNNX, FLOATS, "bfloat16"),
    "embedding": (nn.Embed(4, 2), WORDS, "bfloat16"),
    "embedding, NNX": (lambda rngs: nnx.Embed(4, 2, rngs=rngs), WORDS, "bfloat16"),
    "statistics": (nn.BatchNorm(True), FLOATS, "bfloat16"),
    "statistics, NNX": (lambda rngs: nnx.BatchNorm(3, rngs=rngs), FLOATS, "bfloat16"),
    "last in float32": (nn.Sequential([nn.Dense(4), nn.Dense(2, dtype=jnp.float32)]), FLOATS, "float32"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_the_output_is_in_half_precision_and_the_parameters_in_float32(case):
    module, x, wanted = OUTPUTS[case]

    @est.Policy(HALF)
    def model_fn(features, labels, mode):
        net = est.flax_module(module, "net")
        output = net(features)
        assert output.dtype == net(features).dtype == wanted  # in `init`, too
        with est.Policy("float32"):
            assert net(features).dtype == jnp.float32
        return est.EstimatorSpec(mode, predictions=output)

    model = est.transform(model_fn)
    state = model.abstract_init(x, mode="infer")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.variables)} == {"float32"}
    assert jax.eval_shape(model.predict_step, state, x).predictions.dtype == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_a_dtype_of_its_own_computes_in_it_and_the_log_says_so(kind, messages):
    own = {"dtype": jnp.float32}
    module = nn.Dense(1, **own) if kind == "linen" else functools.partial(nnx.Linear, 3, 1, **own)

    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y[:, None], est.flax_module(module, "net")(x)))
    (_, want, _), (_, got, _) = trained(model_fn), trained(est.Policy(HALF)(model_fn))
    assert_close(got.variables, want.variables, rtol=0, atol=0)
    (said,) = [message for message in messages() if "`est.Policy`" in message]
    assert said == (
        "The module 'net' computes in float32, since its `dtype` says so, and not in bfloat16, as the `est.Policy` "
        "around it: write `dtype=None`, or `with est.Policy('float32'):` around its call."
    )
