"""Training in towers equals training on one big batch."""

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from replicate import TOWER_AXIS, TowerOptimizer, replicate_model_fn

STEPS = 3
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.02),
    "adamw": lambda: optax.adamw(0.02),
    "adagrad": lambda: optax.adagrad(0.1),
    "clipped_adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02)),
    "rmsprop": lambda: optax.rmsprop(0.01),
}
REDUCTIONS = {"sum": est.Reduction.SUM, "mean": est.Reduction.SUM_OVER_BATCH_SIZE}


def cpus(towers):
    return [f"/cpu:{i}" for i in range(towers)]


def replicate(model_fn, towers, reduction="mean"):
    return replicate_model_fn(model_fn, REDUCTIONS.get(reduction, reduction), cpus(towers))


def assert_close(got, want, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype, path
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=str(path))


def assert_same_training(model_fn, replicated, batches, **tolerance):
    """Both are trained from the same state; all that comes out is compared."""
    plain, towers = est.transform(model_fn), est.transform(replicated)
    first = jax.tree.map(lambda x: x[0], batches)
    state = plain.init(jax.random.key(0), *first)
    want_state, want = plain.train_loop(state, batches)
    got_state, got = towers.train_loop(state, batches)
    assert_close(got.loss, want.loss, **tolerance)
    assert_close(got_state.variables, want_state.variables, **tolerance)
    assert_close(got_state.slots, want_state.slots, **tolerance)
    assert_close(got.predictions, want.predictions, **tolerance)
    for name, metric in want.eval_metric_ops.items():
        results = [jax.vmap(lambda m: m.result())(m) for m in (got.eval_metric_ops[name], metric)]
        assert_close(*results, **tolerance)
    return got_state


def reduced(losses, reduction):
    return jnp.sum(losses) if reduction == "sum" else jnp.mean(losses)


def mlp_model_fn(optimizer, reduction="mean"):
    def model_fn(features, labels, mode):
        with est.variable_scope("hidden"):
            w = est.get_variable("w", (3, 4))
            b = est.get_variable("b", (4,), initializer=jax.nn.initializers.zeros)
        v = est.get_variable("v", (4, 1))
        output = (jnp.tanh(features @ w + b) @ v)[:, 0]
        losses = (output - labels) ** 2
        loss = reduced(losses, reduction)
        return est.EstimatorSpec(
            mode,
            predictions={"output": output, "positive": output > 0},
            loss=loss,
            train_op=TowerOptimizer(optimizer).minimize(loss),
            eval_metric_ops={
                "mean_loss": est.metrics.mean(losses),
                "accuracy": est.metrics.accuracy(labels > 0, output > 0),
            },
        )

    return model_fn


def regression(rows, seed=0, steps=STEPS):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, rows, 3)).astype(np.float32)
    return x, np.sin(x.sum(-1)).astype(np.float32)


# The core law.


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("towers", [1, 2, 3, 4, 8])
def test_towers_match_one_big_batch(towers, reduction):
    model_fn = mlp_model_fn(optax.sgd(0.02), reduction)
    assert_same_training(model_fn, replicate(model_fn, towers, reduction), regression(24))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_sees_the_gradient_of_the_big_batch(optimizer):
    model_fn = mlp_model_fn(OPTIMIZERS[optimizer])
    assert_same_training(model_fn, replicate(model_fn, 4), regression(16))


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_one_step_of_rate_one_shows_the_gradient_of_the_big_batch(towers):
    (x,), (y,) = regression(8, steps=1)

    def loss_fn(w):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (3,), initializer=jax.nn.initializers.ones)
        loss = jnp.mean((jnp.tanh(features @ w) - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(1.0)).minimize(loss))

    model = est.transform(replicate(model_fn, towers))
    state, spec = model.train_step(model.init(jax.random.key(0), x, y), x, y)
    loss, gradient = jax.value_and_grad(loss_fn)(jnp.ones(3))
    assert_close(spec.loss, loss)
    assert_close(1.0 - state.variables["w"], gradient)


