"""Variables synchronised on request: as towers wrote them, and copies that drifted apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from testing.copies import CPUS, GRID, a_slot, a_variable, corrupt, everywhere, with_copy
from testing.estimators import make
from testing.hooks import When
from testing.towers import cpus, mlp_model_fn, one_step, regression, replicate

import estimator as est
from estimator.multihost._replica_check import check_replicas
from estimator.steps._sync_variables import _same_everywhere
from replicate import TowerOptimizer, replicate_model_fn

X = np.array([1.0, 2.0, 3.0, 8.0], np.float32)


def written(towers, how=None, names=None, write=est.assign, accumulate_steps=1):
    """The variables "batch/mean" and "seen" after a step in which each tower wrote the mean of its rows, and 1."""

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        with est.variable_scope("batch"):
            est.get_variable("mean", (), trainable=False, initializer=jax.nn.initializers.zeros)
            write("mean", features.mean())
            if how and names == "mean":
                est.sync_variables(names, how)
        est.get_variable("seen", initializer=np.int32(0), trainable=False)
        est.assign_add("seen", 1)
        if how and names != "mean":
            est.sync_variables(names, how)
        loss = w * features.mean()
        optimizer = TowerOptimizer(optax.sgd(0.1), accumulate_steps=accumulate_steps)
        return est.EstimatorSpec(mode, {"w": features}, loss, optimizer.minimize(loss))

    if towers:
        model_fn = replicate_model_fn(model_fn, devices=cpus(towers))
    state, _ = one_step(model_fn, X)
    return float(state.variables["batch/mean"]), int(state.variables["seen"])


@pytest.mark.quick
@pytest.mark.parametrize("write", [est.assign, est.assign_add])
def test_what_towers_wrote_is_merged_as_the_call_says(write):
    merged = X.mean() if write is est.assign else X[:2].mean() + X[2:].mean()
    assert written(2, write=write) == (merged, 2)
    for name in ("mean", ["batch/mean"]):
        assert written(2, "first", name, write) == (X[:2].mean(), 2)
    assert written(2, "mean", "batch/mean", write) == (X.mean(), 2)


def test_without_names_all_variables_are_meant_and_integers_come_from_the_first():
    assert written(2, "first") == (X[:2].mean(), 1)
    assert written(2, "mean") == (X.mean(), 1)


def test_micro_batches_are_merged_as_towers_are():
    assert written(2, "first", "batch/mean", accumulate_steps=2) == (X[0], 4)
    assert written(2, "mean", "batch/mean", accumulate_steps=2) == (X.mean(), 4)


@pytest.mark.parametrize("towers", [0, 1])
def test_outside_of_towers_it_changes_nothing(towers):
    for how in (None, "first", "mean"):
        assert written(towers, how) == (X.mean(), 1)


def test_wrong_calls_in_a_model_fn_are_refused():
    for how, names, message in (
        ("sum", None, 'needs how="first" or how="mean"; got \'sum\''),
        ("first", "other", r"`est.sync_variables\('other'\)` names no variable of this run"),
        ("first", "w", r"`est.sync_variables\('w'\)`: the variable is trainable, .* call it in a hook"),
        ("mean", "seen", r"'seen', how='mean'\)`: the variable holds integers, .* Use how=\"first\""),
    ):
        with pytest.raises(ValueError, match=message):
            written(2, how, names)
    with pytest.raises(RuntimeError, match="`est.sync_variables` must be called inside a model_fn"):
        est.sync_variables("w")


def add(amount):
    return lambda x: x + np.asarray(amount, x.dtype)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_all_copies_become_the_first_or_the_mean(dtype):
    values = jax.device_put(np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype)), everywhere(CPUS[:4]))
    for drifted, mean in ((with_copy(values, 1, add(4)), add(1)), (with_copy(values, 0, add(4)), add(1))):
        first = np.asarray(drifted.addressable_shards[0].data)
        for how in ("first", "mean"):
            (mended,) = _same_everywhere([drifted], how)
            check_replicas(1, variable=mended)
            assert mended.dtype == values.dtype and mended.sharding == values.sharding
            wanted = mean(np.asarray(values)) if how == "mean" and dtype != "int32" else first
            np.testing.assert_array_equal(np.asarray(mended), wanted)


def test_copies_of_parts_are_mended_and_what_has_none_stays():
    whole = np.arange(8.0, dtype=np.float32)
    parts = jax.device_put(whole, NamedSharding(GRID, PartitionSpec("cut")))
    cut = jax.device_put(whole, NamedSharding(GRID, PartitionSpec(("cut", "copied"))))
    single = jax.device_put(whole, SingleDeviceSharding(CPUS[1]))
    drifted = with_copy(with_copy(parts, 2, add(8)), 6, add(4))
    tree = {"parts": drifted, "cut": cut, "single": single}
    first, mean = (_same_everywhere(tree, how) for how in ("first", "mean"))
    np.testing.assert_array_equal(first["parts"], whole)
    np.testing.assert_array_equal(mean["parts"], whole + np.repeat(np.float32([2, 1]), 4))
    for mended in (first, mean):
        check_replicas(1, variable=mended)
        assert mended["cut"] is cut and mended["single"] is single


def syncs(step, **how):
    """A hook that synchronises after a step."""

    def after_run(context):
        est.sync_variables(context=context, **how)
        check_replicas(context.global_step, variable=context.state.variables, slot=context.state.slots)

    return When(step, after_run=after_run)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "how"), [(a_variable, {"names": ["v"]}), (a_slot, {"how": "mean"})])
@pytest.mark.usefixtures("users_compiler")
def test_a_hook_mends_copies_and_training_continues(tmp_path, monkeypatch, which, how):
    x, y = regression(8)
    hook = syncs(3, **how)
    estimator = make(tmp_path, replicate(mlp_model_fn(optax.adam(0.01)), 2), check_replicas_every=4)
    corrupt(monkeypatch, 3, which)
    estimator.train(lambda: [(x[0], y[0])] * 6, hooks=[hook])
    assert int(estimator.get_variable_value("global_step")) == 6
    if how.get("how") != "mean":  # the first device's are as if nothing had drifted
        monkeypatch.undo()
        sound = make(tmp_path / "sound", replicate(mlp_model_fn(optax.adam(0.01)), 2))
        sound.train(lambda: [(x[0], y[0])] * 6)
        for name in sound.get_variable_names():
            np.testing.assert_array_equal(estimator.get_variable_value(name), sound.get_variable_value(name))


def test_wrong_calls_in_a_hook_are_refused(tmp_path):
    x, y = regression(8)
    estimator = make(tmp_path, replicate(mlp_model_fn(optax.adam(0.01)), 2))
    with pytest.raises(ValueError, match=r"sync_variables\('nothing'\)` names no variable; there are 'hidden/b',"):
        estimator.train(lambda: [(x[0], y[0])] * 2, hooks=[syncs(1, names="nothing")])
    with pytest.raises(RuntimeError, match="Only training changes variables, .* got a change in mode 'eval'"):
        estimator.evaluate(lambda: [(x[0], y[0])] * 2, hooks=[syncs(1)])
