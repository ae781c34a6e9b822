"""Optuna's pruning of trials, by the evaluations of a training run."""

import os
import sys

import numpy as np
import optax
import pytest
from testing.estimators import Linear, endless, make, saved_steps, times

import estimator as est

optuna = pytest.importorskip("optuna")

MAX_STEPS = 40


def model_fn(features, labels, mode, params):
    return Linear(lambda: optax.sgd(params["rate"]))(features, labels, mode)


def estimator_of(trial, model_dir, **config):
    return make(model_dir / str(trial.number), model_fn, {"rate": trial.params["rate"]}, **config)


def train(estimator, hooks, exporters=()):
    train_spec = est.TrainSpec(endless, max_steps=MAX_STEPS, hooks=hooks)
    eval_spec = est.EvalSpec(times(1), throttle_secs=0, exporters=exporters)
    return est.train_and_evaluate(estimator, train_spec, eval_spec, eval_every_steps=10)


class Ends(est.Hook):
    def end(self, context):
        self.error, self.reason = context.error, context.stop_reason


@pytest.fixture
def study():
    """The first trial is good; the pruner ends any that is worse than it."""
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    for rate in (1e-2, 1e-4, 1e-3):
        study.enqueue_trial({"rate": rate})
    return study


def test_a_trial_that_is_worse_is_pruned_and_its_model_dir_is_well(tmp_path, study):
    ends = Ends()

    def objective(trial):
        trial.suggest_float("rate", 1e-4, 1e-2)
        estimator = estimator_of(trial, tmp_path)
        # A saver after the hook finds the error, and saves nothing.
        saver = est.CheckpointSaverHook(save_steps=1000)
        return train(estimator, [est.OptunaPruningHook(trial, "loss"), saver, ends])[0]["loss"]

    study.optimize(objective, n_trials=3)
    good, *pruned = study.trials
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert list(good.intermediate_values) == [10, 20, 30, 40] and good.value == good.intermediate_values[40]
    assert isinstance(ends.error, optuna.TrialPruned) and ends.reason == "pruned"
    for trial in pruned:
        estimator = estimator_of(trial, tmp_path)
        assert list(trial.intermediate_values) == [10] and saved_steps(estimator) == [0, 10]
        evaluations = est.read_eval_metrics(estimator.eval_dir())
        assert {step: row["loss"] for step, row in evaluations.items()} == trial.intermediate_values
        assert estimator.evaluate(times(1))["loss"] == trial.intermediate_values[10]
        assert not os.path.exists(os.path.join(estimator.model_dir, "export"))
    # It resumes, and ends as a run that was not pruned.
    whole = make(tmp_path / "whole", model_fn, {"rate": trial.params["rate"]}).train(endless, max_steps=MAX_STEPS)
    estimator.train(endless, max_steps=MAX_STEPS)
    np.testing.assert_array_equal(estimator.get_variable_value("w"), whole.get_variable_value("w"))


def test_the_trial_is_pruned_by_evaluations_in_memory_too(tmp_path, study):
    def objective(trial):
        trial.suggest_float("rate", 1e-4, 1e-2)
        estimator = estimator_of(trial, tmp_path)
        evaluator = est.InMemoryEvaluatorHook(estimator, times(1), every_n_iter=10)
        hook = est.OptunaPruningHook(trial, "loss", run_every_steps=10)
        estimator.train(endless, max_steps=35, hooks=[evaluator, hook])
        return evaluator.results[-1]["loss"]

    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "WAITING"]
    assert [list(trial.intermediate_values) for trial in study.trials] == [[0, 10, 20, 30, 35], [0, 10], []]


def test_a_metric_that_no_evaluation_has_is_an_error(tmp_path):
    trial = optuna.create_study().ask({"rate": optuna.distributions.FloatDistribution(0.0, 1.0)})
    with pytest.raises(ValueError, match=r"OptunaPruningHook got metric_name='auc', but the evaluation of step 10"):
        train(estimator_of(trial, tmp_path), [est.OptunaPruningHook(trial, "auc")])


def test_without_optuna_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    want = r"`est.OptunaPruningHook` needs the package optuna. Install it in your clone: pip install -e '\.\[optuna\]'"
    with pytest.raises(ImportError, match=want):
        est.OptunaPruningHook(None, "loss")