trailing_shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
trees = st.recursive(
    trailing_shapes.map(lambda shape: {"leaf": shape}),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=2).map(lambda nodes: {"list": nodes}),
        st.tuples(children, children).map(lambda nodes: {"tuple": nodes}),
        st.dictionaries(st.sampled_from("ab"), children, min_size=1).map(lambda d: {"dict": d}),
    ),
    max_leaves=3,
)


def fill(tree, make):
    ((kind, value),) = tree.items()
    if kind == "leaf":
        return make(value)
    if kind == "dict":
        return {name: fill(child, make) for name, child in value.items()}
    return (tuple if kind == "tuple" else list)(fill(child, make) for child in value)


def over_rows(x):
    return x.reshape(x.shape[0], -1).mean(1)


def tree_model_fn(optimizer, reduction):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", lambda key: jax.tree.map(lambda x: jnp.ones(x.shape[1:]), features))
        v = est.get_variable("v", lambda key: jax.tree.map(lambda x: jnp.ones(x.shape[1:]), labels))
        outputs = jax.tree.map(lambda x, w: jnp.tanh(x * w), features, w)
        score = sum(over_rows(leaf) for leaf in jax.tree.leaves(outputs))

        def error(y, v):
            return over_rows((score.reshape(-1, *(1,) * v.ndim) * v - y) ** 2)

        losses = sum(jax.tree.leaves(jax.tree.map(error, labels, v)))
        loss = reduced(losses, reduction)
        train_op = TowerOptimizer(optimizer).minimize(loss)
        metrics = {"mean_loss": est.metrics.mean(losses)}
        predictions = (outputs, {"score": score})
        return est.EstimatorSpec(mode, predictions, loss, train_op, metrics)

    return model_fn


@settings(max_examples=10, deadline=None)
@given(
    features=trees,
    labels=trees,
    towers=st.sampled_from([1, 2, 3, 4, 8]),
    rows=st.integers(1, 3),
    reduction=st.sampled_from(["sum", "mean"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adagrad"]),
    seed=st.integers(0, 99),
)
def test_any_pytrees_of_features_and_labels(features, labels, towers, rows, reduction, optimizer, seed):
    rng = np.random.default_rng(seed)

    def make(shape):
        return rng.normal(size=(2, towers * rows, *shape)).astype(np.float32)

    batches = fill(features, make), fill(labels, make)
    model_fn = tree_model_fn(OPTIMIZERS[optimizer](), reduction)
    assert_same_training(model_fn, replicate(model_fn, towers, reduction), batches, rtol=5e-5, atol=1e-5)


# Weighted losses.

WEIGHTED = [
    est.Reduction.SUM,
    est.Reduction.MEAN,
    est.Reduction.SUM_OVER_BATCH_SIZE,
    est.Reduction.SUM_BY_NONZERO_WEIGHTS,
]


def weighted_model_fn(reduction, rate=0.1):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (3,), initializer=jax.nn.initializers.ones)
        output = features["x"] @ w
        loss = est.losses.mean_squared_error(labels, output, features["weight"], reduction)
        train_op = TowerOptimizer(optax.sgd(rate)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def uneven_weights(towers, rows):
    """Over the towers: a tenth, all, none; then a tenth again."""
    weights = np.zeros((STEPS, towers, rows), np.float32)
    weights[:, ::3, 0] = 3.0
    weights[:, 1::3, :] = np.linspace(0.1, 2, rows)
    return weights.reshape(STEPS, -1)


@pytest.mark.parametrize("reduction", WEIGHTED)
@pytest.mark.parametrize("towers", [2, 4, 8])
def test_weights_uneven_over_towers_give_the_global_mean(towers, reduction):
    x, y = regression(towers * 10)
    batches = {"x": x, "weight": uneven_weights(towers, 10)}, y
    model_fn = weighted_model_fn(reduction, 0.01 if reduction == est.Reduction.SUM else 0.1)
    assert_same_training(model_fn, replicate(model_fn, towers, reduction), batches)


@functools.cache
def weighted_models(reduction):
    model_fn = weighted_model_fn(reduction)
    return est.transform(model_fn), est.transform(replicate(model_fn, 4, reduction))


@settings(max_examples=20, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 7.0]), min_size=8, max_size=8),
    reduction=st.sampled_from(WEIGHTED),
)
def test_any_weights_give_the_global_mean(weights, reduction):
    one, four = weighted_models(reduction)
    (x,), (y,) = regression(8, steps=1)
    features = {"x": x, "weight": np.asarray(weights, np.float32)}
    state = one.init(jax.random.key(0), features, y)
    (plain, want), (towers, got) = (model.train_step(state, features, y) for model in (one, four))
    assert_close(got.loss, want.loss)
    assert_close(towers.variables, plain.variables)


