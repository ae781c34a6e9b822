"""`train_and_evaluate`: when it evaluates, on what, and what it returns."""

import numpy as np
import optax
import pytest
from testing.estimators import Linear, X, Y, make, refuse, saved_steps, step_of, times
from testing.hooks import When
from testing.model_fns import minimizing, zeros
from testing.scenarios.evaluator import EVAL, Calls, evaluated

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from replicate import VariableDistribution, replicate_model_fn


def run(estimator, batches=100, max_steps=None, eval_spec=EVAL, eval_every_steps=None, hooks=(), listeners=()):
    spec = est.TrainSpec(times(batches), max_steps, hooks, listeners)
    return est.train_and_evaluate(estimator, spec, eval_spec, eval_every_steps)


def ends(seen):
    """A hook that notes the modes and the steps of the ends of runs."""
    return When(end=lambda context: seen.append((str(context.mode), context.global_step)))


# When.


@pytest.mark.covers("5 mechanism", "5 first checkpoint", "5 start_delay_secs")
def test_an_evaluation_follows_each_checkpoint_but_the_first_and_the_last_state_has_one(tmp_path):
    """The first is the one that the run resumes from. Nothing delays them."""
    estimator = make(tmp_path, save_checkpoints_steps=10).train(times(10))
    metrics, exports = run(estimator, max_steps=32, eval_spec=est.EvalSpec(times(2), start_delay_secs=1e6))
    assert evaluated(estimator) == [20, 30, 32]
    assert metrics == estimator.evaluate(times(2))
    assert (metrics["global_step"], exports) == (32, [])


@pytest.mark.quick
@pytest.mark.covers("5 mechanism", "13 3 evaluation tied to checkpoints")
@pytest.mark.parametrize("config", [{}, {"save_checkpoints_steps": None, "save_checkpoints_secs": None}])
def test_evaluations_may_be_at_multiples_of_steps_whatever_is_saved(tmp_path, config):
    estimator = make(tmp_path, **config)
    estimator.train(times(3))
    saves = estimator.latest_checkpoint() is not None
    metrics, _ = run(estimator, max_steps=22, eval_every_steps=5)
    assert evaluated(estimator) == [5, 10, 15, 20, 22]
    assert saved_steps(estimator) == ([0, 3, 22] if saves else [22])
    assert metrics == estimator.evaluate(times(2))


@pytest.mark.quick
@pytest.mark.covers("5 mechanism")
@pytest.mark.usefixtures("users_compiler")
def test_evaluations_see_the_variables_of_their_step_and_do_not_change_the_training_nor_restart_its_input(tmp_path):
    calls, batches = [], [(X * i, Y) for i in range(1, 9)]
    estimator, other = make(tmp_path / "a"), make(tmp_path / "b")
    spec = est.TrainSpec(lambda: calls.append(1) or iter(batches))
    est.train_and_evaluate(estimator, spec, EVAL, eval_every_steps=3)
    assert len(calls) == 1
    seen = est.read_eval_metrics(estimator.eval_dir())
    assert list(seen) == [3, 6, 8]
    for step, part in ((3, batches[:3]), (6, batches[3:6]), (8, batches[6:])):
        other.train(lambda part=part: part)
        assert seen[step]["loss"] == other.evaluate(times(2))["loss"]
    np.testing.assert_array_equal(estimator.get_variable_value("w"), other.get_variable_value("w"))


@pytest.mark.slow
@pytest.mark.covers("5 throttle_secs")
def test_throttle_secs_leaves_out_all_but_the_first_and_the_last(tmp_path, messages):
    for every in (None, 5):
        estimator = make(tmp_path / str(every), save_checkpoints_steps=10)
        run(estimator, max_steps=32, eval_spec=est.EvalSpec(times(2), throttle_secs=600), eval_every_steps=every)
        assert evaluated(estimator) == [every or 10, 32]
    assert "Skip the evaluation at step 20 due to throttle secs." in messages()


@pytest.mark.covers("5 order at a save", "5 early stop from listener")
def test_listeners_are_called_before_the_evaluation_and_one_may_stop_after_it(tmp_path):
    class Stop(est.hooks.CheckpointSaverListener):
        def after_save(self, context, step):
            before.append(list(est.read_eval_metrics(estimator.eval_dir())))
            return step == 20

    before = []
    estimator = make(tmp_path, save_checkpoints_steps=10)
    metrics, _ = run(estimator, listeners=[Stop()])
    assert before == [[], [], [10]]
    assert evaluated(estimator) == [10, 20]
    assert metrics["global_step"] == step_of(estimator) == 20


# At what cost.


@pytest.mark.covers("5 mechanism", "13 1 rebuilt and reloaded at every call")
def test_ten_evaluations_compile_once_and_read_no_checkpoint(tmp_path, compilations, monkeypatch):
    counts = []
    count = When(end=lambda context: counts.append(len(compilations)))
    for function in ("restore", "read"):
        monkeypatch.setattr(Checkpoint, function, refuse)
    model_fn = Linear()
    estimator = make(tmp_path, model_fn)
    run(estimator, max_steps=50, eval_spec=est.EvalSpec(times(2), hooks=[count]), eval_every_steps=5)
    assert len(counts) == 10
    assert len(set(counts)) == 1
    assert model_fn.modes.count("eval") == 2  # one to find the variables, one to compile
    estimator.evaluate(times(2))
    assert len(compilations) == counts[0]


