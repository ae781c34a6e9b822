"""The contract of hooks: their five moments and what they see there; listeners and checkpoints; misuse."""

import optax
import pytest
from testing.estimators import X, Y, endless, make, refuse, saved_steps, step_of, times
from testing.hooks import Noted, NotedListener, WithHooks, noted_input_fn, raising

import estimator as est
from estimator.loop._context import RunContext
from replicate import TowerOptimizer, replicate_model_fn

MOMENTS = ["begin", "after_create_state", "before_run", "after_run", "end"]


@pytest.fixture
def calls():
    return []


def once(calls, wanted):
    """The calls that are wanted, in their order; the model_fn is run as often as it takes, after input_fn."""
    assert calls[:2] == ["input_fn", "model_fn"]
    return [call for call in calls[1:] if call != "model_fn"] == wanted


# The moments, and their order.


@pytest.mark.covers("1.3 callback order", "1.3 input ends early", "4 SessionRunHook")
def test_the_moments_of_training_come_in_tensorflows_order(tmp_path, calls):
    estimator = make(tmp_path, WithHooks(calls), save_checkpoints_steps=2)
    user = Noted("user", calls)
    estimator.train(noted_input_fn(calls, 3), hooks=[user], saving_listeners=[NotedListener(calls)])
    names = ["chief", "user", "training"]
    around = [f"{name}.before_run" for name in names]
    after = [f"{name}.after_run" for name in names]
    save_0, save_2, save_3 = ([f"listener.before_save {n}", f"listener.after_save {n} (there)"] for n in (0, 2, 3))
    assert once(
        calls,
        ["listener.begin", *(f"{name}.begin" for name in names)]
        + [*save_0, *(f"{name}.after_create_state" for name in names)]
        + [*around, *after]
        + [*around, *save_2, *after]
        + [*around, *after]
        + [*save_3, "listener.end 3", *(f"{name}.end" for name in names)],
    )
    assert (user.context.mode, user.context.model_dir) == ("train", str(tmp_path))
    assert (user.context.global_step, user.context.batches, user.context.examples) == (3, 3, 12)
    assert (user.context.stop_reason, user.context.error, user.context.metrics) == ("input", None, None)


@pytest.mark.covers("1.4 hook order")
def test_the_moments_of_evaluation_and_prediction_come_in_tensorflows_order(tmp_path, calls):
    estimator = make(tmp_path, WithHooks(calls))
    user = Noted("user", calls)

    def moments(spec):
        both = [[f"{name}.{moment}" for name in ("user", spec)] for moment in MOMENTS]
        return [*both[0], *both[1], *(both[2] + both[3]) * 2, *both[4]]

    results = estimator.evaluate(noted_input_fn(calls, 3), steps=2, hooks=[user])
    assert once(calls, moments("evaluation"))
    assert user.context.metrics == results and set(results) == {"loss", "global_step"}
    assert (user.context.mode, user.context.stop_reason, user.context.examples) == ("eval", "steps", 8)
    calls.clear()
    assert len(list(estimator.predict(noted_input_fn(calls, 2), hooks=[user]))) == 8
    assert once(calls, moments("prediction"))
    assert (user.context.mode, user.context.stop_reason, user.context.batches) == ("infer", "input", 2)


@pytest.mark.covers("12 other spec fields")
def test_hooks_of_a_replicated_spec_are_called_once(tmp_path, calls):
    """They are made in each run of the model_fn; the first ones are used."""

    def model_fn(features, labels, mode):
        spec = WithHooks(calls)(features, labels, mode)
        if mode != est.ModeKeys.TRAIN:
            return spec
        optimizer = TowerOptimizer(optax.sgd(0.01), accumulate_steps=2)
        return spec._replace(train_op=optimizer.minimize(spec.loss))

    estimator = make(tmp_path, replicate_model_fn(model_fn, devices=["/cpu:0", "/cpu:1"]), save_checkpoints_steps=None)
    estimator.train(times(2))
    assert [calls.count(f"{name}.after_run") for name in ("chief", "training", "evaluation")] == [2, 2, 0]
    estimator.evaluate(times(1, (X[:3], Y[:3])))  # one row is left over by the two towers
    assert [calls.count(f"evaluation.{moment}") for moment in MOMENTS] == [1] * 5
    assert len(list(estimator.predict(times(1, X[:3])))) == 3
    assert [calls.count(f"prediction.{moment}") for moment in MOMENTS] == [1] * 5
    assert [calls.count(f"training.{moment}") for moment in ("begin", "end")] == [1, 1]


