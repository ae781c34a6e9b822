"""`RunConfig(train_distribute=...)`: towers by configuration compute what `replicate_model_fn` does, to the bit."""

import copy
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import bits, cpus, regression, uniform

import estimator as est
import replicate
from replicate import (
    CollectiveAllReduceStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    TowerOptimizer,
    VariableDistribution,
    replicate_model_fn,
)
from replicate.cross_tower_ops import AllReduce
from replicate.towers._devices import find_devices

BATCHES = list(zip(*regression(8), strict=True))
SERVER = VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER
RING = AllReduce("ring")
SHARDED = {"variable_distribution": VariableDistribution.SHARDED}
SUM = {"loss_reduction": est.Reduction.SUM}
NAMED = {"devices": ["cpu:1", "cpu:3"]}
TWO, FOUR = {"devices": cpus(2)}, {"devices": cpus(4)}
# Each strategy, and the arguments of `replicate_model_fn` that say the same.
STRATEGIES = {
    "all": (MirroredStrategy(), {}),
    "four": (MirroredStrategy(num_gpus=4), FOUR),
    "two, named": (MirroredStrategy(**NAMED), NAMED),
    "none": (MirroredStrategy(num_gpus=0), {"devices": ["cpu:0"]}),
    "ring": (MirroredStrategy(num_gpus_per_worker=2, cross_device_ops=RING), TWO | {"cross_tower_ops": RING}),
    "sharded": (MirroredStrategy(num_gpus=4, **SHARDED), FOUR | SHARDED),
    "sum": (MirroredStrategy(num_gpus=2, **SUM), TWO | SUM),
    "server": (ParameterServerStrategy(num_gpus=2), TWO | {"variable_distribution": SERVER}),
    "one": (OneDeviceStrategy(device="/cpu:2"), {"devices": ["cpu:2"]}),
    "collective": (CollectiveAllReduceStrategy(num_gpus_per_worker=2), TWO),
}


def model_fn(features, labels, mode, params):
    w = est.get_variable("w", initializer=uniform(3, 4))
    v = est.get_variable("v", initializer=uniform(4, 1))
    seen = est.get_variable("seen", initializer=np.int32(0), trainable=False)
    output = (jnp.tanh(features @ w) @ v)[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=output)
    if mode == est.ModeKeys.TRAIN:
        est.assign_add("seen", features.shape[0] + 0 * seen)
    loss = est.losses.mean_squared_error(labels, output, reduction=params.get("reduction", est.Reduction.MEAN))
    train_op = params.get("optimizer", est.Optimizer)(optax.adam(0.1)).minimize(loss)
    metrics = {"error": est.metrics.mean_absolute_error(labels, output)}
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def estimate(folder, params=None, model_fn=model_fn, **config):
    return est.Estimator(model_fn, str(folder), est.RunConfig(**config), params or {})


