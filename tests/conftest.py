"""Fixtures for all tests; asserts of the helper modules are explained like those of tests."""

import jax
import pytest

pytest.register_assert_rewrite("testing")


@pytest.fixture
def messages(caplog):
    caplog.set_level("INFO", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "absl"]


@pytest.fixture
def compilations():
    """The list of compilations so far; grows by one at each."""
    events = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
