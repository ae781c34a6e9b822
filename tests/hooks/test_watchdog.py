"""The watchdog: what it says of a run that hangs, and when it says nothing."""

import re
import time

import jax
import numpy as np
import optax
import pytest
from testing.cluster import shared_cluster
from testing.estimators import X, Y, endless, make, refuse, saved_steps, times
from testing.hooks import Noted
from testing.model_fns import regressing, zeros

import estimator as est
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.multihost._supervisor import SUPERVISOR

TIMEOUT = 0.4


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stalls"


@pytest.fixture
def hang(path):
    """A function that comes back when the watchdog has reported that it hangs in the phase, or after long."""

    def until_reported(phase):
        end = time.monotonic() + 30
        while time.monotonic() < end and not hangs_reported(path, phase):
            time.sleep(0.01)

    return until_reported


def hangs_reported(path, phase):
    """The reports of hangs in the phase; on a busy machine others may be slow enough for one."""
    reports = re.split(r"(?=the limit of phase )", path.read_text() if path.exists() else "")[1:]
    return [text for text in reports if f"in phase {phase!r}" in text and "in until_reported" in text]


class Hanging:
    """A model_fn that hangs where it is traced, on demand, and in the step of a batch of 99s."""

    def __init__(self, hang):
        self.hang = hang
        self.traced = False

    def __call__(self, features, labels, mode):
        if self.traced:
            self.traced = False
            self.hang("compile")
        features = jax.pure_callback(self.look, jax.ShapeDtypeStruct(features.shape, features.dtype), features)
        return regressing(lambda x: x @ zeros("w", (2, 1)), optax.sgd(0.01))(features, labels, mode)

    def look(self, features):
        if features[0, 0] == 99:
            self.hang("step")
        return np.asarray(features)


@pytest.mark.quick
@pytest.mark.covers("4 watchdog")
def test_each_phase_in_which_a_run_hangs_is_reported_with_the_stacks(tmp_path, monkeypatch, path, hang, messages):
    model_fn = Hanging(hang)
    estimator = make(tmp_path, model_fn, steps_per_loop=1)
    save = Checkpoints.save

    def hanging_save(self, state, *args):
        if state.global_step == 3:
            hang("checkpoint")
        return save(self, state, *args)

    def input_fn(mode):
        if mode == "eval":
            hang("evaluate")
            return [(X, Y)]
        return train_input()

    def train_input():
        yield X, Y
        hang("input")
        yield np.full_like(X, 99), Y
        yield X, Y

    monkeypatch.setattr(Checkpoints, "save", hanging_save)
    does = {"begin": lambda: hang("begin"), "after_create_state": lambda context: setattr(model_fn, "traced", True)}
    hooks = [Noted("first", [], end=lambda context: hang("end")), est.WatchdogHook(TIMEOUT, path=path)]
    hooks += [est.InMemoryEvaluatorHook(estimator, input_fn), Noted("last", [], **does)]
    assert saved_steps(estimator.train(input_fn, hooks=hooks)) == [0, 3]
    for phase in ("begin", "input", "compile", "step", "checkpoint", "evaluate", "end"):
        (report,) = hangs_reported(path, phase)
        first = (
            rf"the limit of phase '{phase}', 0.4 s, has passed\.\nProcess 0 on \S+: For the last (\d+\.\d) s it is in"
        )
        assert float(re.match(first, report).group(1)) >= TIMEOUT
        assert "Thread 'MainThread' (the run), most recent call last:" in report
        assert "in _format_stacks" not in report
        assert any(report.strip() in message for message in messages())


@pytest.mark.quick
@pytest.mark.covers("4 watchdog")
def test_a_stall_is_reported_once(tmp_path, path, hang):
    def input_fn():
        yield X, Y
        hang("input")
        time.sleep(5 * TIMEOUT)
        yield X, Y

    make(tmp_path, steps_per_loop=1).train(input_fn, hooks=[est.WatchdogHook(TIMEOUT, path=path)])
    assert len(hangs_reported(path, "input")) == 1
    assert path.read_text().count("in phase 'input'") == 1


def test_a_path_that_cannot_be_written_is_named_and_the_run_continues(tmp_path, messages):
    said = f"WatchdogHook cannot add its report to {tmp_path / 'missing' / 'stalls'}."

    def input_fn():
        yield X, Y
        end = time.monotonic() + 30
        while time.monotonic() < end and said not in messages():
            time.sleep(0.01)
        yield X, Y

    estimator = make(tmp_path, steps_per_loop=1)
    estimator.train(input_fn, hooks=[est.WatchdogHook(TIMEOUT, path=tmp_path / "missing" / "stalls")])
    assert said in messages() and saved_steps(estimator)[-1] == 2


def test_a_run_that_comes_on_is_left_alone(tmp_path, path):
    estimator = make(tmp_path, save_checkpoints_steps=None)
    hook = est.WatchdogHook(60, path=path)
    assert hook.next_step(7) is None  # so no step is run alone for it
    estimator.train(endless, hooks=[hook], steps=3)
    with pytest.raises(AssertionError, match="must not be called"):
        estimator.train(times(2), hooks=[hook, Noted("other", [], after_run=lambda *_: refuse())])
    assert not path.exists()
    assert not SUPERVISOR._runs


def test_predictions_that_no_one_asks_for_are_no_stall(tmp_path, path):
    predictions = make(tmp_path).predict(endless, hooks=[est.WatchdogHook(TIMEOUT, path=path)])
    next(predictions)
    time.sleep(TIMEOUT)  # of the compilation before, it may tell
    text = path.exists() and path.read_text()
    time.sleep(3 * TIMEOUT)
    assert (path.exists() and path.read_text()) == text
    predictions.close()


@pytest.mark.covers("4 watchdog")
def test_a_stall_ends_the_process_where_that_is_asked_for(tmp_path):
    (ended,) = shared_cluster().run("testing.scenarios.lives.stall", str(tmp_path), processes=1)
    line = "initialize_distributed: the limit of phase 'input', 1 s, has passed. It ends with exit code 76."
    assert (ended.code, ended.lines[-1]) == (76, line)
    assert any("Thread 'MainThread' (the run)" in line for line in ended.lines)