@pytest.mark.parametrize("towers", [2, 4])
def test_gradients_flow_through_the_denominator_of_a_weighted_mean(towers):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (3,), initializer=jax.nn.initializers.ones)
        u = est.get_variable("u", (3,), initializer=jax.nn.initializers.ones)
        weights = jax.nn.sigmoid(features["x"] @ u) * features["weight"]
        loss = est.losses.mean_squared_error(labels, features["x"] @ w, weights, est.Reduction.MEAN)
        train_op = TowerOptimizer(optax.sgd(0.5)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    x, y = regression(towers * 10)
    batches = {"x": x, "weight": uneven_weights(towers, 10)}, y
    state = assert_same_training(model_fn, replicate(model_fn, towers), batches)
    assert np.abs(state.variables["u"] - 1).max() > 1e-3


def test_weights_that_are_all_zero_leave_the_variables_as_they_are():
    x, y = regression(8, steps=1)
    features, y = {"x": x[0], "weight": np.zeros(8, np.float32)}, y[0]
    model = est.transform(replicate(weighted_model_fn("weighted_mean"), 4))
    state, spec = model.train_step(model.init(jax.random.key(0), features, y), features, y)
    assert spec.loss == 0
    np.testing.assert_array_equal(state.variables["w"], np.ones(3))


# Variables that a model_fn writes.


def assign_model_fn(write, aggregation=est.VariableAggregation.MEAN, initial=0.0):
    """`write(rows of the tower)` is called with the variable "s" there."""

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        est.get_variable("s", initializer=initial, trainable=False, aggregation=aggregation)
        write(features)
        loss = jnp.mean(w * features)
        seen = jnp.broadcast_to(est.read_variable("s"), features.shape)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, predictions=seen, loss=loss, train_op=train_op)

    return model_fn


def one_step(model_fn, features, towers):
    model = est.transform(replicate(model_fn, towers))
    state = model.init(jax.random.key(0), features)
    return model.train_step(state, features)


FOUR = np.array([1.0, 2.0, 3.0, 6.0], np.float32)


@pytest.mark.parametrize("aggregation, want", [("mean", 3.0), ("sum", 12.0), ("only_first_tower", 1.0)])
def test_assign_merges_by_aggregation(aggregation, want):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0]), aggregation)
    state, spec = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == want
    np.testing.assert_array_equal(spec.predictions, FOUR)


def test_assign_add_sums_over_towers_and_is_seen_in_the_run():
    model_fn = assign_model_fn(lambda x: est.assign_add("s", x.sum()), initial=10.0)
    state, spec = one_step(model_fn, FOUR, 2)
    assert state.variables["s"] == 22.0
    np.testing.assert_array_equal(spec.predictions, [13.0, 13.0, 19.0, 19.0])


def test_assign_add_after_assign_adds_to_the_merged_value():
    def write(x):
        est.assign_add("s", 1000.0)  # lost, as the assignment follows
        est.assign("s", x[0])
        est.assign_add("s", 10.0)

    state, _ = one_step(assign_model_fn(write), FOUR, 4)
    assert state.variables["s"] == 3.0 + 40.0


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_an_integer_counter_counts_every_tower(towers):
    model_fn = assign_model_fn(lambda x: est.assign_add("s", 1), initial=np.int32(5))
    state, _ = one_step(model_fn, FOUR, towers)
    assert state.variables["s"] == 5 + towers
    assert state.variables["s"].dtype == jnp.int32


