"""Flax modules as a part of a model_fn: Linen modules and NNX models alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import make
from testing.model_fns import predicting, regressing, train_by_hand, train_nnx_by_hand
from testing.towers import assert_close, regression, replicate

import estimator as est
from estimator.core._rng import name_hash
from replicate import TOWER_AXIS, TowerOptimizer

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

KINDS = ["linen", "nnx"]
ROWS = 8


class Linen(nn.Module):
    """Takes whether it trains as an argument."""

    axis: str | None = None
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(1)(x)[:, 0]


class NNX(nnx.Module):
    """The same; it knows itself whether it trains."""

    def __init__(self, axis=None, rate=0.0, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 4, use_bias=False, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, momentum=0.9, axis_name=axis, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(jnp.tanh(self.norm(self.layers[0](x))))
        return self.layers[1](x)[:, 0]


def taken_in(kind, mode, **how):
    """A function of the features alone, the module in it called "net"."""
    if kind == "nnx":
        return est.flax_module(functools.partial(NNX, **how), "net")
    net = est.flax_module(Linen(**how), "net")
    return lambda x: net(x, train=mode == est.ModeKeys.TRAIN)


def model_fn_of(forward, optimizer=lambda: optax.sgd(0.1, momentum=0.9), **how):
    """A regression whose predictions are `forward(mode)(features)`."""
    return lambda features, labels, mode: regressing(forward(mode), optimizer, **how)(features, labels, mode)


def net_model_fn(kind, **how):
    return model_fn_of(lambda mode: taken_in(kind, mode, **how))


def started(model, batches=None, seed=0, **how):
    x, y = regression(ROWS) if batches is None else batches
    return model.init(jax.random.key(seed), x[0], y[0], **how)


def linen_by_hand(state, batches, net):
    """The losses and the variables of a training loop from the values of `state`."""

    def loss_fn(params, stats, i, x, y):
        key = jax.random.fold_in(jax.random.fold_in(state.key, i), name_hash("net/dropout"))
        rngs = {"dropout": jax.random.fold_in(key, 1)}
        variables = {"params": params, "batch_stats": stats}
        output, updates = net.apply(variables, x, True, rngs=rngs, mutable=["batch_stats"])
        return jnp.mean((output - y) ** 2), updates["batch_stats"]

    start = state.variables["net"], state.variables["net/batch_stats"]
    losses, params, stats = train_by_hand(start[0], loss_fn, batches, start[1])
    return losses, {"net": params, "net/batch_stats": stats}


def nnx_by_hand(state, batches):
    return train_nnx_by_hand(NNX(rngs=nnx.Rngs(jax.random.fold_in(state.key, name_hash("net")))), batches)


@pytest.mark.quick
@pytest.mark.covers("11 model_to_estimator")
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_training_equals_a_hand_written_loop(kind):
    batches, how = regression(ROWS), {"rate": 0.5} if kind == "linen" else {}
    model = est.transform(net_model_fn(kind, **how))
    state = started(model)
    after, spec = model.train_loop(state, batches)
    by_hand = linen_by_hand(state, batches, Linen(**how)) if kind == "linen" else nnx_by_hand(state, batches)
    assert_close((spec.loss, after.variables), by_hand)


def test_a_linen_module_starts_as_flax_and_get_variable_start_it():
    x = regression(ROWS)[0][0]
    initial = jax.jit(lambda key: Linen().init(key, x, False))

    model = est.transform(predicting(lambda x: est.get_variable("net", lambda key: initial(key)["params"])))
    by_get_variable = model.init(jax.random.key(0), x, mode="infer").variables
    variables = one_big_batch("linen")[0].variables
    assert_close(variables["net"], by_get_variable["net"], rtol=0, atol=0)
    assert_close(variables["net/batch_stats"], initial(jax.random.key(1))["batch_stats"], rtol=0, atol=0)


@functools.cache
def one_big_batch(kind):
    """The state that training starts from, and what it comes to on one device."""
    batches = regression(ROWS)
    model = est.transform(net_model_fn(kind))
    state = started(model)
    return state, *model.train_loop(state, batches)


@pytest.mark.slow
@pytest.mark.covers("11 flax_module: parameters and statistics")
@pytest.mark.parametrize("kind, towers", [("linen", 4), ("nnx", 2)])
def test_towers_with_sync_batch_norm_equal_one_big_batch(kind, towers):
    state, want, want_spec = one_big_batch(kind)
    model = est.transform(replicate(net_model_fn(kind, axis=TOWER_AXIS), towers))
    assert_close(started(model).variables, state.variables)
    got, spec = model.train_loop(state, regression(ROWS))
    assert_close((got.variables, got.slots), (want.variables, want.slots))
    assert_close((spec.loss, spec.predictions), (want_spec.loss, want_spec.predictions))
    before, after = state.variables["net/batch_stats"], got.variables["net/batch_stats"]
    assert not jax.tree.all(jax.tree.map(np.allclose, before, after))


@pytest.mark.slow
@pytest.mark.covers("11 flax_module: parameters and statistics")
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_uses_the_statistics_of_training(kind):
    x, y = (each[0, :7] for each in regression(ROWS))
    model = est.transform(replicate(net_model_fn(kind, axis=TOWER_AXIS, rate=0.5), 2))
    state = one_big_batch(kind)[1]
    params, stats = state.variables["net"], state.variables["net/batch_stats"]
    dense, norm = (("Dense_0", "Dense_1"), "BatchNorm_0") if kind == "linen" else ((0, 1), "norm")
    layers = [(params if kind == "linen" else params["layers"])[name] for name in dense]
    mean, var = stats[norm]["mean"], stats[norm]["var"]
    h = (x @ layers[0]["kernel"] - mean) / jnp.sqrt(var + 1e-5)
    h = jnp.tanh(h * params[norm]["scale"] + params[norm]["bias"])
    want = (h @ layers[1]["kernel"] + layers[1]["bias"])[:, 0]
    assert_close(model.eval_step(state, x, y).predictions, want)
    assert_close(model.predict_step(state, x).predictions, want)


def test_a_linen_module_must_not_change_its_statistics_in_evaluation():
    model = est.transform(model_fn_of(lambda mode: functools.partial(est.flax_module(Linen(), "net"), train=True)))
    x, y = regression(ROWS)
    state = started(model)
    with pytest.raises(nn.module.errors.ModifyScopeVariableError, match="batch_stats"):
        model.eval_step(state, x[0], y[0])


@pytest.mark.slow
@pytest.mark.covers("11 flax_module: rngs")
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_differs_by_step_and_tower_and_repeats_with_the_seed(kind):
    def model_fn(features, labels, mode):
        make = (lambda rngs: nnx.Dropout(0.5, rngs=rngs)) if kind == "nnx" else nn.Dropout(0.5, deterministic=False)
        output = est.flax_module(make, "drop")(features)
        w = est.get_variable("w", ())
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(w**2)
        return est.EstimatorSpec(mode, predictions=output, loss=w**2, train_op=train_op)

    model, x = est.transform(replicate(model_fn, 2)), jnp.ones((3, 2, 64))  # the towers and the steps see the same row

    def run(seed):
        state = model.init(jax.random.key(seed), x[0])
        assert list(state.variables) == ["w"]
        return np.array(model.train_loop(state, (x, None))[1].predictions)

    masks = run(0)
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert len({mask.tobytes() for mask in masks.reshape(6, 64)}) == 6
    np.testing.assert_array_equal(run(0), masks)
    assert (run(1) != masks).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_computed_in_the_middle_match_minimize(kind):
    """The model_fn runs twice then; nothing of its first run is left."""
    x, y = regression(ROWS)

    def model_fn(features, labels, mode):
        loss = jnp.mean((taken_in(kind, mode, rate=0.5)(features) - labels) ** 2)
        optimizer = TowerOptimizer(optax.sgd(0.1, momentum=0.9))
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(optimizer.compute_gradients(loss)))

    want, got = (est.transform(replicate(fn, 2)) for fn in (net_model_fn(kind, rate=0.5), model_fn))
    state = started(want)
    got, want = (model.train_loop(state, (x, y))[0] for model in (got, want))
    assert_close((got.variables, got.slots), (want.variables, want.slots))


def batch_norm(kind, mode, momentum):
    if kind == "linen":
        return est.flax_module(nn.BatchNorm(use_running_average=mode != "train", momentum=momentum), "net")
    return est.flax_module(lambda rngs: nnx.BatchNorm(3, momentum=momentum, rngs=rngs), "net")


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_average_the_statistics(kind):
    def forward(mode):
        net = batch_norm(kind, mode, momentum=0.9)
        return lambda x: net(x).sum(-1)

    x, y = regression(ROWS)
    model = est.transform(replicate(model_fn_of(forward, accumulate_steps=2), 2))
    state, _ = model.train_step(started(model), x[0], y[0])
    parts = x[0].reshape(4, 2, 3)
    want = {"mean": 0.1 * parts.mean((0, 1)), "var": 0.9 + 0.1 * parts.var(1).mean(0)}
    assert_close(jax.tree.map(np.asarray, state.variables["net/batch_stats"]), want)


class Count(nn.Module):
    start: int | float = 0

    @nn.compact
    def __call__(self, x):
        calls = self.variable("counts", "calls", lambda: jnp.asarray(self.start))
        if not self.is_initializing():
            calls.value += 1
        return x * self.param("w", nn.initializers.ones, ())


class Counter(nnx.Variable):
    pass


class CountNNX(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.float32(1))
        self.calls = Counter(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x * self.w[...]


@pytest.mark.parametrize(("module", "name"), [(Count(), "net/counts"), (CountNNX, "net/Counter")], ids=KINDS)
def test_a_counter_counts_once_per_call_whatever_the_towers(module, name):
    def forward(mode):
        net = est.flax_module(module, "net")
        return lambda x: net(net(x)).sum(-1)

    x, y = regression(ROWS)
    model = est.transform(replicate(model_fn_of(forward, lambda: optax.sgd(0.1)), 2))
    state, _ = model.train_loop(started(model), (x, y))
    assert state.variables[name]["calls"] == 2 * len(x)
    assert state.variables[name]["calls"].dtype == jnp.int32


@pytest.mark.parametrize("kind", KINDS)
def test_calls_share_the_variables_and_later_ones_see_what_earlier_ones_assigned(kind):
    def forward(mode):
        net = batch_norm(kind, mode, momentum=0.5)
        return lambda x: (net(x) + net(x + 1)).sum(-1)

    x, y = regression(ROWS)
    model = est.transform(model_fn_of(forward, lambda: optax.sgd(1.0)))
    state, _ = model.train_step(started(model), x[0], y[0])
    mean = x[0].mean(0)
    np.testing.assert_allclose(state.variables["net/batch_stats"]["mean"], 0.75 * mean + 0.5, rtol=1e-5, atol=1e-6)

    def loss(scale):
        normal = (x[0] - mean) / jnp.sqrt(x[0].var(0) + 1e-5)
        return jnp.mean(((2 * normal * scale).sum(-1) - y[0]) ** 2)

    want = 1 - jax.grad(loss)(jnp.ones(3))
    np.testing.assert_allclose(state.variables["net"]["scale"], want, rtol=1e-4, atol=1e-5)


class Autoencoder(nn.Module):
    def setup(self):
        self.down, self.up = nn.Dense(2), nn.Dense(3)

    def __call__(self, x):
        return self.up(self.encode(x))

    def encode(self, x):
        return self.down(x)


class AutoencoderNNX(nnx.Module):
    def __init__(self, rngs):
        self.down, self.up = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        return self.up(self.encode(x))

    def encode(self, x):
        return self.down(x)


@pytest.mark.parametrize("module", [Autoencoder(), AutoencoderNNX], ids=KINDS)
def test_another_method_can_be_called_by_name(module):
    def both(features):
        net = est.flax_module(module, "net")
        return {"whole": net(features), "code": net(features, method="encode")}

    x = regression(ROWS)[0][0]
    model = est.transform(predicting(both))
    state = model.init(jax.random.key(0), x, mode="infer")
    down, up = state.variables["net"]["down"], state.variables["net"]["up"]
    code = x @ down["kernel"] + down["bias"]
    assert_close(model.predict_step(state, x).predictions, {"code": code, "whole": code @ up["kernel"] + up["bias"]})


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_in_the_scope_it_was_made_in(kind):
    def forward(mode):
        with est.variable_scope("tower"):
            net = taken_in(kind, mode)

        def call(x):
            with est.variable_scope("elsewhere", reuse=True):  # of the variables there
                return net(x)

        return call

    x, y = (each[0] for each in regression(ROWS))
    model = est.transform(model_fn_of(forward))
    state, _ = jax.eval_shape(model.train_step, model.abstract_init(x, y), x, y)
    assert list(state.variables) == ["tower/net", "tower/net/batch_stats"]
    assert jax.eval_shape(model.predict_step, state, x).predictions.shape == (ROWS,)


def test_a_scope_with_reuse_gives_the_same_module_again():
    def forward(mode):
        def call(x):
            with est.variable_scope("tower", reuse=est.AUTO_REUSE):
                return est.flax_module(nn.Dense(3), "net")(x)

        return lambda x: call(call(x)).sum(-1)

    x, y = (each[0] for each in regression(ROWS))
    model = est.transform(model_fn_of(forward))
    state, _ = jax.eval_shape(model.train_step, model.abstract_init(x, y), x, y)
    assert list(state.variables) == ["tower/net"]
    assert state.variables["tower/net"]["kernel"].shape == (3, 3)


@pytest.mark.covers("11 flax_module: rngs")
def test_streams_of_other_names_get_keys_of_their_own():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.stack([jax.random.normal(self.make_rng(s), x.shape[:1]) for s in ("dropout", "noise")], -1)

    model_fn = predicting(lambda x: est.flax_module(Noise(), "net", rngs=("dropout", "noise"))(x))
    model = est.transform(model_fn)
    x = jnp.ones((4, 1))
    noise = model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions
    assert len(np.unique(noise)) == 8


def test_variables_beside_the_module_may_have_its_prefix_if_they_come_first():
    def forward(mode):
        with est.variable_scope("net"):
            scale = est.get_variable("scale", (), initializer=jax.nn.initializers.ones)
        net = taken_in("linen", mode)
        return lambda x: scale * net(x)

    x, y = regression(ROWS)
    model = est.transform(model_fn_of(forward, lambda: optax.sgd(0.1)))
    state, _ = model.train_step(started(model), x[0], y[0])
    want, _ = est.transform(net_model_fn("linen")).train_step(one_big_batch("linen")[0], x[0], y[0])
    assert state.variables.keys() == {"net/scale", "net", "net/batch_stats"}
    assert_close({name: state.variables[name] for name in want.variables}, want.variables)
    assert state.variables["net/scale"] != 1


@pytest.mark.slow
@pytest.mark.covers("11 flax_module: parameters and statistics")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("users_compiler")
def test_an_estimator_saves_a_module_by_readable_names_and_resumes_from_it(kind, tmp_path):
    x, y = regression(ROWS)
    batches = list(zip(x, y, strict=True))
    whole = make(tmp_path / "whole", net_model_fn(kind, rate=0.5)).train(lambda: batches)
    make(tmp_path / "parts", net_model_fn(kind, rate=0.5)).train(lambda: batches[:1])
    again = make(tmp_path / "parts", net_model_fn(kind, rate=0.5)).train(lambda: batches[1:])
    first, norm = ("Dense_0", "BatchNorm_0") if kind == "linen" else ("layers/0", "norm")
    names = {f"net/{first}/kernel", f"net/{norm}/scale", f"net/batch_stats/{norm}/mean"}
    assert names <= set(again.get_variable_names())
    for name in names:
        np.testing.assert_array_equal(again.get_variable_value(name), whole.get_variable_value(name))
    np.testing.assert_array_equal(*(list(each.predict(lambda: [x[0]])) for each in (whole, again)))


class Drops(nnx.Module):
    """Two layers that drop, and a parameter that a call changes."""

    def __init__(self, rngs):
        self.one, self.other = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
        self.shift = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        self.shift[...] = self.shift[...] + 1
        return jnp.stack([self.one(x), self.other(x)]) + self.shift


def test_layers_of_an_nnx_model_drop_by_keys_of_their_own_and_optimizers_alone_change_parameters():
    def model_fn(features, labels, mode):
        dropped = est.flax_module(Drops, "net")(features)
        return est.EstimatorSpec(mode, predictions=dropped, loss=dropped.sum(), train_op=est.group())

    x = jnp.ones((1, 64))
    model = est.transform(model_fn)
    state, spec = model.train_step(model.init(jax.random.key(0), x), x)
    one, other = spec.predictions
    assert (one != other).any() and set(np.unique(one)) == {1, 3}
    assert state.variables["net"] == {"shift": 0}


class Stack(nnx.Module):
    """Layers stacked by `nnx.vmap`, a layer used twice, and a parameter that is a tree."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(rngs.split(4))
        self.noise = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))(rngs.split(4))
        self.first = self.last = nnx.Linear(3, 3, rngs=rngs)
        self.scale = nnx.Param({"x": jnp.ones(3)})

    def __call__(self, x):
        scan = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return (self.last(scan(self.first(x), self.layers)) * self.scale["x"]).sum(-1)

    def masks(self, x):
        return nnx.vmap(lambda noise, x: noise(x), in_axes=(0, None))(self.noise, x)


@pytest.mark.slow
def test_an_nnx_model_may_stack_and_share_layers():
    batches = regression(ROWS)
    model_fn = model_fn_of(lambda mode: est.flax_module(Stack, "net"))
    plain, model = est.transform(model_fn), est.transform(replicate(model_fn, 2))
    state = started(plain)
    assert state.variables["net"]["layers"]["kernel"].shape == (4, 3, 3)
    assert ("first" in state.variables["net"]) != ("last" in state.variables["net"])
    assert_close(model.train_loop(state, batches)[0].variables, plain.train_loop(state, batches)[0].variables)

    def masks_fn(features, labels, mode):
        masks = est.flax_module(Stack, "net")(jnp.ones((1, 64)), method="masks")
        w = est.get_variable("w", ())
        train_op = est.Optimizer(optax.sgd(0.1)).minimize(w**2)
        return est.EstimatorSpec(mode, predictions=masks, loss=w**2, train_op=train_op)

    model = est.transform(masks_fn)
    _, spec = model.train_step(started(model), batches[0][0], batches[1][0])
    assert len({np.asarray(mask).tobytes() for mask in spec.predictions}) == 4