@pytest.mark.covers("4 SessionRunHook")
def test_the_state_can_be_read_when_there_is_one(unsaved, calls):
    seen = []
    with pytest.raises(RuntimeError, match=r"There is no state yet: `context.state` can be read from `after_create_"):
        RunContext(est.ModeKeys.TRAIN).state  # noqa: B018

    def look(context, *_):
        seen.append((int(context.state.global_step), context.step, context.state.variables["w"][0, 0] != 0))

    hook = Noted("user", calls, after_create_state=look, before_run=look, after_run=look, end=look)
    unsaved.train(times(2), hooks=[hook])
    assert seen == [(0, 0, False), (0, 0, False), (1, 1, True), (1, 1, True), (2, 2, True), (2, 2, True)]
    with pytest.raises(RuntimeError, match=r"Only training saves checkpoints; got `context.save\(\)` in mode 'eval'"):
        unsaved.evaluate(times(1), hooks=[Noted("user", calls, after_run=lambda context, values: context.save())])


def failing_input_fn():
    yield X, Y
    yield X, Y
    raise KeyError("no data")


@pytest.mark.covers("1.3 other exception", "13 10 no end and no checkpoint on errors and signals")
@pytest.mark.parametrize(
    ("moment", "error"),
    [
        ("input", KeyError("no data")),
        ("begin", ValueError("in begin")),
        ("after_create_state", ValueError("in after_create_state")),
        ("before_run", ValueError("in before_run")),
        ("after_run", KeyboardInterrupt()),
        ("end", ValueError("in end")),
    ],
)
def test_end_is_called_whatever_happened_and_knows_it(unsaved, calls, moment, error):
    first, last = Noted("first", calls), Noted("last", calls)
    hooks = [first, Noted("failing", calls, **{moment: raising(error)}), last]
    with pytest.raises(type(error)) as raised:
        unsaved.train(failing_input_fn if moment == "input" else times(2), hooks=hooks)
    ended = [call for call in calls if call.endswith(".end")]
    assert ended == ["first.end", "failing.end"] + ["last.end"] * (moment != "begin")
    # A hook that ends before another one fails in its `end` does not know of it.
    assert first.context.stop_reason == ("input" if moment == "end" else "error")
    if moment != "begin":
        assert last.context.error is raised.value and type(raised.value) is type(error)


@pytest.mark.covers("1.5 hooks")
def test_an_error_in_evaluation_or_prediction_reaches_end(unsaved, calls):
    hook = Noted("user", calls, after_run=raising(KeyboardInterrupt("in after_run")))
    for run in (unsaved.evaluate, lambda *args, **kwargs: list(unsaved.predict(*args, **kwargs))):
        with pytest.raises(KeyboardInterrupt, match="in after_run"):
            run(times(1), hooks=[hook])
        assert str(hook.context.error) == "in after_run" and hook.context.metrics is None
    assert calls.count("user.end") == 2


def test_of_two_errors_in_end_the_first_is_raised_and_the_other_logged(unsaved, calls, messages):
    hooks = [Noted(name, calls, end=raising(ValueError(name))) for name in ("one", "two")]
    with pytest.raises(ValueError, match="one"):
        unsaved.train(times(1), hooks=hooks)
    assert any("failed in its `end`, after the error that ended the run." in message for message in messages())


@pytest.mark.covers("1.5 hooks", "13 10 no end and no checkpoint on errors and signals")
def test_predictions_closed_early_end_their_hooks(unsaved, calls):
    hook = Noted("user", calls)
    predictions = unsaved.predict(endless, hooks=[hook])
    assert calls == []
    next(predictions)
    assert "user.end" not in calls
    predictions.close()
    assert calls[-1] == "user.end"
    assert (hook.context.stop_reason, hook.context.error) == ("closed", None)