# How it ends.


@pytest.mark.quick
@pytest.mark.covers("5 final export flag", "13 6 final export flag")
@pytest.mark.parametrize("max_steps", [22, None])
def test_the_end_is_known_to_be_the_end_when_the_input_ends(tmp_path, max_steps):
    exporter = Calls()
    estimator = make(tmp_path, save_checkpoints_steps=10)
    spec = est.EvalSpec(times(1), exporters=exporter)
    metrics, exports = run(estimator, batches=15, max_steps=max_steps, eval_spec=spec)
    assert exporter.calls == [(10, 10, False), (15, 15, True)]
    assert metrics["global_step"] == 15
    assert exports == ["15"]


@pytest.mark.covers("5 final export flag")
@pytest.mark.parametrize("max_steps", [10, None])
def test_the_end_is_known_to_be_the_end_at_max_steps_and_a_state_is_not_evaluated_twice(tmp_path, max_steps):
    seen, exporter = [], Calls()
    estimator = make(tmp_path, save_checkpoints_steps=5)
    run(estimator, 100 if max_steps else 10, max_steps, est.EvalSpec(times(1), hooks=[ends(seen)], exporters=exporter))
    assert seen == [("eval", 5), ("eval", 10)]
    before_the_end = [(5, 5, False)] if max_steps else [(5, 5, False), (10, 10, False)]
    assert exporter.calls == [*before_the_end, (10, 10, True)]


def test_hooks_of_both_specs_are_called_and_exporters_get_a_checkpoint_of_the_step_evaluated(tmp_path):
    seen, exporter = [], Calls()
    spec = est.EvalSpec(times(1), hooks=[ends(seen)], exporters=exporter)
    run(make(tmp_path), max_steps=5, eval_spec=spec, eval_every_steps=2, hooks=[ends(seen)])
    assert seen == [("eval", 2), ("eval", 4), ("eval", 5), ("train", 5)]
    assert exporter.calls == [(2, 2, False), (4, 4, False), (5, 5, True)]


@pytest.mark.covers("5 return", "13 5 nothing returned when finished")
def test_a_training_that_had_ended_is_evaluated_and_exported(tmp_path):
    make(tmp_path).train(times(3))
    exporter = Calls()
    estimator = make(tmp_path)
    spec = est.TrainSpec(refuse, max_steps=3, hooks=[est.Hook()])
    metrics, exports = est.train_and_evaluate(estimator, spec, est.EvalSpec(times(1), exporters=exporter))
    assert metrics == estimator.evaluate(times(1))
    assert exporter.calls == [(3, 3, True)]
    assert len(exports) == 1


def test_what_fails_is_not_evaluated(tmp_path):
    def fails():
        yield X, Y
        raise OSError("no more")

    estimator = make(tmp_path)
    with pytest.raises(OSError, match="no more"):
        est.train_and_evaluate(estimator, est.TrainSpec(fails), est.EvalSpec(refuse))


@pytest.mark.slow
def test_after_a_nan_loss_the_newest_checkpoint_is_evaluated(tmp_path):
    exporter = Calls()
    estimator = make(tmp_path, save_checkpoints_steps=3)
    batches = [(X, Y)] * 4 + [(X * np.nan, Y)] * 4
    hook = est.hooks.NanTensorHook(fail_on_nan_loss=False)
    spec = est.EvalSpec(times(1), exporters=exporter)
    train_spec = est.TrainSpec(lambda: batches, hooks=[hook])
    metrics, _ = est.train_and_evaluate(estimator, train_spec, spec, eval_every_steps=2)
    assert metrics["global_step"] == 4
    assert exporter.calls == [(2, 2, False), (4, 4, False), (4, 4, True)]


# Several.


@pytest.mark.quick
@pytest.mark.covers("5 several eval sets", "13 4 one EvalSpec only")
@pytest.mark.parametrize("as_dict", [True, False])
def test_several_evaluations_each_have_their_own_metrics_and_times(tmp_path, as_dict):
    estimator = make(tmp_path)
    exporter = Calls()
    twice = lambda: (X, 2 * Y)  # noqa: E731
    if as_dict:
        specs = {"one": est.EvalSpec(times(1)), "two": est.EvalSpec(twice, exporters=exporter, eval_every_steps=3)}
    else:
        specs = [est.EvalSpec(times(1), name="one")]
        specs += [est.EvalSpec(twice, name="two", exporters=exporter, eval_every_steps=3)]
    metrics, exports = run(estimator, max_steps=4, eval_spec=specs, eval_every_steps=2)
    assert metrics["two"]["label"] == 2 * metrics["one"]["label"]
    assert exports == {"one": [], "two": ["4"]}
    assert (evaluated(estimator, "one"), evaluated(estimator, "two")) == ([2, 4], [3, 4])


