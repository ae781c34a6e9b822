"""Whatever runs a model_fn, it computes what it does on one device: losses, variables, slots, predictions, metrics."""

import functools
import inspect
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import testing.towers
from testing.model_fns import network
from testing.towers import (
    STEPS,
    assert_close,
    cpus,
    regression,
    results,
    start_as,
    started,
    trained,
)

import estimator as est
from replicate import BlockSync, TowerOptimizer, VariableDistribution, replicate_model_fn
from replicate.cross_tower_ops import AllReduce, MultiWorkerAllReduce

SERVER, ROUND_ROBIN = VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER, VariableDistribution.SHARED_ROUND_ROBIN
WEIGHTED = {
    "weighted sum": est.Reduction.SUM,
    "weighted mean": est.Reduction.MEAN,
    "nonzero weights": est.Reduction.SUM_BY_NONZERO_WEIGHTS,
}
REDUCTIONS = testing.towers.REDUCTIONS | WEIGHTED
OPTIMIZERS = testing.towers.OPTIMIZERS | {
    "slow sgd": lambda: optax.sgd(0.02),
    # Slots that show the size of gradients, a norm over all variables, and a weight decay.
    "mixed": lambda: optax.chain(optax.trace(0.9), optax.clip_by_global_norm(0.1), optax.adamw(0.02)),
}


def weighted(features, labels):
    """The features with weights as their last column: of each 9 rows one is heavy, four are light, and four do not
    count; nor do the last 6 of all, which are those of two of 8 towers."""
    weights = np.resize(np.array([3, 0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0], np.float32), labels.shape[1])
    weights[-6:] = 0
    return np.concatenate([features, np.tile(weights[:, None], (len(features), 1, 1))], -1), labels


BATCHES = weighted(*regression(24))
FIRST = [x[0] for x in BATCHES]


class Runner(NamedTuple):
    replicate: Callable
    options: dict = {}  # of TowerOptimizer
    share: float = 1.0  # of a variable that can be cut, on each device
    slots: Callable = lambda slots: slots["optimizer"]
    given: dict = {}  # to replicate_model_fn


def towers(number, share=1.0, optimizer=None, **options):
    def replicate(model_fn, reduction):
        return replicate_model_fn(model_fn, REDUCTIONS[reduction], cpus(number), **options)

    return Runner(replicate, optimizer or {}, share, given=options)


def on_one(number, optimizer=None, **options):
    """Towers on one device."""

    def replicate(model_fn, reduction):
        return replicate_model_fn(model_fn, REDUCTIONS[reduction], ["cpu:1"] * number, **options)

    return Runner(replicate, optimizer or {}, given=options)


def wide_towers(number, devices, **optimizer):
    return towers(number * devices, 1 / devices, optimizer, devices_per_tower=devices)


def scaled(runner):
    """The slots that a loss scale wraps are compared."""
    options = runner.options | {"loss_scale": est.DynamicLossScale(8.0)}
    return runner._replace(options=options, slots=lambda slots: slots["optimizer"].inner)


# Sums by every algorithm are tested in cross_tower_ops, all reductions in test_replicate_train.py. Here each runner
# has one case, by default that of a momentum and a mean. Where variables have other places than towers, the optimizer
# is the mixed one.
RUNNERS = {
    "1 tower": towers(1),
    "8 towers": towers(8),
    "sharded": towers(4, 0.25, variable_distribution=VariableDistribution.SHARDED),
    "server": towers(4, variable_distribution=SERVER),
    "round robin": towers(4, variable_distribution=ROUND_ROBIN),
    "ring": towers(4, cross_tower_ops=AllReduce("ring")),
    "by size": towers(4, cross_tower_ops=MultiWorkerAllReduce([("psum", 1, 16), ("ring", 2, None)], num_packs=1)),
    "2 of 4 devices": wide_towers(2, 4),
    "1 of 8 devices": wide_towers(1, 8),
    "3 of 2 devices, micro-batches, a loss scale": scaled(wide_towers(3, 2, accumulate_steps=4)),
    "1 tower, 3 micro-batches": towers(1, optimizer={"accumulate_steps": 3}),
    "2 towers, 2 micro-batches": towers(2, optimizer={"accumulate_steps": 2}),
    "4 towers, 3 micro-batches, tree": towers(
        4, optimizer={"accumulate_steps": 3}, cross_tower_ops=AllReduce("tree", num_packs=0)
    ),
    "server, on one device": on_one(4, variable_distribution=SERVER, variable_device="cpu:0"),
    "3 on one device, micro-batches": scaled(on_one(3, {"accumulate_steps": 2})),
}
CASES = {
    "1 tower": ("slow sgd", "weighted sum"),
    "8 towers": ("slow sgd", "weighted mean"),
    "sharded": ("mixed", "mean"),
    "server": ("mixed", "mean"),
    "round robin": ("mixed", "mean"),
    "2 of 4 devices": ("mixed", "mean"),
    "1 tower, 3 micro-batches": ("adam", "nonzero weights"),
    "2 towers, 2 micro-batches": ("slow sgd", "weighted sum"),
    "4 towers, 3 micro-batches, tree": ("slow sgd", "weighted mean"),
}
QUICK = {"8 towers", "sharded", "server", "round robin", "ring", "2 of 4 devices", "2 towers, 2 micro-batches"}


