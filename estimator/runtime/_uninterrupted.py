"""Work that an exception out of a signal's handler, such as Ctrl-C's KeyboardInterrupt, must not cut in two.

Python runs the handlers of signals in the main thread, between any two of its instructions. Where one of these is
orbax's or XLA's, their own threads may wait for ever for the interrupted one, or crash when the process ends. So
another thread does such work, and the main thread waits for it, which a handler may interrupt at any time.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from estimator.runtime._jax_settings import with_settings_of_this_thread

F = TypeVar("F", bound=Callable[..., object])

# To wait after an interrupt for the work, and again when the process ends; together less than ten seconds.
_SECONDS_TO_FINISH, _SECONDS_AT_EXIT = 5.0, 1.0
_EXIT_CODE = 130  # of a process that Ctrl-C ended, as shells count

_unfinished: list[Work] = []


def in_main_thread() -> bool:
    """Returns whether this is the thread in which Python runs handlers of signals."""
    return threading.current_thread() is threading.main_thread()


class Work:
    """A call in a thread of its own, with the settings of jax of the thread that makes this object.

    Args:
      call: the call.
      name: of the thread.
      then: is called in the thread once `done` is set.

    Attributes:
      done: is set when the call has returned, or raised.
      thread: the thread; `start` it.
    """

    def __init__(
        self,
        call: Callable[[], object],
        name: str = "estimator-uninterrupted",
        then: Callable[[], object] = lambda: None,
    ) -> None:
        self._call = with_settings_of_this_thread(call)
        self._result: object = None
        self._error: BaseException | None = None
        self._then = then
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self.done.set()
            self._then()

    def result(self) -> object:
        """Returns what the call returned; or raises, once, what it raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame
        return self._result


def shield(function: F) -> F:
    """Shields a function from the handlers of signals: what they raise is raised when it is done, or after five
    seconds, when its result is given up. A second exception is raised at once.

    >>> shield(max)(1, 2)
    2
    """

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if not in_main_thread():  # handlers run in the main thread only
            return function(*args, **kwargs)
        work = Work(lambda: function(*args, **kwargs))
        try:
            work.thread.start()
            work.done.wait()
        except BaseException:
            try:
                work.done.wait(_SECONDS_TO_FINISH)
            finally:
                give_up(work)
            raise
        return work.result()

    return call  # type: ignore[return-value]


def give_up(work: Work) -> None:
    """Records that nobody waits any more for the work, which may still be unfinished when the process ends."""
    if not work.done.is_set():
        _unfinished.append(work)


def compile_first(program: Any, *args: object, **kwargs: object) -> None:
    """Compiles a function from `jax.jit` for the call with these arguments that is to follow, uninterrupted.

    Anything else, such as a function that runs several programs, is left to that call.
    """
    in_main = in_main_thread()
    if in_main and hasattr(program, "lower") and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        shield(program.lower(*args, **kwargs).compile)()


def _wait_at_exit() -> None:
    """Waits for unfinished threads, which would crash while Python and jax shut down."""
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    for work in _unfinished:
        work.thread.join(max(0.0, deadline - time.monotonic()))
    # A thread that hangs would block the end of Python: the process ends here, after its output is flushed.
    if any(work.thread.is_alive() for work in _unfinished):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_EXIT_CODE)


# Called before what jax has registered. A forked child has none of the threads.
atexit.register(_wait_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unfinished.clear)
