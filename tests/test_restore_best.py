"""Training that ends with the variables of its best evaluation."""

import os

import numpy as np
import optax
import pytest
from testing.estimators import saved_steps, step_of
from testing.hooks import At, When
from testing.scenarios.early_stopping import ONE, TABLE, KillEvaluation, evaluated, make, no_decrease, record, run
from testing.signals import terminate

import estimator as est
from estimator.checkpoint import _checkpoints, _save
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import CheckpointWriteError
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn


@pytest.mark.slow
@pytest.mark.covers("6 restore best", "13 8 early stopping", "7 checkpoint GC")
@pytest.mark.parametrize("max_steps", [None, 13])
@pytest.mark.usefixtures("users_compiler")
def test_the_best_variables_are_the_last_ones_and_the_best_is_kept_on_disk(tmp_path, max_steps, messages):
    estimator = make(tmp_path / "a", TABLE, keep_checkpoint_max=1)
    metrics, _ = run(estimator, no_decrease(estimator, restore_best=True), max_steps)
    last = max_steps or 14
    assert metrics["m"] == 6.0
    assert metrics["global_step"] == step_of(estimator) == last
    assert saved_steps(estimator) == [8, last]
    assert "Restoring the variables of step 8, the best by 'm'." in messages()
    other = make(tmp_path / "b", TABLE)
    other.train(lambda: [ONE] * 8)
    for name in sorted({*other.get_variable_names()} - {"global_step"}):  # slots, too
        np.testing.assert_array_equal(estimator.get_variable_value(name), other.get_variable_value(name))
    for each in (estimator, make(tmp_path / "a", TABLE)):
        assert each.evaluate(lambda: ONE) == metrics


@pytest.mark.slow
def test_the_evaluation_of_the_restored_state_has_a_directory_of_its_own(tmp_path, messages):
    estimator = make(tmp_path, TABLE)
    for _ in range(2):  # a run that has ended is neither restored again nor does it change what was written
        metrics, _ = run(estimator, no_decrease(estimator, restore_best=True))
        assert metrics["m"] == 6.0
        written = est.read_eval_metrics(estimator.eval_dir())
        assert {step: values["m"] for step, values in written.items()} == pytest.approx(
            {i: TABLE[i] for i in range(2, 15, 2)}
        )
        restored = est.read_eval_metrics(estimator.eval_dir("restored"))
        assert {step: values["m"] for step, values in restored.items()} == {14: 6.0}
        estimator = make(tmp_path, TABLE)
    warned = (
        "The optimizers' slots go back to step 8 as well, and Adam's count and schedules of optax in them; global_step "
        "stays 14, and so do schedules that read it."
    )
    assert messages().count(warned) == 1
    estimator.train(lambda: [ONE] * 2)  # its checkpoint has values of its own
    assert Checkpoint(estimator.latest_checkpoint()).restored_from is None


def test_the_evaluations_of_an_eval_spec_with_a_name_keep_it(tmp_path):
    estimator = make(tmp_path, TABLE)
    hook = no_decrease(estimator, restore_best=True)
    spec = est.EvalSpec(lambda: ONE, name="test")
    est.train_and_evaluate(estimator, est.TrainSpec(lambda: [ONE] * 12, hooks=[hook]), spec, 2)
    assert [*est.read_eval_metrics(estimator.eval_dir("test_restored"))] == [12]
    assert est.read_eval_metrics(estimator.eval_dir("test"))[12]["m"] == pytest.approx(TABLE[12])


def test_the_last_state_stays_where_the_best_one_cannot_be_written(tmp_path, monkeypatch):
    def write(path, *args, write=_checkpoints.save_checkpoint, **kwargs):
        if "group" not in kwargs:  # not of a run, which may be of several processes
            raise OSError(28, "No space left on device")
        write(path, *args, **kwargs)

    monkeypatch.setattr(_checkpoints, "save_checkpoint", write)
    estimator = make(tmp_path, TABLE)
    message = r"(?s)The checkpoint of step 14 could not be written .*No space left .*The newest checkpoint is .*-14\."
    with pytest.raises(CheckpointWriteError, match=message):
        run(estimator, no_decrease(estimator, restore_best=True))
    assert saved_steps(estimator)[-1] == 14 and estimator.get_variable_value("steps") == 14
    assert sorted(os.listdir(tmp_path / "ckpt-14")) == sorted(os.listdir(tmp_path / "ckpt-0"))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".unfinished")]


def test_where_the_last_is_the_best_nothing_is_restored(tmp_path, messages):
    estimator = make(tmp_path, -np.arange(50))
    metrics, _ = run(estimator, no_decrease(estimator, restore_best=True), max_steps=5)
    assert (metrics["m"], metrics["global_step"]) == (-5.0, 5)
    assert not [m for m in messages() if m.startswith("Restoring")]


def test_the_highest_is_the_best_for_increase_even_if_by_little(tmp_path):
    estimator = make(tmp_path, -np.array(TABLE))
    options = {"max_evals_without_increase": 3, "min_delta": 1.5, "restore_best": True}
    metrics, _ = run(estimator, est.stop_if_no_increase_hook(estimator, "m", **options))
    assert (metrics["m"], metrics["global_step"]) == (-6.0, 14)


