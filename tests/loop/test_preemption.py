"""SIGTERM, Ctrl-C, and what else ends a run from outside."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from testing.estimators import X, Y, endless, make, same_bits, saved_at, saved_steps, times
from testing.hooks import At
from testing.processes import Processes

import estimator as est

pytestmark = pytest.mark.covers("1.3 preemption", "13 10 no end and no checkpoint on errors and signals")


@pytest.fixture(scope="module")
def processes():
    forks = Processes("testing.scenarios.preempted")
    yield forks
    forks.close()


# In a process of its own.

SIGTERM = {  # after how many steps what runs, and blocks: the exit code, how its runs ended, and the checkpoints
    "a training": (0, "train", [5], 75, ["training SIGTERM 5 NoneType"], [0, 5]),
    "a training before there is a batch": (0, "train", [0], 75, [], []),
    "an evaluation before there is a batch": (0, "evaluate", [0], 75, [], []),
    "a prediction before there is a batch": (0, "predict", [0], 75, [], []),
    "an evaluation": (3, "evaluate", [2], 75, ["evaluation SIGTERM 3 Preempted"], [0, 3]),
    "a prediction": (3, "predict", [2], 75, ["prediction SIGTERM 3 NoneType"], [0, 3]),
    "a reader of predictions": (3, "read_predictions", [], 75, ["prediction SIGTERM 3 NoneType"], [0, 3]),
    "an evaluation in a training": (
        0,
        "evaluate_in_training",
        [2],
        75,
        ["evaluation SIGTERM 4 Preempted", "training SIGTERM 4 NoneType"],
        [0, 4],
    ),
    "one before there is a batch": (0, "evaluate_in_training", [0], 75, ["training SIGTERM 4 NoneType"], [0, 4]),
    "predictions that nobody reads on": (3, "leave_predictions", [], 75, ["training SIGTERM 6 NoneType"], [0, 3, 6]),
    "what follows all runs": (0, "distill", [], -signal.SIGTERM, [], [0, 2]),
    "a training in another thread": (0, "in_a_thread", [], -signal.SIGTERM, [], [0]),
    "a training with a handler of the user's own": (
        0,
        "with_own_handler",
        [],
        0,
        ["own handler", "training input 6 NoneType"],
        [2, 3, 4, 5, 6],
    ),
}


@pytest.mark.parametrize("case", SIGTERM)
def test_sigterm_ends_what_blocks_and_saves_the_last_step_of_a_training(processes, tmp_path, case):
    steps, function, batches, code, ends, saved = SIGTERM[case]
    if steps:
        make(tmp_path).train(times(steps))
    processes.start(function, str(tmp_path), *batches)
    processes.read_until("blocked")
    sent = time.monotonic()
    processes.send(signal.SIGTERM)
    lines, ended = processes.read_to_end()
    assert ([line.removeprefix("end of ") for line in lines], ended) == (ends, code)
    assert time.monotonic() - sent < 40  # on a busy machine; they block for 60
    assert saved_at(tmp_path) == saved
    assert saved or os.listdir(tmp_path) == []


# In this process.


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def raises(error):
    def does():
        raise error

    return does


def rows(n=10):
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    return est.inputs.numpy_input_fn(x, x.sum(axis=1, keepdims=True), 4, None, shuffle=True, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_loop", [1, 4, "auto"])
@pytest.mark.usefixtures("users_compiler")
def test_a_run_ended_by_sigterm_resumes_as_if_uninterrupted(tmp_path, steps_per_loop):
    whole = make(tmp_path / "whole", steps_per_loop=steps_per_loop).train(rows(), max_steps=20)
    for stop in (7, 15):
        hook = At(stop, terminate)
        with pytest.raises(est.Preempted) as raised:
            make(tmp_path / "ended", steps_per_loop=steps_per_loop).train(rows(), hooks=[hook], max_steps=20)
        assert raised.value.code == 75
        assert (hook.context.stop_reason, hook.context.error, hook.context.global_step) == ("SIGTERM", None, stop)
    ended = make(tmp_path / "ended", steps_per_loop=steps_per_loop)
    assert saved_steps(ended) == [0, 7, 15]
    assert same_bits(ended.train(rows(), max_steps=20), whole)


@pytest.mark.slow
@pytest.mark.parametrize("old", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_after_every_run_the_old_handler_is_back(tmp_path, old):
    estimator = make(tmp_path)
    within = []
    try:
        signal.signal(signal.SIGTERM, old)
        estimator.train(times(5), hooks=[At(3, lambda: within.append(signal.getsignal(signal.SIGTERM)))])
        with pytest.raises(ValueError, match="broken"):
            estimator.train(endless, hooks=[At(7, raises(ValueError("broken")))])
        estimator.evaluate(times(2))
        predictions = estimator.predict(times(2))
        next(predictions)
        predictions.close()
        assert signal.getsignal(signal.SIGTERM) is old
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert (within == [old]) == (old is not signal.SIG_DFL)


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


class EvaluatingAtTheEnd(est.Hook):
    """Evaluates on an input during which SIGTERM comes."""

    def __init__(self, estimator):
        self.estimator = estimator

    def end(self, context):
        def input_fn():
            terminate()
            yield X, Y

        self.estimator.evaluate_state(context.state, input_fn)


def test_a_signal_during_an_evaluation_at_the_end_leaves_the_checkpoint_to_be_saved(tmp_path):
    estimator = make(tmp_path)
    last = At(1, lambda: None)
    with pytest.raises(est.Preempted):
        hooks = [EvaluatingAtTheEnd(estimator), est.CheckpointSaverHook(save_steps=100), last]
        estimator.train(endless, hooks=hooks, steps=3)
    assert saved_steps(estimator) == [0, 3]
    assert (last.context.stop_reason, last.context.error) == ("steps", None)


def test_a_preempted_that_a_hook_raises_without_a_signal_is_an_error(tmp_path):
    hook = At(2, raises(est.Preempted()))
    with pytest.raises(est.Preempted):
        make(tmp_path).train(endless, hooks=[hook], steps=5)
    assert type(hook.context.error) is est.Preempted and hook.context.stop_reason == "error"
    assert saved_steps(make(tmp_path)) == [0]


# Asked for by a function.


def in_thread(call):
    """The error of a call that another thread makes."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    (error,) = errors
    return error


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main thread", "thread"])
@pytest.mark.usefixtures("users_compiler")
def test_a_run_that_another_thread_asks_to_stop_resumes_as_if_uninterrupted(tmp_path, where):
    whole = make(tmp_path / "whole", steps_per_loop=1).train(rows(), max_steps=20)
    answers = []

    def ask():
        thread = threading.Thread(target=lambda: answers.append(est.request_stop()))
        thread.start()
        thread.join()

    hook = At(7, ask)

    def train():
        make(tmp_path / "ended", steps_per_loop=1).train(rows(), hooks=[hook], max_steps=20)

    if where == "thread":
        assert type(in_thread(train)) is est.Preempted
    else:
        with pytest.raises(est.Preempted):
            train()
    assert answers == [True] and est.request_stop() is False
    assert (hook.context.stop_reason, hook.context.error, hook.context.global_step) == ("SIGTERM", None, 7)
    ended = make(tmp_path / "ended")
    assert saved_steps(ended) == [0, 7]
    assert same_bits(ended.train(rows(), max_steps=20), whole)