@pytest.mark.parametrize("aggregation, want", [("sum", 12), ("only_first_tower", 1)])
def test_integers_are_assigned_by_sum_or_from_the_first_tower(aggregation, want):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0].astype(jnp.int32)), aggregation, np.int32(0))
    state, _ = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == want


def test_only_the_first_towers_value_counts_even_next_to_nan():
    model_fn = assign_model_fn(lambda x: est.assign("s", jnp.where(x[0] > 1, jnp.nan, x[0])), "only_first_tower")
    state, _ = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == 1.0


def test_a_pytree_of_statistics_is_averaged():
    def write(x):
        old = est.read_variable("s")
        est.assign("s", {"mean": 0.5 * old["mean"] + 0.5 * x.mean(), "max": x.max(keepdims=True)})

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        est.get_variable("s", initializer={"mean": 2.0, "max": jnp.zeros(1)}, trainable=False)
        write(features)
        loss = jnp.mean(w * features)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, _ = one_step(model_fn, FOUR, 2)
    assert_close(state.variables["s"], {"mean": jnp.float32(2.5), "max": jnp.full(1, 4.0)})


@pytest.mark.parametrize("mode", ["eval_step", "predict_step"])
def test_assignments_act_in_training_alone(mode):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0]))
    model = est.transform(replicate(model_fn, 2))
    state = model.init(jax.random.key(0), FOUR)
    spec = getattr(model, mode)(state, FOUR)
    np.testing.assert_array_equal(spec.predictions, np.zeros(4))


def test_the_state_is_the_same_on_every_device():
    model_fn = mlp_model_fn(optax.adam(0.1))
    x, y = regression(8)
    model = est.transform(replicate(model_fn, 4))
    state, _ = model.train_loop(model.init(jax.random.key(0), x[0], y[0]), (x, y))
    for leaf in jax.tree.leaves((state.variables, state.slots, state.global_step)):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert [shard.device for shard in leaf.addressable_shards] == jax.devices("cpu")[:4]
        for copy in copies:
            assert copy.shape == leaf.shape
            np.testing.assert_array_equal(copy, copies[0])


def batch_norm_model_fn(axis_name):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(4)(x)
            x = nn.BatchNorm(not train, momentum=0.9, axis_name=axis_name)(x)
            return nn.Dense(1)(jnp.tanh(x))[:, 0]

    net = Net()

    def model_fn(features, labels, mode):
        variables = est.get_variable("net", lambda key: Net().init(key, features, train=False)["params"])
        stats = est.get_variable(
            "stats",
            lambda key: Net().init(key, features, train=False)["batch_stats"],
            trainable=False,
        )
        output, written = net.apply(
            {"params": variables, "batch_stats": stats},
            features,
            train=mode == est.ModeKeys.TRAIN,
            mutable=["batch_stats"],
        )
        est.assign("stats", written["batch_stats"])
        loss = jnp.mean((output - labels) ** 2)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, output, loss, train_op)

    return model_fn


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_batch_norm_over_the_tower_axis_matches_one_big_batch(towers):
    state = assert_same_training(
        batch_norm_model_fn(None),
        replicate(batch_norm_model_fn(TOWER_AXIS), towers),
        regression(8),
        rtol=1e-4,
        atol=1e-5,
    )
    (stats,) = state.variables["stats"].values()
    assert np.abs(stats["mean"]).max() > 1e-3


# Compiled programs.


@pytest.fixture
def compilations():
    """The list of compilations so far; grows by one at each."""
    events = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("towers", [1, 2])