@pytest.mark.slow
@pytest.mark.covers("6 restore best")
def test_towers_restore_their_shards(tmp_path):
    def wrap(model_fn):
        kind = VariableDistribution.SHARDED
        return replicate_model_fn(model_fn, devices=["/cpu:0", "/cpu:1"], variable_distribution=kind)

    estimator = make(tmp_path, TABLE, TowerOptimizer(optax.sgd(0.1, momentum=0.9)), wrap)
    metrics, _ = run(estimator, no_decrease(estimator, restore_best=True))
    assert metrics["m"] == 6.0
    assert estimator.train(lambda: [ONE] * 2).evaluate(lambda: ONE)["m"] == TABLE[16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "max_steps", "batches", "restarts"), [(14, None, 100, 2), (14, 14, 14, 2), (9, None, 9, 1)]
)
def test_a_training_killed_in_its_last_evaluation_ends_with_the_best(tmp_path, last, max_steps, batches, restarts):
    estimator = make(tmp_path, TABLE)
    with pytest.raises(KeyboardInterrupt):
        hook = no_decrease(estimator, restore_best=True)
        run(estimator, hook, max_steps, hooks_=[KillEvaluation(last)], batches=batches)
    restarted = make(tmp_path, TABLE, resume_input="count")
    for _ in range(restarts):
        metrics, _ = run(restarted, no_decrease(restarted, restore_best=True), max_steps, batches=batches)
        assert (metrics["m"], metrics["global_step"]) == (6.0, last)


@pytest.mark.slow
def test_a_training_killed_while_the_best_replaces_the_last_ends_with_the_best(tmp_path, monkeypatch):
    renamed = []

    def rename(source, path, rename=_save.rename):
        renamed.append(os.path.basename(path))
        if renamed.count("ckpt-14") == 2:  # the last state is removed; the best is not in its place yet
            raise KeyboardInterrupt
        rename(source, path)

    monkeypatch.setattr(_save, "rename", rename)
    estimator = make(tmp_path, TABLE)
    with pytest.raises(KeyboardInterrupt):
        run(estimator, no_decrease(estimator, restore_best=True))
    assert saved_steps(estimator)[-1] == 8
    restarted = make(tmp_path, TABLE, resume_input="count")
    metrics, _ = run(restarted, no_decrease(restarted, restore_best=True))
    assert (metrics["m"], metrics["global_step"], saved_steps(restarted)[-1]) == (6.0, 14, 14)


def test_a_loss_of_nan_ends_with_the_best(tmp_path):
    estimator = make(tmp_path, TABLE)
    hooks = [est.hooks.NanTensorHook(fail_on_nan_loss=False), no_decrease(estimator, restore_best=True)]
    train_spec = est.TrainSpec(lambda: [ONE] * 11 + [ONE * np.nan] * 9, hooks=hooks)
    metrics, _ = est.train_and_evaluate(estimator, train_spec, est.EvalSpec(lambda: ONE), eval_every_steps=2)
    assert metrics["m"] == 6.0
    assert estimator.evaluate(lambda: ONE) == metrics


@pytest.mark.quick
@pytest.mark.parametrize(
    ("last", "message"),
    [({4: 0.7}, "of step 2, but its state was not saved"), ({}, "but the last state, of step 4, was not evaluated")],
)
def test_what_can_not_be_restored_is_said(tmp_path, messages, last, message):
    class Record(est.Hook):
        def end(self, context):
            record(estimator, {2: 0.1, **last}, time=1e12)

    estimator = make(tmp_path)
    hook = est.stop_if_no_decrease_hook(estimator, "loss", 100, restore_best=True)
    estimator.train(lambda: [ONE] * 4, hooks=[Record(), hook])
    assert estimator.get_variable_value("steps") == 4
    assert any("restores nothing: the best evaluation is of step 2" in m and message in m for m in messages())


def test_another_hook_may_evaluate(tmp_path):
    estimator = make(tmp_path, TABLE)
    evaluator = est.InMemoryEvaluatorHook(estimator, lambda: ONE, every_n_iter=1)
    hook = no_decrease(estimator, restore_best=True, run_every_steps=1)
    estimator.train(lambda: [ONE] * 14, hooks=[evaluator, hook])
    assert step_of(estimator) == 7
    assert estimator.evaluate(lambda: ONE)["m"] == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("during_evaluation", [True, False])
def test_a_training_that_is_preempted_restores_and_evaluates_nothing(tmp_path, during_evaluation):
    in_evaluation = When(after_create_state=lambda context: context.global_step == 10 and terminate())
    kill = {"hooks_": [in_evaluation]} if during_evaluation else {"hooks": [At(10, terminate)]}
    estimator = make(tmp_path, TABLE)
    with pytest.raises(est.Preempted):
        run(estimator, no_decrease(estimator, restore_best=True), None, **kill)
    assert estimator.get_variable_value("steps") == step_of(estimator) == 10
    assert evaluated(estimator) == ([2, 4, 6, 8] if during_evaluation else [2, 4, 6, 8, 10])
    run(estimator, no_decrease(estimator, restore_best=True), None)
    assert evaluated(estimator) == [2, 4, 6, 8, 10, 12, 14]
    assert estimator.get_variable_value("steps") == 8
