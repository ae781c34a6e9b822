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
    reduced,
    regression,
    results,
    start_as,
    started,
    trained,
)

import estimator as est
from replicate import BlockSync, TowerOptimizer, VariableDistribution, replicate_model_fn
from replicate.cross_tower_ops import AllReduce, CollectiveAllReduce, MultiWorkerAllReduce

SERVER, ROUND_ROBIN = VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER, VariableDistribution.SHARED_ROUND_ROBIN
BATCHES = regression(24)
FIRST = [x[0] for x in BATCHES]
WEIGHTED = {
    "weighted sum": est.Reduction.SUM,
    "weighted mean": est.Reduction.MEAN,
    "mean of weighted": est.Reduction.SUM_OVER_BATCH_SIZE,
    "nonzero weights": est.Reduction.SUM_BY_NONZERO_WEIGHTS,
}
REDUCTIONS = testing.towers.REDUCTIONS | WEIGHTED
OPTIMIZERS = testing.towers.OPTIMIZERS | {"slow sgd": lambda: optax.sgd(0.02)}


def weighted(features, labels):
    """The features with weights as their last column: of each 9 rows one is heavy, four are light, and four do not
    count; nor do the last 6 of all, which are those of two of 8 towers."""
    weights = np.resize(np.array([3, 0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0], np.float32), labels.shape[1])
    weights[-6:] = 0
    return np.concatenate([features, np.tile(weights[:, None], (len(features), 1, 1))], -1), labels


BATCHES = weighted(*regression(24))


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


def micro_batches(number, steps):
    return towers(number, optimizer={"accumulate_steps": steps})


def scaled(runner):
    """The slots that a loss scale wraps are compared."""
    options = runner.options | {"loss_scale": est.DynamicLossScale(8.0)}
    return runner._replace(options=options, slots=lambda slots: slots["optimizer"].inner)


OPS = {
    "ring": AllReduce("ring"),
    "halving": AllReduce("recursive_halving_doubling", num_packs=3),
    "tree": AllReduce("tree", num_packs=0),
    "hierarchical": AllReduce("hierarchical", num_packs=0, agg_small_grads_max_bytes=16),
    "scatter": AllReduce("reduce_scatter_gather"),
    "two levels": AllReduce("ring/psum", num_packs=2),
    "by size": MultiWorkerAllReduce([("psum", 1, 16), ("ring", 2, None)], num_packs=1),
    "in chunks": CollectiveAllReduce(2),
}
RUNNERS = {
    **{f"{n} towers": towers(n) for n in (1, 3, 4, 8)},
    "sharded": towers(4, 0.25, variable_distribution=VariableDistribution.SHARDED),
    "server": towers(4, variable_distribution=SERVER),
    "round robin": towers(4, variable_distribution=ROUND_ROBIN),
    **{f"{name}, 4 towers": towers(4, cross_tower_ops=ops) for name, ops in OPS.items()},
    **{f"{name}, 3 towers": towers(3, cross_tower_ops=OPS[name]) for name in ("ring", "halving", "tree")},
    "tree, micro-batches": towers(4, optimizer={"accumulate_steps": 3}, cross_tower_ops=OPS["tree"]),
    "sharded, ring": towers(
        4, 0.25, variable_distribution=VariableDistribution.SHARDED, cross_tower_ops=AllReduce("ring", num_packs=2)
    ),
    **{f"{n} of {m} devices": wide_towers(n, m) for n, m in ((2, 4), (1, 8), (3, 2))},
    **{f"{n} towers, {m} micro-batches": micro_batches(n, m) for n, m in ((1, 3), (2, 2), (4, 3))},
    "2 towers, a loss scale": scaled(towers(2)),
    "4 towers on one device": on_one(4),
    "hierarchical, on one device": on_one(4, cross_tower_ops=OPS["hierarchical"]),
    "server, on one device": on_one(4, variable_distribution=SERVER, variable_device="cpu:0"),
    "micro-batches, a loss scale, on one device": scaled(on_one(3, {"accumulate_steps": 2})),
    "2 of 4 devices, micro-batches, a loss scale": scaled(wide_towers(2, 4, accumulate_steps=3)),
}


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
        loss = reduced(losses, reduction)
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


ONE_OF_A_KIND = (
    "4 towers",
    "sharded",
    "server",
    "round robin",
    "ring, 4 towers",
    "2 of 4 devices",
    "2 towers, 2 micro-batches",
    "4 towers on one device",
)


def cases():
    """All runners with one optimizer; a runner of each kind with one that has a norm over all variables; optimizers
    without slots, and with a weight decay; sums, and weighted losses."""
    yield from ((runner, "momentum", "mean") for runner in RUNNERS)
    yield from ((runner, "clipped_adam", "mean") for runner in ONE_OF_A_KIND if runner != "ring, 4 towers")
    yield from (("4 towers", "adamw", "mean"), ("sharded", "adamw", "mean"), ("server", "sgd", "mean"))
    yield from ((f"{n} towers", "slow sgd", "sum") for n in (1, 3, 8))
    yield from (("4 towers", "slow sgd", reduction) for reduction in WEIGHTED)
    yield from ((runner, "slow sgd", "nonzero weights") for runner in ("8 towers", "tree, 4 towers"))
    in_parts = [f"{n} towers, {m} micro-batches" for n, m in ((1, 3), (2, 2), (4, 3))]
    yield from zip(in_parts, ("adam", "momentum", "slow sgd"), ["nonzero weights"] * 3, strict=True)
    yield from zip(in_parts, ["slow sgd"] * 3, ("weighted sum", "weighted sum", "weighted mean"), strict=True)


