"""Signals to this process, its handlers, and waiting for what others do."""

import contextlib
import os
import signal
import time


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def handling(number, handler):
    """Within the block a signal has a handler."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def wait_until(is_so, otherwise=lambda: None, secs=60):
    """Waits for what others do; returns what `is_so()` does at last."""
    deadline = time.monotonic() + secs
    while not (value := is_so()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.01)
    return value