def test_an_input_that_blocks_ends_in_a_thread_that_is_asked_to_stop(tmp_path):
    trained, blocks = threading.Event(), threading.Event()

    def input_fn():
        yield from times(3)()
        assert trained.wait(60)
        threading.Timer(0.3, est.request_stop).start()
        blocks.wait(60)

    estimator, started = make(tmp_path, steps_per_loop=1), time.monotonic()
    assert type(in_thread(lambda: estimator.train(input_fn, hooks=[At(3, trained.set)]))) is est.Preempted
    assert time.monotonic() - started < 40
    blocks.set()
    assert saved_steps(make(tmp_path)) == [0, 3]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: est.request_stop()])
@pytest.mark.parametrize("stop", [terminate, est.request_stop])
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
    try:
        signal.signal(signal.SIGTERM, handler)
        with pytest.raises(est.Preempted):
            list(make(tmp_path).train(times(1)).predict(input_fn, hooks=[hook]))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert time.monotonic() - started < 40
    assert (hook.context.stop_reason, hook.context.error, hook.context.batches) == ("SIGTERM", None, 3)
    # A thread that reads for a handler of the user's own is left behind with what blocks.
    assert closed == [True] * (handler == signal.SIG_DFL)
    blocks.set()


def test_a_handler_of_the_user_s_own_may_ask_to_stop(tmp_path):
    try:
        signal.signal(signal.SIGTERM, lambda *_: est.request_stop())
        with pytest.raises(est.Preempted):
            make(tmp_path, steps_per_loop=1).train(endless, hooks=[At(4, terminate)])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert saved_steps(make(tmp_path)) == [0, 4]


# Errors, Ctrl-C among them.


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
@pytest.mark.parametrize("is_new", [False, True], ids=["same Estimator", "new Estimator"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("broken")])
@pytest.mark.usefixtures("users_compiler")
def test_an_error_ends_hooks_and_saves_nothing_and_training_resumes_before_it(tmp_path, error, is_new):
    config = {"save_checkpoints_steps": 4, "steps_per_loop": 2}
    whole = make(tmp_path / "whole", **config).train(rows(), max_steps=16)
    estimator = make(tmp_path / "other", **config)
    hook = At(7, raises(error))
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


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_ctrl_c_ends_the_hooks_of_other_runs(tmp_path, verb):
    estimator = make(tmp_path).train(times(1))
    hook = At(2, raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        result = getattr(estimator, verb)(times(4), hooks=[hook])
        list(result)
    assert type(hook.context.error) is KeyboardInterrupt