@pytest.mark.slow
def test_two_towers_find_what_one_device_finds(tmp_path):
    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y, x @ zeros("w", (2, 1))), optax.sgd(0.01))
    devices, kind = ["/cpu:0", "/cpu:1"], VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER
    one = make(tmp_path / "one", model_fn)
    two = make(tmp_path / "two", replicate_model_fn(model_fn, devices=devices, variable_distribution=kind))
    for estimator in (one, two):
        run(estimator, max_steps=4, eval_every_steps=2)
    histories = [est.read_eval_metrics(estimator.eval_dir()) for estimator in (one, two)]
    assert [list(history) for history in histories] == [[2, 4], [2, 4]]
    for step in (2, 4):
        assert histories[0][step] == pytest.approx(histories[1][step], rel=1e-5)


# What is refused.


@pytest.mark.covers("5 validation of the specs")
@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (est.TrainSpec, {"input_fn": [1]}, TypeError, "`input_fn` must be callable, given: \\[1\\]"),
        (est.EvalSpec, {"input_fn": None}, TypeError, "`input_fn` must be callable, given: None"),
        (est.TrainSpec, {"max_steps": 0}, ValueError, "Must specify max_steps > 0, given: 0"),
        (est.EvalSpec, {"steps": -1}, ValueError, "Must specify steps > 0, given: -1"),
        (est.EvalSpec, {"eval_every_steps": 0}, ValueError, "Must specify eval_every_steps > 0, given: 0"),
        (est.TrainSpec, {"hooks": [3]}, TypeError, "All hooks must be hook instances, but hooks holds 3"),
        (est.EvalSpec, {"hooks": ["a"]}, TypeError, "All hooks must be hook instances, but hooks holds 'a'"),
        (est.TrainSpec, {"saving_listeners": [3]}, TypeError, "a list of CheckpointSaverListener, given: .3"),
        (est.EvalSpec, {"name": 1}, TypeError, "`name` must be string, given: 1"),
        (est.EvalSpec, {"start_delay_secs": -1}, ValueError, "Must specify start_delay_secs >= 0, given: -1"),
        (est.EvalSpec, {"throttle_secs": -2}, ValueError, "Must specify throttle_secs >= 0, given: -2"),
        (est.EvalSpec, {"exporters": 5}, TypeError, "`exporters` must be an Exporter, an iterable of Exporter, or `No"),
        (est.EvalSpec, {"exporters": [Calls(), "b"]}, TypeError, "`exporters` must be an Exporter, an iterable of"),
        (est.EvalSpec, {"exporters": Calls("")}, ValueError, "must have a name that is a non-empty string, given: ''"),
        (est.EvalSpec, {"exporters": Calls(None)}, ValueError, "a name that is a non-empty string, given: None"),
        (est.EvalSpec, {"exporters": [Calls(), Calls()]}, ValueError, "must have unique names, given: .'calls', 'call"),
    ],
)
def test_a_spec_is_checked_when_it_is_made(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(**({"input_fn": refuse} | arguments))


@pytest.mark.covers("5 validation of the specs")
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"estimator": "e"}, TypeError, "`estimator` must have type `est.Estimator`, given: 'e'"),
        ({"train_spec": refuse}, TypeError, "`train_spec` must have type `est.TrainSpec`, given: <function refuse"),
        ({"eval_spec": None}, TypeError, "`eval_spec` must have type `est.EvalSpec`, or be a list .*; given: None"),
        ({"eval_spec": [EVAL, 1]}, TypeError, "`eval_spec` must have type `est.EvalSpec`"),
        ({"eval_spec": {1: EVAL}}, TypeError, "or a dict of them by name; given: {1: "),
        ({"eval_spec": []}, ValueError, "at least one EvalSpec, each with its own `name`; given: \\[\\]"),
        ({"eval_spec": [EVAL, EVAL]}, ValueError, "each with its own `name`; given: \\[None, None\\]"),
        ({"eval_spec": {"a": est.EvalSpec(refuse, name="b")}}, ValueError,
         "has name='b', but is called 'a' in the dic"),
        ({"eval_spec": [est.EvalSpec(refuse, name=name, exporters=Calls()) for name in "ab"]}, ValueError,
         "`exporters` must have unique names, in all EvalSpecs together; given: \\['calls', 'calls'\\]"),
        ({"eval_every_steps": -5}, ValueError, "Must specify eval_every_steps > 0, given: -5"),
    ],
)  # fmt: skip
def test_arguments_are_checked_before_anything_is_done(tmp_path, changed, error, message):
    arguments = {"estimator": make(tmp_path), "train_spec": est.TrainSpec(refuse), "eval_spec": EVAL}
    with pytest.raises(error, match=message):
        est.train_and_evaluate(**(arguments | changed))


def test_without_checkpoints_there_is_no_time_to_evaluate(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=None, save_checkpoints_secs=None)
    with pytest.raises(ValueError, match="There should be a CheckpointSaverHook to use saving_listeners"):
        run(estimator)


def test_nothing_to_evaluate_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="`train_and_evaluate` got no batch from the input_fn of its TrainSpec"):
        run(make(tmp_path), batches=0)