def marked(case):
    is_quick = case in [(runner, "momentum", "mean") for runner in ONE_OF_A_KIND]
    return pytest.param(*case, marks=pytest.mark.quick if is_quick else ())


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "optimizer", "reduction"), [marked(case) for case in dict.fromkeys(cases())])
def test_training_matches_one_device(runner, optimizer, reduction):
    runner = RUNNERS[runner]
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


def by_steps(model_fn, batches, model_dir=None):
    """The variables after training, and the losses of all steps."""
    del model_dir
    model = est.transform(model_fn)
    state, losses = start_as(start_of_layers(), model, *(x[0] for x in batches)), []
    for batch in zip(*batches, strict=True):
        state, spec = model.train_step(state, *batch)
        losses.append(spec.loss)
    return jax.device_get((state.variables, losses))


def by_loop(model_fn, batches, model_dir):
    del model_dir
    start = start_as(start_of_layers(), est.transform(model_fn), *(x[0] for x in batches))
    state, (losses, *_) = trained(model_fn, batches, start)
    return jax.device_get((state.variables, list(losses)))


def by_estimator(model_fn, batches, model_dir):
    estimator = est.Estimator(model_fn, model_dir, est.RunConfig(save_summary_steps=1))
    estimator.train(lambda: zip(*batches, strict=True))
    losses = [np.float32(line["loss"]) for line in est.read_history(model_dir)]
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}, losses


DRIVES = {"step": by_steps, "loop": by_loop, "Estimator": by_estimator}
LAYERED = {name: RUNNERS[name] for name in ONE_OF_A_KIND} | {
    "segments": towers(2, optimizer={"accumulate_steps": 2}, tower_transform=est.checkpoint_segments),
    "on_nan, a loss scale, checked": scaled(towers(2, on_nan="skip", check=True)),
    "blocks of one step": towers(2, block_sync=BlockSync(1, optax.sgd(1.0))),
}


def layered_cases():
    """Every runner in one drive, which is traced alike in all: loops and Estimators of few layers have every runner in
    `test_training_matches_one_device` and in `placement/test_distributions.py`; in blocks all layers have loops."""
    yield from ((runner, "step") for runner in LAYERED)
    yield "4 towers", "Estimator"


@functools.cache
def layers_on_one_device(moments):
    return by_steps(functools.partial(layered_model_fn, moments=moments), BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "drive"), [*layered_cases()])
def test_every_layer_trains_as_on_one_device(runner, drive, tmp_path):
    runner = LAYERED[runner]
    moments = "no rows" if runner.options.get("accumulate_steps", 1) > 1 else "all rows"
    model = functools.partial(layered_model_fn, moments=moments, options=runner.options)
    variables, losses = DRIVES[drive](runner.replicate(model, "mean"), BATCHES, tmp_path)
    want = layers_on_one_device(moments)
    assert_close(({name: variables[name] for name in want[0]}, losses), want, rtol=1e-3, atol=1e-5)


@functools.cache
def layers_of_two_towers_alone():
    model = functools.partial(layered_model_fn, moments="own rows")
    return [by_steps(model, [x[:, rows] for x in BATCHES]) for rows in (slice(0, 12), slice(12, None))]


@pytest.mark.slow
@pytest.mark.parametrize("drive", ["loop", "Estimator"])
def test_every_layer_trains_in_blocks_as_towers_alone_and_their_average(drive, tmp_path):
    model = functools.partial(layered_model_fn, moments="own rows")
    replicated = towers(2, block_sync=BlockSync(STEPS, optax.sgd(1.0))).replicate(model, "mean")
    variables, losses = DRIVES[drive](replicated, BATCHES, tmp_path)
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
        "variable_device"  # of `server`
    }
    assert {each.get("variable_distribution", "mirrored") for each in given} == {*VariableDistribution}
    of_optimizers = inspect.signature(TowerOptimizer).parameters.keys() - {"optimizer_or_fn", "name", "learning_rate"}
    assert {name for runner in LAYERED.values() for name in runner.options} == of_optimizers


def evaluated(replicated, rows):
    """Loss, predictions and metrics of the initial variables for the first rows."""
    model = est.transform(replicated)
    state = start_as(on_one_device("sgd", "mean")[0], model, *FIRST)
    x, y = (batch[0, :rows] for batch in BATCHES)
    spec = model.eval_step(state, x, y)
    metrics = results(jax.device_get(spec.eval_metric_ops))
    return jax.device_get((spec.loss, spec.predictions, metrics, model.predict_step(state, x).predictions))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("runner", "rows"),
    [("8 towers", 1), *((each, 7) for each in ("8 towers", *ONE_OF_A_KIND[1:6], "1 of 8 devices", ONE_OF_A_KIND[7]))],
)
def test_evaluation_and_prediction_match_one_device(runner, rows):
    model = functools.partial(model_fn, optimizer="sgd", reduction="mean", options={})
    assert_close(evaluated(RUNNERS[runner].replicate(model, "mean"), rows), evaluated(model, rows))
