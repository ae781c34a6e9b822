"""Hooks that end a training run by the results of its evaluations."""

import itertools
import time

import numpy as np
import pytest
from testing.estimators import refuse, saved_steps, step_of
from testing.scenarios.early_stopping import (
    ONE,
    TABLE,
    KillAt,
    KillEvaluation,
    evaluated,
    make,
    no_decrease,
    record,
    run,
    stops,
)

import estimator as est
from estimator.loop._context import RunContext

FALLING = {1000: 0.9, 1500: 0.8, 2000: 0.5, 2500: 0.6, 3000: 0.55}


# The rules.


@pytest.mark.covers("6 higher")
@pytest.mark.parametrize(
    ("kind", "threshold", "min_steps", "expected"),
    [
        ("higher", 0.89, 0, True),
        ("higher", 0.9, 0, False),  # strictly
        ("higher", 0.89, 1001, False),
        ("higher", 0.89, 1000, True),
        ("lower", 0.51, 0, True),  # in any evaluation
        ("lower", 0.5, 0, False),
        ("lower", 0.51, 2500, False),
    ],
)
def test_a_threshold_is_passed_in_any_evaluation_from_min_steps_on(tmp_path, kind, threshold, min_steps, expected):
    estimator = make(tmp_path)
    record(estimator, FALLING)
    hook = getattr(est, f"stop_if_{kind}_hook")(estimator, "loss", threshold, min_steps=min_steps)
    assert stops(hook, estimator) == expected


@pytest.mark.covers("6 no increase")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_steps": 1000}, True),  # best at 2000, the last at 3000
        ({"max_steps": 1001}, False),
        ({"max_steps": 500, "min_steps": 2500}, False),  # 3000 is better than 2500
        ({"max_evals": 2}, True),
        ({"max_evals": 3}, False),
        ({"max_evals": 3, "max_steps": 1000}, True),  # what comes first
        ({"max_evals": 3, "min_delta": 0.3}, False),  # 2000 is better than 1000 by 0.4
        ({"max_evals": 3, "min_delta": 0.5}, True),
        ({"max_evals": 1, "min_delta": 0.1}, True),  # 1500 is not better than 1000 by more than that
    ],
)
@pytest.mark.parametrize("kind", ["decrease", "increase"])
def test_patience_is_counted_from_the_best_evaluation(tmp_path, kind, options, expected):
    estimator = make(tmp_path)
    record(estimator, {step: value if kind == "decrease" else -value for step, value in FALLING.items()})
    names = {"max_steps": f"max_steps_without_{kind}", "max_evals": f"max_evals_without_{kind}"}
    options = {names.get(name, name): value for name, value in options.items()}
    hook = getattr(est, f"stop_if_no_{kind}_hook")(estimator, "loss", **options)
    assert stops(hook, estimator) == expected


@pytest.mark.covers("6 no increase")
@pytest.mark.parametrize("values", [[np.nan, 1.0, 0.9, 0.8], [1.0, np.nan, 0.9, np.nan]])
def test_nan_is_no_improvement_and_reported_once(tmp_path, messages, values):
    estimator = make(tmp_path)
    record(estimator, dict(enumerate(values)))
    hook = est.stop_if_no_decrease_hook(estimator, "loss", max_evals_without_decrease=2)
    assert not stops(hook, estimator)
    record(estimator, {4: np.nan, 5: np.nan})
    assert stops(hook, estimator)
    lower = est.stop_if_lower_hook(estimator, "loss", 0.7)
    assert not stops(lower, estimator)
    step = int(np.argmax(np.isnan(values)))
    warnings = [
        m for m in messages() if m == f"stop_if_no_decrease_hook: 'loss' is NaN at step {step}, no improvement."
    ]
    assert len(warnings) == 1


def test_all_nan_runs_out_of_patience(tmp_path):
    estimator = make(tmp_path)
    record(estimator, dict.fromkeys([10, 20, 30], np.nan))
    assert stops(est.stop_if_no_increase_hook(estimator, "loss", 20), estimator)
    assert not stops(est.stop_if_no_increase_hook(estimator, "loss", 21), estimator)


@pytest.mark.covers("6 needs evals")
def test_nothing_evaluated_stops_nothing_and_is_said_once(tmp_path, messages):
    estimator = make(tmp_path)
    hook = est.stop_if_lower_hook(estimator, "loss", 1e9)
    assert not stops(hook, estimator)
    estimator.train(lambda: [ONE] * 2, hooks=[hook])
    said = [each for each in messages() if "stop_if_lower_hook has seen no evaluation in" in each]
    assert len(said) == 1 and "stops nothing. `est.train_and_evaluate` makes evaluations" in said[0]


