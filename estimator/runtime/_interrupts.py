"""Ctrl-C, which ends a run even where Python drops it.

A KeyboardInterrupt that is raised in a callback of the garbage collector, of a weak reference or in a `__del__` is
printed as "Exception ignored" and dropped. jax has such callbacks, and so the first Ctrl-C was seen to be lost while a
model_fn was traced. Here the signal is noted, and the loop of a run raises it again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Handler:
    """Python's own handler of SIGINT, which also notes that it was called."""

    def __init__(self) -> None:
        self.was_called = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_called = True
        signal.default_int_handler(number, frame)


_handler: _Handler | None = None  # the installed one: `signal.getsignal` takes a twentieth of a small step


def in_main_thread() -> bool:
    """Returns whether this is the thread in which Python runs handlers of signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def note_interrupts() -> Iterator[None]:
    """Lets `raise_dropped_interrupt` know of Ctrl-C within the block, unless the user has a handler of SIGINT."""
    global _handler
    if not in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _handler = handler = _Handler()
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        _handler = None
        if signal.getsignal(signal.SIGINT) is handler:  # and not the user's own handler
            signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_dropped_interrupt() -> None:
    """Raises KeyboardInterrupt if Ctrl-C came in this run, whose KeyboardInterrupt has not ended it."""
    if _handler is not None and _handler.was_called and signal.getsignal(signal.SIGINT) is _handler:
        if in_main_thread():
            raise KeyboardInterrupt
