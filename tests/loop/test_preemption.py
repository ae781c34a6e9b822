"""SIGTERM, Ctrl-C, and what else ends a run from outside."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import optax
import pytest
from testing.estimators import Linear, X, Y, endless, make, same_bits, saved_at, saved_steps, times
from testing.hooks import At, When, raising
from testing.model_fns import minimizing
from testing.signals import handling, interrupt, terminate, wait_until
from testing.towers import replicate

import estimator as est
from estimator.multihost import _preemption

pytestmark = [
    pytest.mark.covers("1.3 preemption", "13 10 no end and no checkpoint on errors and signals"),
    pytest.mark.usefixtures("default_handler"),
]


STOPS = [(terminate, est.Preempted, "SIGTERM"), (interrupt, KeyboardInterrupt, "SIGINT")]


def mean_squared_error(features, labels):
    return est.losses.mean_squared_error(labels, features @ est.get_variable("w", (2, 1)))


def rows(n=10):
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    return est.inputs.numpy_input_fn(x, x.sum(axis=1, keepdims=True), 4, None, shuffle=True, seed=1)


def ask():
    """Another thread asks to stop."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(est.request_stop()))
    thread.start()
    thread.join()
    assert answers == [True]


def in_thread(call):
    """The error of a call that another thread makes."""
    with ThreadPoolExecutor(1) as pool:
        return type(pool.submit(call).exception(60))


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "steps_per_loop"), [(1, 4), (2, "auto")])
@pytest.mark.usefixtures("users_compiler")
def test_a_run_ended_by_a_signal_or_by_another_thread_resumes_as_if_uninterrupted(tmp_path, towers, steps_per_loop):
    def estimator(name):
        return make(
            tmp_path / name,
            replicate(minimizing(mean_squared_error, optax.adam(0.1)), towers),
            steps_per_loop=steps_per_loop,
        )

    whole = estimator("whole").train(rows(12), max_steps=20)
    stops = {4: STOPS[0], 7: STOPS[1], 11: (ask, est.Preempted, "SIGTERM"), 15: (ask, est.Preempted, "SIGTERM")}
    for stop, (kill, error, reason) in stops.items():
        hook = At(stop, kill)

        def train(hook=hook):
            estimator("ended").train(rows(12), hooks=[hook], max_steps=20)

        if stop == 15:
            assert in_thread(train) is error
        else:
            with pytest.raises(error):
                train()
        assert (hook.context.stop_reason, hook.context.error, hook.context.global_step) == (reason, None, stop)
    assert est.request_stop() is False
    ended = estimator("ended")
    assert saved_steps(ended) == [0, *stops]
    assert same_bits(ended.train(rows(12), max_steps=20), whole)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("number", "old"), [(signal.SIGTERM, None), (signal.SIGTERM, lambda *_: None), (signal.SIGINT, signal.SIG_IGN)]
)
def test_after_every_run_the_old_handler_is_back(tmp_path, number, old):
    estimator = make(tmp_path)
    within, default = [], signal.getsignal(number)
    is_default, old = old is None, default if old is None else old
    with handling(number, old):
        estimator.train(times(5), hooks=[At(3, lambda: within.append(signal.getsignal(number)))])
        with pytest.raises(ValueError, match="broken"):
            estimator.train(endless, hooks=[At(7, raising(ValueError("broken")))])
        estimator.evaluate(times(2))
        predictions = estimator.predict(times(2))
        next(predictions)
        predictions.close()
        assert signal.getsignal(number) is old
    assert (within == [old]) == (not is_default)


@pytest.mark.quick
@pytest.mark.parametrize("first", [0, 1])
def test_after_predictions_read_in_turns_the_old_handler_is_back(tmp_path, first):
    estimator = make(tmp_path).train(times(1))
    both = [estimator.predict(times(2)) for _ in range(2)]
    for predictions in both:
        next(predictions)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    both[first].close()
    with pytest.raises(est.Preempted):
        terminate()
    with pytest.raises(est.Preempted):
        list(both[1 - first])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("kill", "error", "reason"), STOPS)
