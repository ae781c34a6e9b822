"""Whatever runs a model_fn, it computes what it does on one device: losses, variables, slots, predictions, metrics."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import testing.towers
from testing.towers import REDUCTIONS, assert_close, cpus, reduced, regression, trained

import estimator as est
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn
from replicate.cross_tower_ops import AllReduce, CollectiveAllReduce, MultiWorkerAllReduce

SERVER, ROUND_ROBIN = VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER, VariableDistribution.SHARED_ROUND_ROBIN
BATCHES = regression(24)
OPTIMIZERS = testing.towers.OPTIMIZERS | {"slow sgd": lambda: optax.sgd(0.02)}


class Runner(NamedTuple):
    replicate: Callable
    options: dict = {}  # of TowerOptimizer
    share: float = 1.0  # of a variable that can be cut, on each device
    slots: Callable = lambda slots: slots["optimizer"]


def towers(number, share=1.0, optimizer=None, **options):
    def replicate(model_fn, reduction):
        return replicate_model_fn(model_fn, REDUCTIONS[reduction], cpus(number), **options)

    return Runner(replicate, optimizer or {}, share)


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
    **{f"{n} towers": towers(n) for n in (1, 2, 3, 4, 8)},
    "sharded": towers(4, 0.25, variable_distribution=VariableDistribution.SHARDED),
    "server": towers(4, variable_distribution=SERVER),
    "round robin": towers(4, variable_distribution=ROUND_ROBIN),
    **{f"{name}, 4 towers": towers(4, cross_tower_ops=ops) for name, ops in OPS.items()},
    **{f"{name}, 3 towers": towers(3, cross_tower_ops=OPS[name]) for name in ("ring", "halving", "tree")},
    "tree, micro-batches": towers(4, optimizer={"accumulate_steps": 3}, cross_tower_ops=OPS["tree"]),
    "sharded, ring": towers(
        4, 0.25, variable_distribution=VariableDistribution.SHARDED, cross_tower_ops=AllReduce("ring", num_packs=2)
    ),
    **{f"{n} of {m} devices": wide_towers(n, m) for n, m in ((2, 4), (1, 8), (8, 1), (3, 2))},
    **{f"{n} towers, {m} micro-batches": micro_batches(n, m) for n in (1, 2, 4) for m in (2, 3)},
    "2 towers, a loss scale": scaled(towers(2)),
    "2 of 4 devices, micro-batches, a loss scale": scaled(wide_towers(2, 4, accumulate_steps=3)),
}


def model_fn(features, labels, mode, *, optimizer, reduction, options):
    """Its variables are trained, assigned and added to, as floats, integers and booleans; metrics are of two kinds."""
    w = est.get_variable("w", (3, 8), partition=(None, "part"))
    b = est.get_variable("b", (8,), initializer=jax.nn.initializers.zeros, partition=("part",))
    v = est.get_variable("v", (8, 1))
    est.get_variable("seen", initializer=np.int32(0), trainable=False)
    est.get_variable("first", initializer=np.zeros(2, bool), trainable=False, aggregation="only_first_tower")
    est.get_variable("mean", initializer=np.zeros(3, np.float32), trainable=False)
    est.assign_add("seen", features.shape[0])
    est.assign("first", features[0, :2] > 0)
    est.assign("mean", features.mean(0))
    output = (est.spread(jnp.tanh(features @ w + b), -1) @ v)[:, 0]
    predictions = {"output": output, "positive": output > 0}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions)
    losses = (output - labels) ** 2
    loss = reduced(losses, reduction)
    train_op = TowerOptimizer(OPTIMIZERS[optimizer](), **options).minimize(loss)
    metrics = {"error": est.metrics.mean(losses), "correct": est.metrics.accuracy(labels > 0, output > 0)}
    return est.EstimatorSpec(mode, predictions, loss, train_op, metrics)


@functools.cache
def on_one_device(optimizer, reduction):
    model = functools.partial(model_fn, optimizer=optimizer, reduction=reduction, options={})
    return trained(model, BATCHES)


ONE_OF_A_KIND = (
    "4 towers",
    "sharded",
    "server",
    "round robin",
    "ring, 4 towers",
    "2 of 4 devices",
    "2 towers, 2 micro-batches",
)


def cases():
    """All runners with one optimizer, several optimizers with a runner of each kind, and sums."""
    yield from ((runner, "momentum", "mean") for runner in RUNNERS)
    for runner in ONE_OF_A_KIND[:4]:
        yield from ((runner, optimizer, "mean") for optimizer in testing.towers.OPTIMIZERS)
    for runner in ONE_OF_A_KIND[5:]:
        yield from ((runner, optimizer, "mean") for optimizer in ("sgd", "adam", "clipped_adam"))
    yield from ((f"{n} towers", "slow sgd", "sum") for n in (1, 2, 3, 4, 8))


def marked(case):
    is_quick = case in [(runner, "momentum", "mean") for runner in ONE_OF_A_KIND]
    return pytest.param(*case, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "optimizer", "reduction"), [marked(case) for case in dict.fromkeys(cases())])
def test_training_matches_one_device(runner, optimizer, reduction):
    runner = RUNNERS[runner]
    model = functools.partial(model_fn, optimizer=optimizer, reduction=reduction, options={})
    replicated = runner.replicate(functools.partial(model, options=runner.options), reduction)
    want, want_steps = on_one_device(optimizer, reduction)
    state, steps = trained(replicated, BATCHES)
    assert_close(jax.device_get(steps), want_steps)
    assert_close(jax.device_get(state.variables), want.variables)
    assert_close(jax.device_get(runner.slots(state.slots)), want.slots["optimizer"])
    w = state.variables["w"]
    assert w.addressable_data(0).size == w.size * runner.share


LAYERED = ("4 towers", "sharded", "server", "round robin", "ring, 4 towers")
MICRO_BATCHES = ("2 towers, 2 micro-batches", "4 towers, 3 micro-batches")


def layered_model_fn(features, labels, mode, *, normalized, reduction, options):
    """Of layers without names, with regularizers; its moments are of all rows."""
    with est.variable_scope("net", regularizer=est.regularizers.l1_l2(0.01, 0.1)):
        x = est.layers.dense(features, 8, jnp.tanh)
        if normalized:
            x = est.layers.batch_normalization(x, momentum=0.8, synchronized=True)
        x = est.layers.batch_normalization(x, fused=True, training=False)
        x = est.layers.layer_norm(est.layers.dense(x, 4), scale=False)
        output = est.layers.dense(x, 1)[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, output)
    est.losses.mean_squared_error(labels, output, reduction=REDUCTIONS[reduction])
    assert len(est.losses.get_regularization_losses()) == len(est.trainable_variables("net"))
    loss = est.losses.get_total_loss()
    train_op = TowerOptimizer(optax.sgd(0.05 if reduction == "mean" else 0.002, momentum=0.9), **options).minimize(loss)
    return est.EstimatorSpec(mode, output, loss, train_op)


@pytest.mark.parametrize(
    ("runner", "reduction"),
    [
        pytest.param(runner, reduction, marks=() if (runner, reduction) == ("4 towers", "mean") else pytest.mark.slow)
        for runner in [*LAYERED, *MICRO_BATCHES]
        for reduction in ["mean", "sum"]
    ],
)
def test_layers_and_regularizers_train_as_on_one_device(runner, reduction):
    normalized = runner not in MICRO_BATCHES
    runner = RUNNERS[runner]
    model = functools.partial(layered_model_fn, normalized=normalized, reduction=reduction)
    replicated = runner.replicate(functools.partial(model, options=runner.options), reduction)
    atol = 1e-5 if reduction == "mean" else 1e-4  # sums are as many times larger as a batch has rows
    testing.towers.assert_same_training(functools.partial(model, options={}), replicated, BATCHES, rtol=1e-4, atol=atol)


def evaluated(replicated, rows):
    """Loss, predictions and metrics of the initial variables for the first rows."""
    model = est.transform(replicated)
    state = model.init(jax.random.key(0), BATCHES[0][0], BATCHES[1][0])
    x, y = (batch[0, :rows] for batch in BATCHES)
    spec = model.eval_step(state, x, y)
    results = {name: metric.result() for name, metric in spec.eval_metric_ops.items()}
    return jax.device_get((spec.loss, spec.predictions, results, model.predict_step(state, x).predictions))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 1])
@pytest.mark.parametrize("runner", ["8 towers", *ONE_OF_A_KIND[1:6], "1 of 8 devices"])
def test_evaluation_and_prediction_match_one_device(runner, rows):
    model = functools.partial(model_fn, optimizer="sgd", reduction="mean", options={})
    assert_close(evaluated(RUNNERS[runner].replicate(model, "mean"), rows), evaluated(model, rows))