def results(estimator, batches=BATCHES):
    """All that an Estimator computes: variables and slots after training, metrics and predictions."""
    estimator.train(lambda: batches)
    names = estimator.get_variable_names()
    values = {name: estimator.get_variable_value(name) for name in names}
    odd = [(x[:7], y[:7]) for x, y in batches]
    return values, estimator.evaluate(lambda: odd), list(estimator.predict(lambda: odd[0][0]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_gives_replicate_model_fn_what_its_arguments_say(name, monkeypatch):
    strategy, same = STRATEGIES[name]
    calls, signature = [], inspect.signature(replicate_model_fn)
    monkeypatch.setattr("replicate._strategies.replicate_model_fn", lambda *a, **kw: calls.append((a, kw)))
    strategy.replicate(model_fn)
    [(args, kwargs)] = calls
    got, want = (signature.bind(model_fn, *a, **kw) for a, kw in ((args[1:], kwargs), ((), same)))
    want.arguments.setdefault("loss_reduction", est.Reduction.SUM_BY_NONZERO_WEIGHTS)
    got.apply_defaults(), want.apply_defaults()
    for each in (got, want):
        each.arguments["devices"] = find_devices(each.arguments["devices"])
    assert got.arguments == want.arguments
    assert strategy.num_replicas_in_sync == len(got.arguments["devices"])


@pytest.mark.slow
@pytest.mark.covers("3 train_distribute")
def test_a_strategy_is_replicate_model_fn_with_tower_optimizer(tmp_path):
    strategy, same = STRATEGIES["sum"]
    params = {"reduction": est.Reduction.SUM}
    got = estimate(tmp_path / "strategy", params, train_distribute=strategy)
    towers = replicate_model_fn(model_fn, **same)
    want = estimate(tmp_path / "towers", params | {"optimizer": TowerOptimizer}, towers)
    assert jax.tree.structure(got := results(got)) == jax.tree.structure(want := results(want))
    assert bits(got) == bits(want)


def test_towers_train_with_a_plain_optimizer(tmp_path, messages):
    trained = estimate(tmp_path, train_distribute=MirroredStrategy(num_gpus=2)).train(lambda: BATCHES)
    line = "2 towers on cpu:0-1, 8 rows = 2 x 4; variables mirrored; 16 trained numbers in 2 variables, 1 not trained"
    assert line in messages()
    assert trained.get_variable_value("seen") == 24
    # Its model_fn is the user's own, which others may put into towers.
    other = estimate(tmp_path / "other", model_fn=replicate_model_fn(trained.model_fn, devices=["cpu:0"]))
    assert other.train(lambda: BATCHES).get_variable_value("seen") == 24


@pytest.mark.slow
def test_evaluation_has_a_strategy_of_its_own(tmp_path, messages):
    both = {"train_distribute": MirroredStrategy(2), "eval_distribute": OneDeviceStrategy("cpu:3")}
    [(_, on_one, _), (_, on_two, _), (_, alone, _)] = (
        results(estimate(tmp_path / str(i), **config))
        for i, config in enumerate([both, {"eval_distribute": MirroredStrategy(2)}, {}])
    )
    lines = [line.partition(";")[0] for line in messages() if " rows" in line]
    assert lines == [
        *("2 towers on cpu:0-1, 8 rows = 2 x 4", "1 device: cpu:3, 7 rows", "2 towers on cpu:0-1, 7 rows = 2 x 3 + 1"),
        *("1 device: cpu:0, 8 rows", "2 towers on cpu:0-1, 7 rows = 2 x 3 + 1", "1 device: cpu:0, 7 rows"),
        *("1 device: cpu:0, 8 rows", "1 device: cpu:0, 7 rows", "1 device: cpu:0, 7 rows"),
    ]
    for other in (on_two, alone):
        np.testing.assert_allclose([*on_one.values()], [*other.values()], rtol=1e-5)


@pytest.mark.slow
def test_a_canned_estimator_trains_evaluates_exports_and_serves_in_towers(tmp_path):
    columns = [est.feature_column.numeric_column("x", shape=(3,))]
    batches = [({"x": x}, (y > 0).astype(np.int32)[:, None]) for x, y in BATCHES]
    losses, weights = [], []
    for strategy in (None, MirroredStrategy(num_gpus=4, **SUM)):
        config = est.RunConfig(train_distribute=strategy, model_dir=str(tmp_path / str(strategy)))
        warm = None if strategy is None else str(tmp_path / "None" / "ckpt-0")
        made = est.DNNClassifier([4], columns, config=config, warm_start_from=warm, **SUM)
        exporter = est.FinalExporter("last", batches[0][0])
        eval_spec = est.EvalSpec(lambda: batches, exporters=exporter)
        metrics, [path] = est.train_and_evaluate(made, est.TrainSpec(lambda: batches), eval_spec)
        exported = est.load_exported(path)(batches[0][0])["scores"]
        losses.append(metrics["loss"]), weights.append(exported)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(*weights, rtol=1e-4)


def test_a_strategy_is_copied_pickled_and_shown_by_its_arguments():
    strategy = ParameterServerStrategy(devices=["cpu:0"], on_nan="skip")
    for each in (strategy, copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert repr(each) == ("ParameterServerStrategy(devices=['cpu:0'], on_nan='skip')")
    assert "train_distribute=MirroredStrategy(num_gpus=2)" in repr(est.RunConfig(train_distribute=MirroredStrategy(2)))


def sums(features, labels, mode):
    est.get_variable("w", ())
    loss = est.losses.mean_squared_error(labels, features[:, 0] * est.get_variable("v", ()), reduction="weighted_sum")
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


def test_a_sum_needs_a_strategy_that_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"a loss with Reduction.SUM, and MirroredStrategy has no loss_reduction"):
        estimate(tmp_path, model_fn=sums, train_distribute=MirroredStrategy(2)).train(lambda: BATCHES)
    for reduction in ("SUM", "MEAN"):
        with pytest.raises(ValueError, match=rf"MirroredStrategy\(loss_reduction=est.Reduction.{reduction}\)"):
            estimate(tmp_path, model_fn=sums, train_distribute=MirroredStrategy(2)).train(lambda: BATCHES)


@pytest.mark.parametrize(("given", "warnings"), [(est.Reduction.SUM, 0), (est.Reduction.MEAN, 1)])
def test_towers_with_another_reduction_than_the_loss_are_named(messages, given, warnings):
    est.transform(replicate_model_fn(sums, given, cpus(2))).info(*BATCHES[0])
    wanted = (
        "The model_fn's loss has Reduction.SUM, but the loss_reduction of the towers is a mean: they do not compute "
        "the numbers of one big batch. Write `replicate_model_fn(model_fn, est.Reduction.SUM)`."
    )
    assert [line for line in messages() if "loss_reduction" in line] == [wanted] * warnings


def distributed(strategy):
    return est.RunConfig(train_distribute=strategy)


MIRRORED = MirroredStrategy()
MISTAKES = [
    (TypeError, lambda: MirroredStrategy(["/gpu:0"]), "needs a number of devices as `num_gpus`; got ['/gpu:0']"),
    (TypeError, lambda: MirroredStrategy(True), "needs a number of devices"),
    (TypeError, lambda: MirroredStrategy(-1), "needs a number of devices"),
    (TypeError, lambda: MirroredStrategy(2, ["cpu:0"]), "both num_gpus=2 and devices=['cpu:0']. Give one of them."),
    (TypeError, lambda: MirroredStrategy(2, num_gpus_per_worker=2), "both num_gpus=2 and num_gpus_per_worker=2"),
    (TypeError, lambda: MirroredStrategy(prefetch=1), "unknown argument prefetch=1. It takes num_gpus, devices"),
    (ValueError, lambda: MirroredStrategy(99).num_replicas_in_sync, "MirroredStrategy(num_gpus=99) needs 99 devices"),
    (ValueError, lambda: MirroredStrategy(loss_reduction="average"), "Unknown loss reduction 'average'"),
    (RuntimeError, MIRRORED.scope, "MirroredStrategy.scope() is not needed"),
    (AttributeError, lambda: MIRRORED.num_towers, "has no attribute 'num_towers': write `num_replicas_in_sync`"),
    (AttributeError, lambda: MIRRORED.colour, "has no attribute 'colour'."),
    (ValueError, lambda: distributed("mirrored"), "`train_distribute` should be a strategy, say"),
    (ValueError, lambda: est.RunConfig(eval_distribute=MirroredStrategy), "`eval_distribute` should be a strategy"),
    (ValueError, lambda: est.Estimator(lambda x: x, config=distributed(MIRRORED)), "must include features"),
]


@pytest.mark.parametrize(("error", "make", "message"), MISTAKES)
def test_mistakes_are_told_at_once(error, make, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_a_replicated_model_fn_needs_no_strategy(tmp_path):
    towers = replicate_model_fn(model_fn, devices=cpus(2))
    with pytest.raises(ValueError, match=r"Wrap it once. `RunConfig\(train_distribute=...\)` does so by itself"):
        estimate(tmp_path, model_fn=towers, train_distribute=MirroredStrategy(2)).train(lambda: BATCHES)


def test_strategies_of_tensorflow_are_named():
    with pytest.raises(AttributeError, match="here it is `replicate.ParameterServerStrategy`"):
        _ = replicate.CentralStorageStrategy