def test_a_signal_during_an_evaluation_at_the_end_leaves_the_checkpoint_to_be_saved(tmp_path, kill, error, reason):
    def input_fn():
        kill()
        yield X, Y

    estimator, last = make(tmp_path), When()
    evaluates = When(end=lambda context: estimator.evaluate_state(context.state, input_fn))
    with pytest.raises(error):
        hooks = [evaluates, est.CheckpointSaverHook(save_steps=100), last]
        estimator.train(endless, hooks=hooks, steps=3)
    assert saved_steps(estimator) == [0, 3]
    assert (last.context.stop_reason, last.context.error) == ("steps", None)


def test_a_preempted_that_a_hook_raises_without_a_signal_is_an_error(tmp_path):
    hook = At(2, raising(est.Preempted()))
    with pytest.raises(est.Preempted):
        make(tmp_path).train(endless, hooks=[hook], steps=5)
    assert type(hook.context.error) is est.Preempted and hook.context.stop_reason == "error"
    assert saved_steps(make(tmp_path)) == [0]


# Ctrl-C alone.


def train(model_dir, hook, **config):
    """The text of the KeyboardInterrupt that ends a training without an end."""
    with pytest.raises(KeyboardInterrupt) as raised:
        make(model_dir, steps_per_loop=1, **config).train(endless, hooks=[hook])
    return str(raised.value)


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_says_once_what_it_does_and_what_it_has_left(tmp_path, messages, saves):
    config = (
        {"save_checkpoints_steps": 100} if saves else {"save_checkpoints_steps": None, "save_checkpoints_secs": None}
    )
    said = train(tmp_path, At(3, interrupt), **config)
    neither = "since save_checkpoints_steps and save_checkpoints_secs of its RunConfig are both None"
    left = f"It is saved as {tmp_path}/ckpt-3: call `train` again to continue."
    assert (
        said == f"Training ended after step 3. {left if saves else f'What came after step 0 is not saved, {neither}.'}"
    )
    saved = f"saves a checkpoint in {tmp_path}, from which the next call continues"
    wait_until(lambda: [line for line in messages() if line.startswith("Ctrl-C")])
    assert [line for line in messages() if line.startswith("Ctrl-C")] == [
        f"Ctrl-C: `train` ends after the steps that have begun, and {saved if saves else f'saves nothing, {neither}'}. "
        "A second Ctrl-C ends it at once, and what came after step 0 is lost."
    ]
    assert saved_at(tmp_path) == ([0, 3] if saves else [])


@pytest.mark.parametrize("within", ["a hook", "an evaluation"])
def test_the_second_ctrl_c_ends_training_at_once(tmp_path, messages, monkeypatch, within):
    monkeypatch.setattr(_preemption, "_SECONDS_OF_ONE", -1.0)
    ended = []

    def interrupt_twice(context):
        interrupt()
        if within == "an evaluation":
            make(tmp_path).evaluate_state(context.state, lambda: ended.append(interrupt()) or times(1)())
        else:
            ended.append(interrupt())

    hook = When(2, after_run=interrupt_twice)
    assert train(tmp_path, hook, save_checkpoints_async=False) == "" and not ended
    assert type(hook.context.error) is KeyboardInterrupt and hook.context.stop_reason == "SIGINT"
    assert "Training failed after step 2. What came after step 0 is in no checkpoint, and is lost." in messages()
    assert saved_at(tmp_path) == [0]


def test_a_ctrl_c_that_a_launcher_sends_as_well_as_the_terminal_counts_once(tmp_path):
    hook = At(2, lambda: [interrupt(), interrupt()])
    assert train(tmp_path, hook).startswith("Training ended after step 2. It is saved as")


def test_ctrl_c_loses_nothing_where_it_ends_the_input_with_an_error(tmp_path):
    def input_fn():
        yield from times(3)()
        trained.wait(30)
        interrupt()
        raise RuntimeError("a worker has died")

    trained = threading.Event()
    with pytest.raises(KeyboardInterrupt, match="Training ended after step 3. It is saved as"):
        make(tmp_path, steps_per_loop=1).train(input_fn, hooks=[At(3, trained.set)])


@pytest.mark.parametrize(("kill", "error", "reason"), STOPS)
def test_a_signal_ends_a_training_at_once_that_has_nothing_to_lose(tmp_path, messages, kill, error, reason):
    """And leaves no lock, which is taken before the model_fn is called."""

    def killing(features, labels, mode):
        kill()
        return Linear()(features, labels, mode)

    with pytest.raises(error) as raised:
        make(tmp_path, killing).train(endless)
    assert raised.value.args in ((), (75,)) and os.listdir(tmp_path) == []
    assert not [line for line in messages() if "Ctrl-C" in line]


