"""The end of a run of several processes in which nothing progresses, as `RunConfig(limits=...)` says.

A thread of each process compares the time that its run has been in a phase with the limit. The first process that is
over one flags it; all that can publish what they do, log what all have published, and end with exit code 76. A process
that is suspended does none of this: the others name it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from absl import logging

from estimator.multihost._lost_process import LOST_PROCESS
from estimator.multihost._news import NEWS
from estimator.multihost._process_group import ProcessGroup
from estimator.multihost._progress import describe_phase
from estimator.runtime._limits import Limits
from estimator.runtime._stacks import format_stacks

T = TypeVar("T")

_LOOKS = 10  # within the shortest limit
_SECS_FOR_REPORTS = 2.5  # of the other processes
_SECS_TO_GATHER = 4.0  # where process 0, which keeps the reports, may not answer
_SECS_TO_LOG = 1.0  # where stderr may be a pipe that nobody reads
_NO_OTHER = "It waits for no other process here."


@contextlib.contextmanager
def watch_limits(group: ProcessGroup, limits: Limits | None) -> Iterator[None]:
    """Ends this process, and the others of the group, where a phase within the block takes longer than its limit."""
    if limits is None:
        yield
        return
    watch = _LimitWatch(group, limits)
    try:
        yield
    finally:
        watch.close()


class _LimitWatch:
    def __init__(self, group: ProcessGroup, limits: Limits) -> None:
        self._group = group
        self._limits = limits
        self._progress = group.progress
        self._channel = group.channel("limits")
        self._runs_in = threading.get_ident()
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="limit-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        NEWS.notify()
        if not LOST_PROCESS.is_ending:  # else this thread waits to be ended
            self._thread.join()

    def _watch(self) -> None:
        # Steps that take less than this are too short to matter for the limit.
        period = self._limits.shortest() / _LOOKS
        phase, since = before = self._progress.moment
        looked_at, slowest_step, news = time.monotonic(), 0.0, NEWS.count
        while not self._is_closed:
            moment, now = self._progress.moment, time.monotonic()
            if moment is not before and phase == "step":
                slowest_step = max(slowest_step, looked_at - since)
            before, looked_at, (phase, since) = moment, now, moment
            limit = self._limits.secs(phase, slowest_step)
            if now - since >= limit:
                self._end(f"the limit of phase {phase!r}, {limit:g} s, has passed")
            news, is_new = NEWS.count, NEWS.count != news
            if is_new and run_within(_SECS_TO_GATHER, self._channel.is_flagged):
                self._end("the limit of another process has passed")
            secs = min(period, max(0.0, since + limit - now))
            NEWS.wait_for(news, lambda: self._is_closed, secs)

    def _end(self, why: str) -> None:
        LOST_PROCESS.note_stall()
        phase, since = self._progress.moment
        doing = describe_phase(phase, time.monotonic() - since)
        own = f"Process {self._group.index} on {socket.gethostname()}: {doing}"

        def gather() -> list[str]:
            self._channel.flag()
            return self._channel.gather_reports(own, _SECS_FOR_REPORTS)

        reports = run_within(_SECS_TO_GATHER, gather)
        why = f"{self._describe_cause(reports)}, and {why}"
        text = "\n".join([f"{why}.", *(reports or [own]), format_stacks(self._runs_in)])
        run_within(_SECS_TO_LOG, lambda: logging.error("%s", text))
        LOST_PROCESS.end_process(why)

    def _describe_cause(self, reports: list[str] | None) -> str:
        """Names the processes that hang: those that do not report, or else that wait for no other."""
        numbers = range(self._group.count)
        if reports is None:
            return _say_of([0], "does not answer", "")
        by_process = {i: text for i in numbers for text in reports if text.startswith(f"Process {i} on ")}
        if silent := [i for i in numbers if i not in by_process]:
            return _say_of(silent, "does not answer", "do not answer")
        stuck = [i for i in numbers if by_process[i].endswith(_NO_OTHER)]
        return _say_of(stuck, "waits for no other", "wait for no other") if stuck else "all wait for another process"


def _say_of(processes: list[int], of_one: str, of_several: str) -> str:
    names = " and ".join(map(LOST_PROCESS.name_of, processes))
    return f"{names} {of_one if len(processes) == 1 else of_several}"


def run_within(secs: float, work: Callable[[], T]) -> T | None:
    """Calls `work` in a thread, as it may hang; returns its result, or None if there is none in time."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(secs)
    return results[0] if results else None