@pytest.mark.covers("1.3 stop")
@pytest.mark.parametrize("steps", [None, 5])
def test_request_stop_lets_others_see_the_step_and_makes_no_further_one(unsaved, calls, steps):
    stopping = Noted("stopping", calls, after_run=lambda context, values: context.request_stop("enough"))
    other = Noted("other", calls)
    unsaved.train(endless, hooks=[stopping, other], steps=steps)
    assert calls.count("other.after_run") == calls.count("stopping.after_run") == 1
    assert (other.context.global_step, other.context.stop_reason, other.context.error) == (1, "enough", None)
    assert other.context.stop_requested


@pytest.mark.covers("1.3 stop")
@pytest.mark.parametrize("moment", ["begin", "after_create_state", "before_run", "after_run", "end"])
def test_stop_iteration_in_a_hook_is_an_error_of_the_hook(unsaved, calls, moment):
    hook = Noted("user", calls, **{moment: raising(StopIteration)})
    for run in (unsaved.train, unsaved.evaluate, lambda *args, **kwargs: list(unsaved.predict(*args, **kwargs))):
        with pytest.raises(RuntimeError, match=rf"Noted.*\.{moment} raised StopIteration, perhaps by `next` of"):
            run(times(2), hooks=[hook])


@pytest.mark.covers("1.3 checkpoints at start", "13 11 redundant checkpoint at each start")
def test_checkpoints_are_counted_from_where_a_run_starts_and_not_written_twice(tmp_path, calls):
    estimator = make(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=None)
    listener = NotedListener(calls)
    estimator.train(endless, max_steps=13, saving_listeners=[listener])
    written = estimator.latest_checkpoint(), (tmp_path / "ckpt-13" / "manifest.json").stat().st_mtime_ns
    calls.clear()
    estimator.train(endless, max_steps=38, saving_listeners=[listener])
    assert saved_steps(estimator) == [0, 10, 13, 23, 33, 38]
    # The checkpoint of the start was there; listeners are called all the same.
    assert calls[1:3] == ["listener.before_save 13 (there)", "listener.after_save 13 (there)"]
    assert (str(tmp_path / "ckpt-13"), (tmp_path / "ckpt-13" / "manifest.json").stat().st_mtime_ns) == written
    saves = [call for call in calls if "after_save" in call]
    assert saves == [f"listener.after_save {step} (there)" for step in (13, 23, 33, 38)]
    assert calls[-1] == "listener.end 38"


@pytest.mark.covers("4 CheckpointSaverHook", "13 18 saving_listeners")
def test_a_listener_stops_the_training_but_not_at_the_first_checkpoint(tmp_path, calls):
    estimator = make(tmp_path, save_checkpoints_steps=2)
    hook = Noted("user", calls)
    estimator.train(endless, hooks=[hook], steps=9, saving_listeners=[NotedListener([], stop_at=0)])
    assert step_of(estimator) == 9
    estimator.train(endless, hooks=[hook], steps=9, saving_listeners=[NotedListener([], stop_at=11)])
    assert step_of(estimator) == 11
    assert hook.context.stop_reason == "a checkpoint listener"


@pytest.mark.covers("1.3 user saver")
def test_a_saver_of_the_user_takes_the_place_of_the_configs(tmp_path, calls):
    estimator = make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=None)
    own, also = NotedListener([]), NotedListener(calls)
    saver = est.CheckpointSaverHook(str(tmp_path), save_steps=3, listeners=[own])
    estimator.train(endless, hooks=[saver], steps=4, saving_listeners=[also])
    assert saved_steps(estimator) == [0, 3, 4]
    assert own.calls == calls and calls[-1] == "listener.end 4"
    calls.clear()
    estimator.train(endless, hooks=[saver], steps=1)  # a run has its own listeners only
    assert calls == [] and own.calls[-1] == "listener.end 5"


@pytest.mark.covers("1.3 user saver")
def test_of_several_savers_the_first_has_the_listeners(tmp_path, calls):
    savers = [est.CheckpointSaverHook(save_steps=n) for n in (3, 2)]
    estimator = make(tmp_path, save_checkpoints_steps=None, keep_checkpoint_max=None)
    estimator.train(endless, hooks=savers, steps=4, saving_listeners=[NotedListener(calls)])
    assert saved_steps(estimator) == [0, 2, 3, 4]
    assert [call for call in calls if "after_save 2" in call] == []


