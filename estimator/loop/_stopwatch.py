"""The seconds that a process spends on the parts of its runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

PARTS = ("input", "host", "device", "checkpoint", "evaluation", "compilation")


class Stopwatch:
    """The seconds of one process in each of PARTS, over all runs that led to its state; between them it stands still.

    >>> stopwatch = Stopwatch()
    >>> with stopwatch.part("input"):
    ...     time.sleep(0.01)
    >>> seconds = stopwatch.read()
    >>> seconds["input"] >= 0.01, sum(seconds.values()) == seconds["input"]
    (True, True)

    Attributes:
      start: when the first run began, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.start = time.time()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._thread: int | None = None  # the one that is measured
        self._since = time.perf_counter()

    def switch(self, part: str | None) -> str | None:
        """Counts for another part from now on; returns the one before. If None, it stands still."""
        before = self._part
        if part != before:
            now = time.perf_counter()
            if before is not None:
                self._seconds[before] += now - self._since
            self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def part(self, part: str) -> Iterator[None]:
        own = threading.get_ident()
        if self._thread not in (None, own):
            yield  # the time of an evaluation beside a training run, or beside another one, is that run's
            return
        outer, self._thread = self._thread, own
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)
            self._thread = outer

    def read(self) -> dict[str, float]:
        """The seconds up to now. For another thread the last microseconds may be missing."""
        part, since, seconds = self._part, self._since, dict(self._seconds)
        if part is not None:
            seconds[part] += time.perf_counter() - since
        return seconds

    def record(self, seconds: list[dict[str, float]]) -> dict[str, Any]:
        """A record for a checkpoint, given the `read` of all processes."""
        return {"start": self.start, "now": time.time(), "seconds": seconds}

    def resume(self, record: dict[str, Any] | None, index: int) -> None:
        """Continues from the record of a checkpoint. Without one, or if there was no process of this index, from 0."""
        of_processes = record["seconds"] if record else []
        self.start = record["start"] if record else time.time()
        self._seconds = dict.fromkeys(PARTS, 0.0) | (of_processes[index] if index < len(of_processes) else {})