def test_ctrl_c_beside_predictions_leaves_them_to_be_read_on(tmp_path):
    predictions = make(tmp_path).train(times(1)).predict(times(2), yield_single_examples=False)
    next(predictions)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert len(list(predictions)) == 1


# Asked for by a function.


def test_an_input_that_blocks_ends_in_a_thread_that_is_asked_to_stop(tmp_path):
    trained, blocks = threading.Event(), threading.Event()

    def input_fn():
        yield from times(3)()
        assert trained.wait(60)
        threading.Timer(0.3, est.request_stop).start()
        blocks.wait(60)

    estimator, started = make(tmp_path, steps_per_loop=1), time.monotonic()
    assert in_thread(lambda: estimator.train(input_fn, hooks=[At(3, trained.set)])) is est.Preempted
    assert time.monotonic() - started < 40
    blocks.set()
    assert saved_steps(make(tmp_path)) == [0, 3]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("handler", "stop"),
    [
        (signal.SIG_DFL, terminate),
        (signal.SIG_DFL, est.request_stop),
        (lambda *_: est.request_stop(), terminate),
    ],
)
def test_a_prediction_whose_input_blocks_in_the_main_thread_ends_when_it_is_asked_to_stop(tmp_path, handler, stop):
    closed, predicted, blocks = [], threading.Event(), threading.Event()

    def input_fn():
        try:
            yield from times(3)()
            assert predicted.wait(60)
            threading.Timer(0.3, stop).start()
            blocks.wait(60)
        finally:
            closed.append(True)

    hook, started = At(3, predicted.set), time.monotonic()
    with handling(signal.SIGTERM, handler):
        with pytest.raises(est.Preempted):
            list(make(tmp_path).train(times(1)).predict(input_fn, hooks=[hook]))
        assert signal.getsignal(signal.SIGTERM) is handler
    assert time.monotonic() - started < 40
    assert (hook.context.stop_reason, hook.context.error, hook.context.batches) == ("SIGTERM", None, 3)
    # A thread that reads for a handler of the user's own is left behind with what blocks.
    assert closed == [True] * (handler == signal.SIG_DFL)
    blocks.set()


def test_a_handler_of_the_user_s_own_may_ask_to_stop(tmp_path):
    with handling(signal.SIGTERM, lambda *_: est.request_stop()), pytest.raises(est.Preempted):
        make(tmp_path, steps_per_loop=1).train(endless, hooks=[At(4, terminate)])
    assert saved_steps(make(tmp_path)) == [0, 4]


def interrupted(error, at):
    """The rows, with an error before one of the batches."""

    def input_fn():
        source = rows()()

        class Source:
            get_state, set_state = source.get_state, source.set_state
            taken = 0

            def __iter__(self):
                return self

            def __next__(self):
                self.taken += 1
                if self.taken == at:
                    raise error
                return next(source)

        return Source()

    return input_fn


@pytest.mark.slow
@pytest.mark.parametrize(("error", "is_new"), [(KeyboardInterrupt(), True), (ValueError("broken"), False)])
@pytest.mark.usefixtures("users_compiler")
def test_an_error_ends_hooks_and_saves_nothing_and_training_resumes_before_it(tmp_path, error, is_new):
    config = {"save_checkpoints_steps": 4, "steps_per_loop": 2}
    whole = make(tmp_path / "whole", **config).train(rows(), max_steps=16)
    estimator = make(tmp_path / "other", **config)
    hook = At(7, raising(error))
    with pytest.raises(type(error)):
        estimator.train(rows(), hooks=[hook], max_steps=16)
    assert hook.context.error is error and hook.context.stop_reason == "error"
    assert saved_steps(estimator) == [0, 4]
    for at in (8, 1):
        if is_new:
            estimator = make(tmp_path / "other", **config)
        with pytest.raises(type(error)):
            estimator.train(interrupted(error, at), max_steps=16)
    assert saved_steps(estimator) == [0, 4, 8]
    assert same_bits(estimator.train(rows(), max_steps=16), whole)