@pytest.mark.covers("6 data source")
def test_evaluations_are_read_from_eval_dir(tmp_path):
    estimator = make(tmp_path)
    record(estimator, {10: 1.0})
    record(estimator, {10: 3.0}, name="test")
    assert not stops(est.stop_if_higher_hook(estimator, "loss", 2), estimator)
    assert stops(est.stop_if_higher_hook(estimator, "loss", 2, eval_dir=estimator.eval_dir("test")), estimator)


def test_the_names_of_tensorflow_are_there():
    for name in "make_early_stopping stop_if_higher stop_if_lower stop_if_no_increase stop_if_no_decrease".split():
        assert getattr(est.experimental, f"{name}_hook") is getattr(est, f"{name}_hook")


# When a hook looks.


@pytest.mark.quick
@pytest.mark.covers("6 when checked")
@pytest.mark.parametrize("secs", [60, None])
def test_a_function_is_called_after_the_first_step_and_every_n_steps(tmp_path, secs):
    estimator = make(tmp_path)
    calls = []
    hook = est.make_early_stopping_hook(estimator, lambda: calls.append(1) or len(calls) == 3, secs, run_every_steps=4)
    estimator.train(lambda: [ONE] * 30, hooks=[hook])
    assert (len(calls), step_of(estimator), saved_steps(estimator)) == (3, 9, [0, 9])


@pytest.mark.covers("6 when checked")
def test_a_function_is_called_every_n_seconds(tmp_path):
    estimator = make(tmp_path)
    calls = []
    estimator.train(lambda: [ONE] * 30, hooks=[est.make_early_stopping_hook(estimator, lambda: calls.append(1))])
    assert len(calls) == 1
    hook = est.make_early_stopping_hook(estimator, lambda: True, run_every_secs=1e-9)
    estimator.train(lambda: [ONE] * 30, hooks=[hook])
    assert step_of(estimator) == 31


@pytest.mark.covers("6 effect")
def test_train_and_evaluate_stops_right_after_an_evaluation_and_knows_that_it_is_the_end(tmp_path):
    class Ends(est.Exporter):
        name = "ends"

        def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
            ends.append((eval_result["global_step"], is_the_final_export))

    ends = []
    estimator = make(tmp_path, table=range(50))
    hook = est.stop_if_higher_hook(estimator, "m", 5)
    metrics, _ = run(estimator, hook, exporters=Ends())
    assert metrics == {"m": 6.0, "loss": metrics["loss"], "global_step": 6}
    assert step_of(estimator) == 6
    assert ends == [(2, False), (4, False), (6, False), (6, True)]


def test_an_evaluation_at_the_end_alone_is_seen(tmp_path, messages):
    estimator = make(tmp_path, table=range(50))
    run(estimator, est.stop_if_higher_hook(estimator, "m", 50), max_steps=3, every=10)
    assert not [each for each in messages() if "has seen no evaluation" in each]


@pytest.mark.covers("6 errors")
def test_an_unknown_metric_is_an_error_at_the_first_evaluation(tmp_path):
    estimator = make(tmp_path)
    hook = est.stop_if_higher_hook(estimator, "accuracy", 5)
    message = r"stop_if_higher_hook got metric_name='accuracy', but the evaluation of step 2 in .* has \['loss', 'm'\]"
    with pytest.raises(ValueError, match=message):
        run(estimator, hook)


# After a restart.


def test_a_hook_reads_the_evaluations_of_the_call_that_it_is_given_to(tmp_path):
    estimator = make(tmp_path, TABLE)
    hook = no_decrease(estimator)
    run(estimator, hook, name="a")  # stops at step 14
    run(estimator, hook, max_steps=20, name="b")
    assert list(est.read_eval_metrics(estimator.eval_dir("b"))) == [14, 16, 18, 20] and hook.eval_dir is None


@pytest.mark.slow
@pytest.mark.covers("6 a restart", "13 8 early stopping")
@pytest.mark.parametrize(("kill", "every"), [(KillAt(7), 2), (KillEvaluation(6), 2), (KillEvaluation(12), None)])
def test_a_killed_training_stops_where_it_would_have(tmp_path, kill, every):
    estimator = make(tmp_path, TABLE, save_checkpoints_steps=3 if every else 2)
    with pytest.raises(KeyboardInterrupt):
        hooks = ([kill], []) if isinstance(kill, KillAt) else ([], [kill])
        run(estimator, no_decrease(estimator), every=every, hooks=hooks[0], hooks_=hooks[1])
    restarted = make(tmp_path, TABLE, save_checkpoints_steps=3 if every else 2)
    metrics, _ = run(restarted, no_decrease(restarted), every=every)
    assert metrics["global_step"] == step_of(restarted) == 14
    assert evaluated(restarted) == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.covers("6 a restart")