def test_a_second_call_traces_and_compiles_nothing(towers, compilations):
    traces = []

    def model_fn(features, labels, mode):
        traces.append(mode)
        return mlp_model_fn(optax.adam(0.1))(features, labels, mode)

    x, y = regression(8)
    model = est.transform(replicate(model_fn, towers))
    first = model.init(jax.random.key(0), x[0], y[0])

    def all_steps(state):
        state, _ = model.train_step(state, x[0], y[0])
        state, _ = model.train_loop(state, (x, y))
        model.eval_step(state, x[0], y[0])
        return jax.block_until_ready(state)

    state = all_steps(first)
    model.eval_step(first, x[0], y[0])
    before = len(traces), len(compilations)
    assert all(before)
    all_steps(all_steps(state))
    model.eval_step(first, x[0], y[0])
    model.train_step(first, x[1], y[1])
    assert (len(traces), len(compilations)) == before


def test_a_train_loop_does_what_as_many_train_steps_do():
    x, y = regression(8)
    model = est.transform(replicate(mlp_model_fn(optax.adam(0.1)), 4))
    start = state = model.init(jax.random.key(0), x[0], y[0])
    losses = []
    for batch in zip(x, y, strict=True):
        state, spec = model.train_step(state, *batch)
        losses.append(spec.loss)
    looped, spec = model.train_loop(start, (x, y))
    assert_close(spec.loss, jnp.stack(losses))
    assert_close(looped.variables, state.variables)
    assert_close(looped.slots, state.slots)
    assert looped.global_step == state.global_step == STEPS


def compiled_train_step(model_fn, *batch):
    model = est.transform(model_fn)
    state = model.init(jax.random.key(0), *batch)
    return jax.jit(model.train_step).lower(state, *batch).compile().as_text()


def operations(program):
    """How often each operation stands in the text of an HLO program."""
    return collections.Counter(re.findall(r" = .*? ([a-z][a-z0-9-]*)\(", program))


def collectives(program):
    names = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    return {name: count for name, count in operations(program).items() if name.startswith(names)}


def without_metrics(model_fn):
    return lambda features, labels, mode: model_fn(features, labels, mode)._replace(eval_metric_ops=None)


def test_all_gradients_and_the_loss_go_in_one_all_reduce():
    x, y = regression(8, steps=1)
    model_fn = without_metrics(mlp_model_fn(optax.adam(0.1)))
    program = compiled_train_step(replicate(model_fn, 4), x[0], y[0])
    assert collectives(program) == {"all-reduce": 1}


def test_there_is_one_all_reduce_per_dtype():
    def model_fn(features, labels, mode):
        est.get_variable("seen", initializer=np.int32(0), trainable=False)
        est.get_variable("steps", initializer=np.int32(0), trainable=False)
        est.assign_add("seen", features.shape[0])
        est.assign_add("steps", (labels > 0).sum(dtype=jnp.int32))
        return without_metrics(mlp_model_fn(optax.adam(0.1)))(features, labels, mode)

    x, y = regression(8, steps=1)
    program = compiled_train_step(replicate(model_fn, 4), x[0], y[0])
    assert collectives(program) == {"all-reduce": 2}


def test_metrics_of_a_train_step_add_one_collective_at_most():
    x, y = regression(8, steps=1)
    program = compiled_train_step(replicate(mlp_model_fn(optax.adam(0.1)), 4), x[0], y[0])
    assert sum(collectives(program).values()) <= 2, collectives(program)


@pytest.mark.parametrize("optimizer", ["sgd", "clipped_adam"])
def test_one_device_runs_the_program_of_the_plain_model_fn(optimizer):
    model_fn = mlp_model_fn(OPTIMIZERS[optimizer]())
    x, y = regression(8, steps=1)
    plain, replicated = (operations(compiled_train_step(fn, x[0], y[0])) for fn in (model_fn, replicate(model_fn, 1)))
    assert plain["dot"] + plain["fusion"] > 2
    assert replicated == plain


# A replicated model_fn is a model_fn.