def model_fn(features, labels, mode, *, optimizer, reduction, options):
    """Its variables are trained, assigned and added to, as floats, integers and booleans; metrics are of two kinds."""
    features, weights = features[:, :3], features[:, 3]
    w = est.get_variable("w", (3, 8), partition=(None, "part"))
    b = est.get_variable("b", (8,), initializer=jax.nn.initializers.zeros, partition=("part",))
    v = est.get_variable("v", (8, 1))
    est.get_variable("seen", initializer=np.int32(0), trainable=False)
    est.get_variable("first", initializer=np.zeros(2, bool), trainable=False, aggregation="only_first_tower")
    zeros = {"initializer": jax.nn.initializers.zeros, "trainable": False}
    average = est.get_variable("average", (3, 8), partition=(None, "part"), **zeros)
    est.get_variable("hidden", (8,), partition=("part",), **zeros)
    hidden = jnp.tanh(features @ w + b)
    est.assign_add("seen", features.shape[0])
    est.assign("first", features[0, :2] > 0)
    est.assign("average", 0.9 * average + w * features.mean())
    est.assign_add("hidden", hidden.sum(0))
    output = (est.spread(hidden, -1) @ v)[:, 0]
    predictions = {"output": output, "positive": output > 0}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions)
    losses = (output - labels) ** 2
    if reduction in WEIGHTED:
        loss = est.losses.mean_squared_error(labels, output, weights, WEIGHTED[reduction])
    else:
        loss = losses.mean()
    train_op = TowerOptimizer(OPTIMIZERS[optimizer](), **options).minimize(loss)
    metrics = {
        "error": est.metrics.mean(losses),
        "weighted": est.metrics.mean_squared_error(labels, output, weights),
        "correct": est.metrics.accuracy(labels > 0, output > 0),
        "auc": est.metrics.auc(labels > 0, jax.nn.sigmoid(output)),
    }
    return est.EstimatorSpec(mode, predictions, loss, train_op, metrics)


@functools.cache
def on_one_device(optimizer, reduction):
    """The state at the start, and what training comes to."""
    model_fn_of_one = functools.partial(model_fn, optimizer=optimizer, reduction=reduction, options={})
    _, start = started(model_fn_of_one, *FIRST)
    return start, *trained(model_fn_of_one, BATCHES, start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner", [pytest.param(name, marks=pytest.mark.quick if name in QUICK else ()) for name in RUNNERS]
)
def test_training_matches_one_device(runner):
    (optimizer, reduction), runner = CASES.get(runner, ("momentum", "mean")), RUNNERS[runner]
    model = functools.partial(model_fn, optimizer=optimizer, reduction=reduction, options={})
    replicated = runner.replicate(functools.partial(model, options=runner.options), reduction)
    start, want, want_steps = on_one_device(optimizer, reduction)
    state, steps = trained(replicated, BATCHES, start_as(start, est.transform(replicated), *FIRST))
    assert_close(jax.device_get(steps), want_steps)
    assert_close(jax.device_get(state.variables), want.variables)
    assert_close(jax.device_get(runner.slots(state.slots)), want.slots["optimizer"])
    for cut in (state.variables[name] for name in ("w", "average")):
        assert cut.addressable_data(0).size == cut.size * runner.share


def layered_model_fn(features, labels, mode, *, moments="all rows", options=MappingProxyType({})):
    """Of every layer and two scopes, with default names and regularizers; `moments` are those of `MOMENTS`."""
    with est.variable_scope("net", regularizer=est.regularizers.l1_l2(0.001, 0.01)):
        output = network(features[:, :3], **MOMENTS[moments])
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, output)
    est.losses.mean_squared_error(labels, output, reduction=REDUCTIONS["mean"])
    loss = est.losses.get_total_loss()
    train_op = TowerOptimizer(optax.sgd(0.01), **options).minimize(loss)
    return est.EstimatorSpec(mode, output, loss, train_op)


MOMENTS = {"all rows": {"synchronized": True}, "own rows": {}, "no rows": {"training": False}}