@pytest.mark.covers("1.3 other exception")
def test_nothing_is_saved_at_the_end_of_a_run_that_failed(tmp_path, calls):
    estimator = make(tmp_path, save_checkpoints_steps=2)
    fail = Noted("user", calls, after_run=lambda context, values: context.global_step == 3 and refuse())
    with pytest.raises(AssertionError, match="must not be called"):
        estimator.train(endless, hooks=[fail], steps=5, saving_listeners=[NotedListener(calls)])
    assert saved_steps(estimator) == [0, 2]
    assert calls[-2:] == ["listener.end 3", "user.end"]


class Session:
    """A hook of TensorFlow's kind."""

    def after_create_session(self, session, coord): ...


@pytest.mark.covers("1.3 errors")
@pytest.mark.parametrize("run", ["train", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([Session()], r"All hooks must be hook instances, but hooks holds <.*Session object .*> of type Session\. "
         r"Derive its class from `est.Hook`; its `after_create_session` is called `after_create_state` here\."),
        ([est.NanTensorHook], r"of type type\. That is a class\. Call it: `NanTensorHook\(\.\.\.\)`"),
        (est.StopAtStepHook(1), "hooks must be an iterable of hooks, given: <.*StopAtStepHook"),
    ],
)  # fmt: skip
def test_what_is_no_hook_is_refused_before_anything_is_called(unsaved, run, hooks, message):
    with pytest.raises(TypeError, match=message):
        getattr(unsaved, run)(refuse, hooks=hooks)


def test_a_hook_with_the_moment_of_tensorflows_sessions_is_refused():
    message = r"Mine\.after_create_session would never be called.*Call it `after_create_state\(self, context\)`"
    with pytest.raises(TypeError, match=message):
        type("Mine", (Session, est.Hook), {})


class Late(est.Hook):
    def next_step(self, step):
        return min(step + 1, 2)


NO_LISTENERS = TypeError, "saving_listeners must be a list of CheckpointSaverListener, given: .*object"
REFUSED = {
    "an object is no listener": ({"input_fn": refuse, "saving_listeners": [object()]}, *NO_LISTENERS),
    "a listener is no list": ({"input_fn": refuse, "saving_listeners": est.CheckpointSaverListener()}, *NO_LISTENERS),
    "a hook is no listener": ({"input_fn": refuse, "saving_listeners": [est.Hook()]}, *NO_LISTENERS),
    "listeners without a saver": (
        {"saving_listeners": [est.CheckpointSaverListener()]},
        *(ValueError, "There should be a CheckpointSaverHook to use saving_listeners. Please set"),
    ),
    "a saver for another directory": (
        {"hooks": [est.CheckpointSaverHook("/other", save_steps=1)]},
        *(ValueError, "CheckpointSaverHook got checkpoint_dir='/other', but the Estimator saves in"),
    ),
    "a moment in the past": (
        {"hooks": [Late()]},
        *(ValueError, r"Late object .*\.next_step\(2\) returned 2, which has passed already\. Return a"),
    ),
}


@pytest.mark.covers("1.3 errors", "1.3 listeners need checkpoints", "1.3 user saver")
@pytest.mark.parametrize("arguments, error, message", REFUSED.values(), ids=REFUSED)
def test_hooks_and_listeners_that_cannot_be_are_refused(unsaved, arguments, error, message):
    with pytest.raises(error, match=message):
        unsaved.train(**{"input_fn": endless, "steps": 5} | arguments)


@pytest.mark.covers("1.3 Loss for final step", "1.3 returned info")
def test_the_loss_of_the_final_step_is_logged(unsaved, messages):
    losses = []
    unsaved.train(times(3), hooks=[Noted("user", [], after_run=lambda context, values: losses.append(values.loss))])
    assert f"Loss for final step: {losses[-1]:.6g}." in messages()


@pytest.mark.covers("1.3 Loss for final step", "3 model_dir")
def test_without_log_steps_neither_loss_nor_rate_is_logged(tmp_path, messages):
    shown = {}
    for every in (None, 2):
        config = {"log_step_count_steps": every, "save_checkpoints_steps": None}
        make(tmp_path, **config).train(times(5))
        shown[every] = [text for text in messages() if text.startswith("loss = ") or "steps/sec" in text]
    assert shown[None] == []
    assert [text.split(", ")[1].split(" (")[0] for text in shown[2]] == ["step = 1", "step = 2", "step = 4"]
