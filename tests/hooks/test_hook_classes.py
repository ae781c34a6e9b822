"""The hooks of the library: what each does in a run, and what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import X, Y, endless, make, refuse, saved_steps, step_of, times
from testing.hooks import Noted, NotedListener
from testing.model_fns import minimizing, ones, regressing, zeros
from testing.signals import terminate
from testing.summaries import scalars
from testing.towers import replicate

import estimator as est
from estimator.inputs import _recent_batches
from replicate import TowerOptimizer

# The ends of a run.


@pytest.mark.covers("4 StopAtStepHook", "13 13 low level hooks")
def test_stop_at_step_counts_again_in_each_run(tmp_path):
    estimator, hook = make(tmp_path), est.StopAtStepHook(num_steps=3)
    for step in (3, 6):
        assert step_of(estimator.train(endless, hooks=[hook])) == step
    last = est.StopAtStepHook(last_step=8)
    assert step_of(estimator.train(endless, hooks=[last])) == 8
    other = Noted("other", [])
    assert step_of(estimator.train(endless, hooks=[last, other], steps=4)) == 8
    assert other.context.stop_reason == "StopAtStepHook" and "other.before_run" not in other.calls


def test_stop_at_step_counts_the_batches_of_a_prediction(unsaved):
    assert len(list(unsaved.predict(endless, hooks=[est.StopAtStepHook(num_steps=3)]))) == 3 * len(X)


@pytest.mark.covers("4 _StopAtSecsHook")
def test_stop_at_secs_ends_a_run_without_end(unsaved):
    hook = Noted("other", [])
    unsaved.train(endless, hooks=[est.StopAtSecsHook(0.05), hook])
    assert (hook.context.stop_reason, hook.context.error) == ("StopAtSecsHook", None)
    assert hook.context.global_step >= 1


@pytest.mark.covers("4 SecondOrStepTimer", "4 CheckpointSaverHook")
@pytest.mark.parametrize(
    ("make_hook", "message"),
    [
        (lambda: est.StopAtStepHook(), "Exactly one of num_steps and last_step should be provided to StopAtStepHook;"),
        (lambda: est.StopAtStepHook(1, 2), "got num_steps=1 and last_step=2"),
        (lambda: est.StopAtStepHook(num_steps=0), "num_steps of StopAtStepHook must be a positive int; got 0"),
        (lambda: est.StopAtSecsHook(-1), "secs of StopAtSecsHook must be a positive number; got -1"),
        (lambda: est.StepCounterHook(every_n_secs=1), "got every_n_steps=100 and every_n_secs=1"),
        (lambda: est.StepCounterHook(None), "Exactly one of every_n_steps and every_n_secs should be provided to"),
        (lambda: est.StepCounterHook(output_dir="a", summary_writer=1), "Only one of output_dir and summary_writer"),
        (lambda: est.LoggingTensorHook(["loss"]), r"Exactly one of every_n_iter and every_n_secs should be provided to "
         r"LoggingTensorHook \(or at_end=True alone\); got every_n_iter=None and every_n_secs=None"),
        (lambda: est.LoggingTensorHook(["loss"], 1, 1, at_end=True), "got every_n_iter=1 and every_n_secs=1"),
        (lambda: est.InMemoryEvaluatorHook(None, endless, every_n_iter=0), "every_n_iter of InMemoryEvaluatorHook"),
        (lambda: est.ProfilerHook(), "Exactly one of save_steps and save_secs should be provided to ProfilerHook; got"),
        (lambda: est.ProfilerHook(save_steps=5, num_steps=5), "num_steps of ProfilerHook must be less than save_s"),
        (lambda: est.ProfilerHook(save_secs=5, num_steps=0), "num_steps of ProfilerHook must be a positive int; got 0"),
        (lambda: est.SecondOrStepTimer(), "Exactly one of every_secs and every_steps should be provided to Sec"),
        (lambda: est.SecondOrStepTimer(every_secs=True), "every_secs of SecondOrStepTimer must be a positive"),
        (lambda: est.CheckpointSaverHook(), "Exactly one of save_secs and save_steps should be provided to Checkpoint"
         "SaverHook; got save_secs=None"),
        (lambda: est.CheckpointSaverHook(save_steps=1.5), "save_steps of CheckpointSaverHook must be a positive int; "
         "got 1.5"),
        (lambda: est.SummarySaverHook(save_steps=1, save_secs=2), "to SummarySaverHook; got save_secs=2 and save_st"),
        (lambda: est.SummarySaverHook(save_secs=-1), "save_secs of SummarySaverHook must be a positive number; got -1"),
        (lambda: est.WatchdogHook(0), "timeout_secs of WatchdogHook must be a positive number; got 0"),
        (lambda: est.WatchdogHook(None), "Exactly one of timeout_secs should be provided to WatchdogHook"),
        (lambda: est.WatchdogHook(1, action="kill"), r"action of WatchdogHook must be one of \['log', 'end'\]; "
         r"got 'kill'"),
    ],
)  # fmt: skip
def test_bad_intervals_are_errors(make_hook, message):
    with pytest.raises(ValueError, match=message):
        make_hook()


@pytest.mark.parametrize(
    ("make_hook", "message"),
    [
        (lambda: est.StepCounterHook(summary_writer=[]), r"summary_writer of StepCounterHook needs `add_scalar\(tag"),
        (lambda: est.FinalOpsHook(["w"]), r"FinalOpsHook needs a function of the context, say `lambda .* got \['w'\]"),
        (lambda: est.InMemoryEvaluatorHook(make, endless), "InMemoryEvaluatorHook needs an `est.Estimator`; got"),
        (lambda: est.LoggingTensorHook("loss", 1), "LoggingTensorHook takes a list of names, or a dict .*; got 'loss'"),
        (lambda: est.LoggingTensorHook([X], 1), "LoggingTensorHook takes a list of names, or a dict by tag"),
        (lambda: est.LoggingTensorHook(3, 1), r"`LoggingTensorHook\({\"loss\": loss}, every_n_iter=100\)`; got 3"),
    ],
)  # fmt: skip
def test_bad_arguments_are_errors(make_hook, message):
    with pytest.raises(TypeError, match=message):
        make_hook()


@pytest.mark.covers("4 FinalOpsHook")
def test_final_ops_are_called_with_the_last_state_of_a_run_that_did_not_fail(unsaved):
    hook = est.FinalOpsHook(lambda context: {"step": context.state.global_step, "w": context.state.variables["w"]})
    unsaved.train(times(3), hooks=[hook])
    assert hook.final_ops_values["step"] == 3 and isinstance(hook.final_ops_values["w"], np.ndarray)
    with pytest.raises(AssertionError, match="must not be called"):
        unsaved.train(times(3), hooks=[hook, Noted("failing", [], after_run=lambda *_: refuse())])
    assert hook.final_ops_values is None


@pytest.mark.covers("4 InMemoryEvaluatorHook")
@pytest.mark.usefixtures("users_compiler")
def test_evaluations_in_memory_match_the_checkpoints(tmp_path, compilations):
    estimator = make(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=None)
    batches = [(X, Y), (X[:3], Y[:3])]
    seen = []
    watching = Noted("watching", [], after_run=lambda context, values: seen.append(context.global_step))
    args = {"steps": 2, "hooks": [watching], "name": "live", "every_n_iter": 2}
    hook = est.InMemoryEvaluatorHook(estimator, lambda: iter(batches), **args)
    estimator.train(endless, hooks=[hook], steps=5)
    assert [results["global_step"] for results in hook.results] == [0, 2, 4, 5]
    assert seen == [0, 0, 2, 2, 4, 4, 5, 5]
    for results in hook.results:
        path = str(tmp_path / f"ckpt-{results['global_step']}")
        assert results == estimator.evaluate(lambda: batches, checkpoint_path=path)
    compiled = len(compilations)
    estimator.train(endless, hooks=[hook], steps=2)
    assert [results["global_step"] for results in hook.results] == [5, 7]
    assert len(compilations) == compiled


def test_a_run_that_is_preempted_ends_without_an_evaluation_in_memory(unsaved):
    hook = est.InMemoryEvaluatorHook(unsaved, times(1), every_n_iter=10)
    kill = Noted("kill", [], after_run=lambda *_: terminate())
    with pytest.raises(est.Preempted):
        unsaved.train(endless, hooks=[hook, kill], steps=3)
    assert [results["global_step"] for results in hook.results] == [0]


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))


@pytest.mark.covers("4 StepCounterHook")
def test_step_counter_reports_steps_and_examples_per_second(unsaved, tmp_path, messages):
    writer = Writer()
    hooks = [est.StepCounterHook(2, summary_writer=writer), est.StepCounterHook(2, output_dir=tmp_path)]
    for _ in range(2):
        unsaved.train(times(6), hooks=hooks)  # the second time it starts again
    steps = [(tag, step) for tag, _, step in writer.scalars]
    assert steps == [(tag, step) for step in (3, 5) for tag in ("global_step/sec", "examples/sec")] * 2
    rates = [value for _, value, _ in writer.scalars]
    np.testing.assert_allclose(rates[1::2], np.multiply(rates[::2], len(X)))
    assert {(tag, step) for tag, points in scalars(tmp_path).items() for step, _ in points} == set(steps)
    lines = [text for text in messages() if text.startswith("global_step/sec: ")]
    assert len(lines) == 8 and all(re.fullmatch(r"global_step/sec: \S+, examples/sec: \S+", line) for line in lines)


@pytest.mark.covers("4 StepCounterHook")
def test_hooks_by_the_clock_are_called_with_steps_in_one_program(unsaved):
    """Their moments come up during the run; the size of the programs is chosen before."""
    writer, seen = Writer(), []
    hooks = [est.StepCounterHook(None, every_n_secs=1e-9, summary_writer=writer)]
    hooks += [est.LoggingTensorHook(["loss"], every_n_secs=1e-9, formatter=lambda values: seen.append(values["loss"]))]
    unsaved.train(endless, hooks=hooks, steps=300)
    steps = [step for tag, _, step in writer.scalars if tag == "global_step/sec"]
    assert steps == sorted(set(steps)) and len(steps) >= 1 and steps[0] >= 2
    assert 2 <= len(seen) < 300 and seen[0] == pytest.approx(np.mean(Y**2))


@pytest.mark.covers("4 LoggingTensorHook")
def test_values_are_logged_at_the_first_step_and_every_n_from_there(tmp_path, messages):
    estimator = make(tmp_path, logging_model_fn)
    hook = est.LoggingTensorHook({"z": "loss", "a": "seen"}, every_n_iter=3)
    shown = est.LoggingTensorHook(["seen", "loss"], every_n_iter=4, formatter=lambda values: f"<{sorted(values)}>")

    def lines(start):
        return [text for text in messages() if text.startswith(start)]

    estimator.train(times(5), hooks=[hook, shown])
    one, other = lines("a = ")
    assert re.fullmatch(r"a = 0, z = 69", one) and re.fullmatch(r"a = 3, z = \S+ \(\d\.\d{3} sec\)", other)
    assert lines("<") == ["<['loss', 'seen']>"] * 2
    estimator.train(times(2), hooks=[hook])  # counted from the start of each run
    assert re.fullmatch(r"a = 5, z = \S+", lines("a = ")[2])
    assert "loss = 69, seen = 0" not in messages()


def test_in_an_evaluation_batches_are_counted(unsaved, messages):
    writer = Writer()
    hooks = [est.LoggingTensorHook(["loss"], every_n_iter=3), est.StepCounterHook(2, summary_writer=writer)]
    unsaved.evaluate(times(8), hooks=hooks)
    assert len([text for text in messages() if text.startswith("loss = 69")]) == 3
    assert [step for tag, _, step in writer.scalars if tag == "examples/sec"] == [3, 5, 7]


def logging_model_fn(features, labels, mode):
    """Written as in TensorFlow, with hooks that are given values: some of them by one tag."""
    y = features @ zeros("w", (2, 1))
    loss = jnp.mean((y - labels) ** 2)
    optimizer = TowerOptimizer(optax.sgd(0.01))
    gradients = optimizer.compute_gradients(loss)  # the model_fn is left and run again from the start
    with est.variable_scope("scope"):
        hooks = [
            est.LoggingTensorHook({"loss": loss, "half": loss / 2, "known": "seen"}, every_n_iter=2),
            est.LoggingTensorHook({"half": -loss, "rows": labels[:, 0]}, every_n_iter=2),
        ]
    est.summary.scalar("half", 3 * loss)  # the names of a hook are none that a model_fn wants
    est.record("seen", est.global_step())
    return est.EstimatorSpec(mode, y, loss, optimizer.apply_gradients(gradients), training_hooks=hooks)


@pytest.mark.quick
@pytest.mark.covers("4 LoggingTensorHook")
@pytest.mark.parametrize("towers", [0, 2])
def test_values_given_in_the_model_fn_are_logged_by_its_hooks(tmp_path, messages, towers):
    estimator = make(tmp_path, replicate(logging_model_fn, towers), save_checkpoints_steps=None)
    batch = X, np.full_like(Y, 2.0)
    for _ in range(2):
        estimator.train(times(3, batch))
    assert sum(f"No checkpoint of this run will be in {tmp_path}, unless" in text for text in messages()) == 2
    logged = [re.sub(r" \(.*", "", text) for text in messages() if text.startswith("half")]
    assert logged[:2] == ["half = 2, known = 0, loss = 4", "half = -4, rows = [2. 2. 2. 2.]"]
    assert len(logged) == 8 and logged[4:] == logged[:4]
    _, half, known, loss = re.split(r"half = |, known = |, loss = ", logged[2])
    assert known == "2" and float(half) == pytest.approx(float(loss) / 2, rel=1e-4) and float(loss) < 4


@pytest.mark.covers("4 LoggingTensorHook")
@pytest.mark.parametrize("interval", [{}, {"every_n_iter": 3}])
def test_at_end_the_values_of_the_last_step_are_logged(unsaved, messages, interval):
    hook = est.LoggingTensorHook(["loss"], at_end=True, formatter=lambda values: f"<{values['loss']:.6g}>", **interval)
    losses = []
    noted = Noted("other", [], after_run=lambda context, values: losses.append(f"<{values.loss:.6g}>"))
    unsaved.train(times(6), hooks=[hook, noted])
    due = [losses[0], losses[3]] if interval else []
    assert [text for text in messages() if text.startswith("<")] == [*due, losses[5]]
    with pytest.raises(AssertionError, match="must not be called"):
        unsaved.train(times(2), hooks=[hook, Noted("failing", [], after_run=lambda *_: refuse())])
    assert len([text for text in messages() if text.startswith("<")]) == len(due) + 1 + bool(interval)


def test_values_are_only_given_in_a_model_fn(unsaved):
    with pytest.raises(RuntimeError, match=r"`est.LoggingTensorHook\({'acc': <a value, not a name>}\)` must be called"):
        est.LoggingTensorHook({"acc": X}, every_n_iter=1)

    def model_fn(features, mode):
        est.LoggingTensorHook({"acc": "a" if mode is None else object()}, every_n_iter=1)

    with pytest.raises(TypeError, match=r"`est.LoggingTensorHook\('acc'\)` needs a number or an array of numbers; got"):
        est.transform(model_fn).init(jax.random.key(0), X)


def nan_at(step, bad=np.nan):
    return lambda: [(X * (bad if i == step else 1), Y) for i in range(1, 8)]


@pytest.mark.quick
@pytest.mark.covers("1.3 NaN guard", "4 NanTensorHook")
@pytest.mark.parametrize("steps_per_loop", [1, 4])
def test_a_nan_loss_may_end_the_training_without_an_error_or_a_checkpoint(tmp_path, messages, steps_per_loop):
    estimator = make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=None, steps_per_loop=steps_per_loop)
    other, listener = Noted("other", []), NotedListener([])
    hooks = [est.NanTensorHook(fail_on_nan_loss=False), other]
    assert estimator.train(nan_at(4), hooks=hooks, saving_listeners=[listener]) is estimator
    assert saved_steps(estimator) == [0, 2]
    assert (other.context.stop_reason, other.context.error) == ("NaN loss", None)
    assert other.context.global_step == 4 and other.context.found_nan
    steps = [call.split()[1] for call in listener.calls if "save" in call]
    assert steps == ["0", "0", "2", "2"] and listener.calls[-1] == "listener.end 4"
    assert any(text.startswith("NaN loss during training, at step 4. The newest checkpoint") for text in messages())


def with_gap(features, labels=Y):
    return {"a": X, "b": features}, labels


GAP = np.where(X == 5, np.nan, X)
GAPS = {
    "both": (
        with_gap(GAP, np.where(Y % 8 > 4, np.nan, Y)),
        "features['b'] holds 1 NaN, in row 2; labels holds 2 NaN, in rows 1 and 3",
    ),
    "infinity in an array of jax": (with_gap(jnp.where(X > 5, np.inf, X)), "features['b'] holds 2 inf, in row 3"),
}


of_two = regressing(lambda features: (features["a"] + features["b"]) @ zeros("w", (2, 1)), optax.sgd(0.01))


@pytest.mark.slow
@pytest.mark.covers("1.3 NaN guard")
@pytest.mark.parametrize("kind, steps_per_loop, towers", [*((kind, 1, 0) for kind in GAPS), ("both", 4, 2)])
def test_a_nan_in_the_batch_is_named_with_its_row(tmp_path, messages, steps_per_loop, towers, kind):
    batch, found = GAPS[kind]
    estimator = make(tmp_path, replicate(of_two, towers), steps_per_loop=steps_per_loop)
    with pytest.raises(est.NanLossDuringTrainingError) as raised:
        estimator.train(lambda: [with_gap(X)] * 2 + [batch] + [with_gap(X)] * 4)
    assert str(raised.value).endswith(
        f"In the batch of step 3, {found}. Leave such rows out in input_fn, or write `np.nan_to_num(x)`."
    )
    estimator.evaluate(lambda: [batch])
    if kind == "both":
        assert f"NaN loss in the evaluation at step 0. In the first batch, {found}." in messages()


def test_a_nan_that_shows_in_the_next_loss_only_is_found_and_large_batches_are_not_kept(tmp_path, monkeypatch):
    def loss_of(features, labels):
        w = ones("w")
        # With a gap the root is 0, and its derivative NaN.
        return w + jnp.sqrt(jnp.where(jnp.isnan(features).any(), w - w, w + 1))

    def ends(model_dir):
        with pytest.raises(est.NanLossDuringTrainingError) as raised:
            make(model_dir, minimizing(loss_of, optax.sgd(0.0))).train(lambda: [X, GAP, X, X])
        return str(raised.value)

    said = ends(tmp_path / "small")
    assert "at step 3. " in said and "In the batch of step 2, features holds 1 NaN, in row 2. Leave" in said
    monkeypatch.setattr(_recent_batches, "_MOST_BYTES", X.nbytes)
    assert "Look first for labels out of range" in ends(tmp_path / "large")


CLASSES = est.MultiClassHead(3)


def classify(features, labels, mode):
    logits = est.layers.dense(features, 3)
    return CLASSES.create_estimator_spec(features, mode, logits, labels, est.Optimizer(optax.sgd(0.1)))


@pytest.mark.quick
@pytest.mark.covers("1.3 NaN guard")
@pytest.mark.parametrize("labels, seen", [([1, 2, 3, 1], "from 1 to 3"), ([0, -1, 0, 0], "from -1 to 0")])
def test_a_nan_loss_names_labels_out_of_range_and_their_range_first(tmp_path, messages, labels, seen):
    estimator = est.Estimator(classify, tmp_path)
    advice = (
        f"Look first for labels out of range, whose loss is NaN (the first batch has labels {seen}): for n classes "
        "they are integers from 0 to n - 1. Then look for a division by zero or a logarithm of zero"
    )
    with pytest.raises(est.NanLossDuringTrainingError, match=rf"at step 1\. .*\. {re.escape(advice)}, lower the lear"):
        estimator.train(lambda: [(X, np.array(labels))])
    assert np.isnan(estimator.evaluate(lambda: [(X, np.array(labels))])["loss"])
    assert f"NaN loss in the evaluation at step 0. {advice}." in messages()


@pytest.mark.covers("1.3 NaN guard", "13 9 NaN in checkpoints")
def test_an_infinite_loss_is_no_nan(unsaved):
    other = Noted("other", [])
    with pytest.raises(est.NanLossDuringTrainingError, match="at step 4"):  # the step after: inf - inf
        unsaved.train(nan_at(3, 1e30), hooks=[other, est.NanTensorHook("loss")])
    assert other.calls.count("other.after_run") >= 3


@pytest.fixture
def traces(monkeypatch):
    """Where traces began and ended, in a run with the hook that is the second value."""
    seen, hook = [], Noted("profiled", [])
    step = lambda: getattr(hook, "now", None)  # noqa: E731
    hook.does["after_create_state"] = lambda context: setattr(hook, "now", context)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: seen.append(("start", step().step, path)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append(("stop", step().step)))
    return seen, hook


def windows(traces):
    seen, _ = traces
    assert [what for what, *_ in seen] == ["start", "stop"] * (len(seen) // 2)
    return [(begin[1], end[1]) for begin, end in zip(seen[::2], seen[1::2], strict=True)]


@pytest.mark.parametrize("save_steps, num_steps", [(100, 5), (6, 5), (5, 4), (2, 1)])
def test_a_trace_has_five_steps_or_those_that_there_is_room_for(unsaved, traces, save_steps, num_steps):
    unsaved.train(times(11), hooks=[traces[1], est.ProfilerHook(save_steps=save_steps)])
    assert windows(traces)[0] == (num_steps, 2 * num_steps)


@pytest.mark.covers("4 ProfilerHook")
def test_traces_are_taken_every_n_steps_not_of_the_first(unsaved, traces):
    hooks = [traces[1], est.ProfilerHook(save_steps=10, num_steps=3)]
    unsaved.train(times(24), hooks=hooks)
    assert windows(traces) == [(3, 6), (13, 16), (23, 24)]  # the last one is written though the input has ended
    assert {start[2] for start in traces[0][::2]} == {unsaved.model_dir}
    traces[0].clear()
    list(unsaved.predict(times(7), hooks=hooks))
    assert windows(traces) == [(3, 6)]


def test_traces_are_taken_every_n_seconds(unsaved, traces, tmp_path):
    unsaved.train(times(9), hooks=[traces[1], est.ProfilerHook(save_secs=1e-9, num_steps=2, output_dir=tmp_path)])
    assert windows(traces)[0] == (2, 4)
    assert len(windows(traces)) >= 2 and all(end - begin <= 2 for begin, end in windows(traces))
    assert {start[2] for start in traces[0][::2]} == {str(tmp_path)}


def test_an_open_trace_is_ended_by_an_error(unsaved, traces):
    failing = Noted("failing", [], after_run=lambda context, values: context.step == 3 and refuse())
    with pytest.raises(AssertionError, match="must not be called"):
        unsaved.train(times(9), hooks=[traces[1], est.ProfilerHook(save_steps=10, num_steps=2), failing])
    assert windows(traces) == [(2, 3)]


@pytest.mark.covers("4 ProfilerHook")
def test_a_trace_is_written_and_never_two_at_once(unsaved, tmp_path, messages):
    hooks = [est.ProfilerHook(save_steps=9, num_steps=n, output_dir=tmp_path / str(n)) for n in (4, 2, 1)]
    unsaved.train(times(6), hooks=hooks)  # would be the steps 4 to 6, 2 to 4, and 1 to 2
    assert [len(list((tmp_path / str(n)).glob("plugins/profile/*/*.xplane.pb"))) for n in (1, 2, 4)] == [1, 0, 1]
    assert [text for text in messages() if text.startswith("ProfilerHook leaves out the trace from step 2 on: Profile")]
