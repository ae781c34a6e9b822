"""Fixtures for all tests."""

import signal

import jax
import pytest
from testing.signals import handling

from estimator.loop import _steps_per_loop
from estimator.loop._steps_per_loop import LoopSize
from estimator.runtime._shared_programs import forget_programs


@pytest.fixture
def messages(caplog):
    caplog.set_level("INFO", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "absl"]


@pytest.fixture
def errors(caplog):
    """Lists the errors that the library has logged. Others come late, as asyncio's of a task of the test before."""
    return lambda: [each.getMessage() for each in caplog.records if (each.name, each.levelname) == ("absl", "ERROR")]


@pytest.fixture
def default_handler():
    """Ctrl-C is ignored where a shell runs the tests beside it."""
    with handling(signal.SIGINT, signal.default_int_handler):
        yield


@pytest.fixture
def quick_steps(monkeypatch):
    """Steps are known to be quick from the first one on: chunks are as long as their programs."""
    bounds = LoopSize.bounds

    def known(size):
        size._fit = 10**6
        return bounds(size)

    monkeypatch.setattr(LoopSize, "bounds", known)


@pytest.fixture
def steps_alone(monkeypatch):
    """Steps of "auto" run alone: a loop whose last step says what the model_fn reports has that step twice."""
    monkeypatch.setattr(_steps_per_loop, "_automatic", lambda *_: 1)


@pytest.fixture
def compilations():
    """The list of compilations so far; grows by one at each. No program is left from the test before."""
    events = []
    forget_programs()

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