@pytest.mark.parametrize("towers", [1, 4])
def test_a_replicated_model_fn_can_be_wrapped(towers):
    inner = replicate(mlp_model_fn(optax.sgd(0.1)), towers)

    def wrapped(features, labels, mode, params):
        spec = inner(features, labels, mode)
        bias = params["bias"]
        shifted = spec.predictions | {"shifted": spec.predictions["output"] + bias}
        metrics = spec.eval_metric_ops | {"mean_shifted": est.metrics.mean(shifted["shifted"])}
        return spec._replace(predictions=shifted, eval_metric_ops=metrics, loss=2 * spec.loss)

    x, y = regression(8)
    plain = est.transform(mlp_model_fn(optax.sgd(0.1)))
    model = est.transform(wrapped, params={"bias": 1.0})
    state = model.init(jax.random.key(0), x[0], y[0])
    want_state, want = plain.train_step(plain.init(jax.random.key(0), x[0], y[0]), x[0], y[0])
    after, spec = model.train_step(state, x[0], y[0])
    assert_close(after.variables, want_state.variables)
    for got in (spec, model.eval_step(state, x[0][:7], y[0][:7])):
        shifted = want.predictions["output"][: len(got.predictions["shifted"])] + 1
        assert_close(got.predictions["shifted"], shifted)
        assert_close(got.eval_metric_ops["mean_shifted"].result(), shifted.mean())
    assert_close(spec.loss, 2 * want.loss)


def test_a_wrapped_model_fn_predicts():
    inner = replicate(tower_predictions, 4)

    def wrapped(features, labels, mode):
        spec = inner(features, labels, mode)
        return spec._replace(predictions={"half": spec.predictions / 2}, export_outputs=None)

    model = est.transform(wrapped)
    x = np.arange(7, dtype=np.float32)
    state = model.init(jax.random.key(0), x, mode="infer")
    spec = model.predict_step(state, x)
    assert_close(spec.predictions, {"half": jnp.asarray(x)})
    assert_close(spec.export_outputs["serving_default"].outputs, {"half": jnp.asarray(x)})


def tower_predictions(features, labels, mode):
    w = est.get_variable("w", (), initializer=jax.nn.initializers.constant(2.0))
    return est.EstimatorSpec(mode, predictions=w * features)


def test_a_wrapper_may_train_variables_of_its_own():
    inner = replicate(mlp_model_fn(optax.sgd(0.1)), 4)

    def wrapped(features, labels, mode):
        spec = inner(features, labels, mode)
        bias = est.get_variable("bias", (), initializer=jax.nn.initializers.zeros)
        loss = jnp.mean((bias - labels) ** 2)
        own = est.Optimizer(optax.sgd(0.5)).minimize(loss, var_list=["bias"])
        return spec._replace(train_op=est.group(spec.train_op, own))

    x, y = regression(8)
    plain = est.transform(mlp_model_fn(optax.sgd(0.1)))
    want, _ = plain.train_step(plain.init(jax.random.key(0), x[0], y[0]), x[0], y[0])
    model = est.transform(wrapped)
    state, _ = model.train_step(model.init(jax.random.key(0), x[0], y[0]), x[0], y[0])
    got = dict(state.variables)
    np.testing.assert_allclose(got.pop("bias"), y[0].mean(), rtol=1e-5)
    assert_close(got, want.variables)


@pytest.mark.parametrize("towers", [1, 2])
def test_a_scope_around_a_replicated_model_fn_prefixes_its_variables(towers):
    inner = replicate(tower_predictions, towers)

    def wrapped(features, labels, mode):
        with est.variable_scope("model"):
            return inner(features, labels, mode)

    model = est.transform(wrapped)
    state = model.init(jax.random.key(0), FOUR, mode="infer")
    assert set(state.variables) == {"model/w"}
    assert_close(model.predict_step(state, FOUR).predictions, jnp.asarray(2 * FOUR))