def test_evaluations_of_lost_steps_do_not_count_until_they_are_repeated(tmp_path):
    estimator = make(tmp_path)
    record(estimator, {100: 1.0, 200: 2.0, 300: 9.0})
    hook = est.stop_if_higher_hook(estimator, "loss", 8)
    context = RunContext("train", estimator.model_dir, 250)
    hook.after_create_state(context)
    assert not context.stop_requested
    record(estimator, {300: 9.0}, time=-60.0)  # after a clock was set back, or by a host whose clock is slow
    hook.after_evaluation(context)
    assert context.stop_requested
    assert stops(hook, estimator, step=300)


@pytest.mark.parametrize("jump", [7200, -7200])
def test_no_clock_decides_where_a_training_ends_or_what_it_saves(tmp_path, monkeypatch, jump):
    now = itertools.count(time.time(), jump)
    monkeypatch.setattr(time, "time", lambda: next(now))
    estimator = make(tmp_path, TABLE, save_checkpoints_steps=2)
    metrics, _ = run(estimator, no_decrease(estimator))
    assert metrics["global_step"] == step_of(estimator) == 14
    assert evaluated(estimator) == [2, 4, 6, 8, 10, 12, 14] and saved_steps(estimator) == [6, 8, 10, 12, 14]
    assert sum(est.goodput(estimator.model_dir).shares.values()) == pytest.approx(1)


def test_a_training_that_was_stopped_makes_no_more_steps(tmp_path):
    estimator = make(tmp_path, TABLE)
    first = run(estimator, no_decrease(estimator))
    again = make(tmp_path, TABLE)
    assert run(again, no_decrease(again)) == first
    assert step_of(again) == 14
    run(again, no_decrease(again, max_evals_without_decrease=4), max_steps=18)
    assert step_of(again) == 18


# What is refused.


@pytest.mark.covers("6 errors")
@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("make_early_stopping_hook", ("e", refuse), TypeError, "`estimator` of make_early_stopping_hook must have"),
        ("make_early_stopping_hook", (None, 5), TypeError, "`should_stop_fn` of make_early_stopping_hook must be"),
        ("make_early_stopping_hook", (None, refuse, None), ValueError, "one of run_every_secs and run_every_steps"),
        (
            "make_early_stopping_hook",
            (None, refuse, 60, 0),
            ValueError,
            "run_every_steps of make_.* positive int; got 0",
        ),
        ("make_early_stopping_hook", (None, refuse, -1), ValueError, "run_every_secs of make_.* positive number; got"),
        ("stop_if_higher_hook", (5, "m", 1), TypeError, "`estimator` of stop_if_higher_hook must have .*given: 5"),
        ("stop_if_lower_hook", (None, 3, 1), TypeError, "`metric_name` of stop_if_lower_hook must be a string"),
        ("stop_if_lower_hook", (None, "m", 1, None, -1), ValueError, "min_steps >= 0 for stop_if_lower_hook, given"),
        ("stop_if_no_decrease_hook", (None, "m"), ValueError, "max_steps_without_decrease or max_evals_without_dec"),
        ("stop_if_no_increase_hook", (None, "m", 0), ValueError, "max_steps_without_increase > 0 for stop_if_no_in"),
        ("stop_if_no_decrease_hook", (None, "m", {"max_evals_without_decrease": -1}), ValueError, "decrease > 0 for"),
        ("stop_if_no_decrease_hook", (None, "m", 1, {"min_delta": -0.5}), ValueError, "min_delta >= 0 for .*: -0.5"),
    ],
)
def test_arguments_are_checked(tmp_path, name, arguments, error, message):
    estimator, *rest = arguments
    options = rest.pop() if isinstance(rest[-1], dict) else {}
    with pytest.raises(error, match=message):
        getattr(est, name)(make(tmp_path) if estimator is None else estimator, *rest, **options)


def test_a_hook_is_for_one_estimator(tmp_path):
    hook = no_decrease(make(tmp_path / "a"))
    with pytest.raises(
        ValueError, match="stop_if_no_decrease_hook was made for the Estimator of .*a, but trains the one of"
    ):
        make(tmp_path / "b").train(lambda: [ONE], hooks=[hook])


def test_which_of_several_evaluations_to_read_must_be_said(tmp_path):
    estimator = make(tmp_path)
    specs = {name: est.EvalSpec(refuse) for name in "ab"}
    with pytest.raises(ValueError, match=r"are called \['a', 'b'\]. Give it eval_dir=estimator.eval_dir\('a'\), say"):
        est.train_and_evaluate(estimator, est.TrainSpec(refuse, hooks=[no_decrease(estimator)]), specs)


def test_only_one_hook_says_what_is_best(tmp_path):
    estimator = make(tmp_path)
    hooks = [no_decrease(estimator, restore_best=True) for _ in range(2)]
    with pytest.raises(ValueError, match="Several early stopping hooks have restore_best=True"):
        est.train_and_evaluate(estimator, est.TrainSpec(refuse, hooks=hooks), est.EvalSpec(refuse))