@functools.cache
def start_of_layers():
    return started(layered_model_fn, *FIRST)[1]


def by_steps(model_fn, batches):
    """The variables after training, and the losses of all steps."""
    model = est.transform(model_fn)
    state, losses = start_as(start_of_layers(), model, *(x[0] for x in batches)), []
    for batch in zip(*batches, strict=True):
        state, spec = model.train_step(state, *batch)
        losses.append(spec.loss)
    return jax.device_get((state.variables, losses))


LAYERED = {
    "2 of 4 devices": RUNNERS["2 of 4 devices"],
    "sharded, ring, segments, micro-batches": towers(
        2,
        0.5,
        {"accumulate_steps": 2},
        tower_transform=est.checkpoint_segments,
        variable_distribution=VariableDistribution.SHARDED,
        cross_tower_ops=AllReduce("ring", num_packs=2),
    ),
    "server, on one device, on_nan, a loss scale, checked": scaled(
        on_one(4, on_nan="skip", check=True, variable_distribution=SERVER)
    ),
}


@functools.cache
def layers_on_one_device(moments):
    return by_steps(functools.partial(layered_model_fn, moments=moments), BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("runner", LAYERED)
def test_every_layer_trains_as_on_one_device(runner):
    runner = LAYERED[runner]
    moments = "no rows" if runner.options.get("accumulate_steps", 1) > 1 else "all rows"
    model = functools.partial(layered_model_fn, moments=moments, options=runner.options)
    variables, losses = by_steps(runner.replicate(model, "mean"), BATCHES)
    want = layers_on_one_device(moments)
    assert_close(({name: variables[name] for name in want[0]}, losses), want, rtol=1e-3, atol=1e-5)


@functools.cache
def layers_of_two_towers_alone():
    model = functools.partial(layered_model_fn, moments="own rows")
    return [by_steps(model, [x[:, rows] for x in BATCHES]) for rows in (slice(0, 12), slice(12, None))]


@pytest.mark.slow
def test_every_layer_trains_in_blocks_as_towers_alone_and_their_average():
    model = functools.partial(layered_model_fn, moments="own rows")
    replicated = towers(2, block_sync=BlockSync(STEPS, optax.sgd(1.0))).replicate(model, "mean")
    state, (losses, *_) = trained(replicated, BATCHES, start_as(start_of_layers(), est.transform(replicated), *FIRST))
    variables, losses = jax.device_get((state.variables, [*losses]))
    own = layers_of_two_towers_alone()
    first, mean = own[0][0], jax.tree.map(lambda x, y: (x + y) / 2, *own)
    want = {name: (first if "moving" in name else mean[0])[name] for name in first}
    assert_close(({name: variables[name] for name in want}, losses), (want, mean[1]), rtol=1e-3, atol=1e-5)


def test_no_layer_and_no_kind_of_runner_is_missing(monkeypatch):
    names = {name for name in est.layers.__all__ if inspect.isfunction(getattr(est.layers, name))}
    called = set()
    for name in names:
        layer = getattr(est.layers, name)
        monkeypatch.setattr(est.layers, name, lambda *a, n=name, f=layer, **kw: called.add(n) or f(*a, **kw))
    est.transform(layered_model_fn).abstract_init(*FIRST)
    assert called == names

    given = [runner.given for runner in LAYERED.values()]
    options = inspect.signature(replicate_model_fn).parameters.keys()
    assert {name for each in given for name in each} == options - {"model_fn", "loss_reduction", "devices"} - {
        *("variable_device", "block_sync")  # of `server`, and of the test above
    }
    of_optimizers = inspect.signature(TowerOptimizer).parameters.keys() - {"optimizer_or_fn", "name", "learning_rate"}
    assert {name for runner in LAYERED.values() for name in runner.options} == of_optimizers


def evaluated(replicated, rows):
    """Loss, predictions and metrics of the initial variables for the first rows."""
    model = est.transform(replicated)
    state = start_as(on_one_device("momentum", "mean")[0], model, *FIRST)
    x, y = (batch[0, :rows] for batch in BATCHES)
    spec = model.eval_step(state, x, y)
    metrics = results(jax.device_get(spec.eval_metric_ops))
    return jax.device_get((spec.loss, spec.predictions, metrics, model.predict_step(state, x).predictions))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("runner", "rows"),
    [
        ("8 towers", 1),
        *((each, 7) for each in ("round robin", "ring", "2 of 4 devices", "3 on one device, micro-batches")),
    ],
)
def test_evaluation_and_prediction_match_one_device(runner, rows):
    model = functools.partial(model_fn, optimizer="momentum", reduction="mean", options={})
    assert_close(evaluated(RUNNERS[runner].replicate(model, "mean"), rows), evaluated(model, rows))