@pytest.mark.parametrize("towers", [1, 2])
def test_a_wrapper_and_its_towers_draw_different_keys(towers):
    def draw(features, labels, mode):
        noise = jax.random.uniform(est.make_rng(), features.shape)
        return est.EstimatorSpec(mode, predictions={"inner": noise})

    inner = replicate(draw, towers)

    def wrapped(features, labels, mode):
        before = jax.random.uniform(est.make_rng(), features.shape)
        spec = inner(features, labels, mode)
        after = jax.random.uniform(est.make_rng(), features.shape)
        draws = spec.predictions | {"before": before, "after": after}
        return spec._replace(predictions=draws, export_outputs=None)

    model = est.transform(wrapped)
    state = model.init(jax.random.key(0), FOUR, mode="infer")
    draws = model.predict_step(state, FOUR).predictions
    assert len(np.unique(np.concatenate(list(draws.values())))) == 3 * len(FOUR)


@pytest.mark.parametrize("towers", [1, 2])
def test_a_wrapper_that_minimizes_first_has_slots_of_its_own(towers):
    inner = replicate(mlp_model_fn(optax.adam(0.1)), towers)

    def wrapped(features, labels, mode):
        bias = est.get_variable("bias", (), initializer=jax.nn.initializers.zeros)
        loss = jnp.mean((bias - labels) ** 2)
        own = est.Optimizer(optax.sgd(0.5, momentum=0.9)).minimize(loss, var_list=["bias"])
        spec = inner(features, labels, mode)
        return spec._replace(train_op=est.group(own, spec.train_op))

    x, y = regression(8)
    model = est.transform(wrapped)
    state, _ = model.train_step(model.init(jax.random.key(0), x[0], y[0]), x[0], y[0])
    assert set(state.slots) == {"optimizer", "optimizer_1"}
    np.testing.assert_allclose(state.variables["bias"], y[0].mean(), rtol=1e-5)


class Hook:
    def begin(self, *args):
        pass

    def end(self, *args):
        pass


@pytest.mark.parametrize("towers", [1, 4])
def test_hooks_are_taken_once(towers):
    hook = Hook()

    def model_fn(features, labels, mode):
        spec = mlp_model_fn(optax.sgd(0.1))(features, labels, mode)
        return spec._replace(training_hooks=[hook], evaluation_hooks=[hook])

    x, y = regression(8, steps=1)
    model = est.transform(replicate(model_fn, towers))
    state = model.init(jax.random.key(0), x[0], y[0])
    _, trained = model.train_step(state, x[0], y[0])
    evaluated = model.eval_step(state, x[0][:7], y[0][:7])
    for spec in (trained, evaluated):
        assert spec.training_hooks == spec.evaluation_hooks == (hook,)


@pytest.mark.parametrize("towers", [1, 2])
def test_variables_of_several_dtypes_train_together(towers):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        half = est.get_variable("half", (), jnp.bfloat16, jax.nn.initializers.ones)
        loss = jnp.mean(features * w) + jnp.mean(features.astype(jnp.bfloat16) * half).astype(jnp.float32)
        train_op = TowerOptimizer(optax.sgd(1.0)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, spec = one_step(model_fn, FOUR, towers)
    assert spec.loss == 6.0
    assert state.variables["w"] == -2.0
    assert state.variables["half"] == -2.0
    assert state.variables["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize("towers", [1, 2])
def test_a_flag_is_assigned_from_the_first_tower(towers):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0] == 1.0), "only_first_tower", np.bool_(False))
    state, _ = one_step(model_fn, FOUR, towers)
    assert state.variables["s"].dtype == jnp.bool_
    assert state.variables["s"]


def test_a_list_of_batches_is_a_loop():
    x, y = regression(8)
    model = est.transform(replicate(mlp_model_fn(optax.adam(0.1)), 2))
    state = model.init(jax.random.key(0), x[0], y[0])
    (one, _), (other, _) = (model.train_loop(state, batches) for batches in ((x, y), list(zip(x, y, strict=True))))
    assert_close(one.variables, other.variables)


def test_a_donated_state_is_trained_in_place():
    x, y = regression(8)
    model = est.transform(replicate(mlp_model_fn(optax.adam(0.1)), 2), donate=True)
    state = model.init(jax.random.key(0), x[0], y[0])
    for batch in zip(x, y, strict=True):
        before, (state, _) = state, model.train_step(state, *batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.slots))
    assert state.global_step == STEPS
