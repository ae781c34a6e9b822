"""A tracker's writer in a thread of its own, so that a server that does not answer holds no run."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from estimator.runtime._uninterrupted import Work
from estimator.summary._trackers import Writer

_SECS_TO_ANSWER = 10.0  # for which a run waits at a checkpoint, and at its end, for values of one step to be written
_MOST_WAITING = 1000  # steps


class InBackground:
    """Writes in a thread; what fails is tried again with the values after it.

    Args:
      open_writer: returns the writer; called in the thread as everything of the writer, and again after an error.
    """

    def __init__(self, open_writer: Callable[[], Writer]) -> None:
        self._open = open_writer
        self._writer: Writer | None = None
        self._waiting: collections.deque[tuple[int, float, Mapping[str, Any]]] = collections.deque()
        self._work: Work | None = None
        self._is_silent = False  # since a wait for the present work has ended without it

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        if len(self._waiting) == _MOST_WAITING:
            raise self._timeout()
        self._waiting.append((step, walltime, values))
        if self._is_idle():
            self._start(self._write_waiting)

    def flush(self) -> None:
        """Waits until everything is written, unless that takes too long, or has before."""
        if not self._is_idle():
            self._wait(0.0 if self._is_silent else _SECS_TO_ANSWER)
        self._finish(self._write_waiting)

    def close(self, error: BaseException | None = None) -> None:
        def close() -> None:
            self._write_waiting().close(error)

        if not self._is_idle():
            self._wait(_SECS_TO_ANSWER)
        self._finish(close)

    def _write_waiting(self) -> Writer:
        if self._writer is None:
            self._writer = self._open()
        while self._waiting:
            self._writer.write(*self._waiting[0])
            self._waiting.popleft()
        self._writer.flush()
        return self._writer

    def _is_idle(self) -> bool:
        return self._work is None or self._work.done.is_set()

    def _start(self, call: Callable[[], object]) -> Work:
        self._work, self._is_silent = Work(call, name="estimator-tracker"), False
        self._work.thread.start()
        return self._work

    def _finish(self, call: Callable[[], object]) -> None:
        work = self._start(call)
        self._wait(_SECS_TO_ANSWER)
        work.result()

    def _wait(self, secs: float) -> None:
        """Waits for the work, as long as it goes forward."""
        assert self._work is not None
        count, deadline = -1, math.inf
        while not self._work.done.wait(min(secs, 0.1)):
            if len(self._waiting) != count:
                count, deadline = len(self._waiting), time.monotonic() + secs
            if time.monotonic() >= deadline:
                self._is_silent = True
                raise self._timeout()

    def _timeout(self) -> TimeoutError:
        steps = [step for step, _, _ in self._waiting]
        of_steps = f": the values of the steps {steps[0]} to {steps[-1]} wait" if steps else ""
        return TimeoutError(f"no answer within {_SECS_TO_ANSWER:g} s{of_steps}")
