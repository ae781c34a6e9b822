"""The report of a run in which nothing progresses, and its end, as `Limits` say.

The supervisor compares the time that a run has been in a phase with the limit. Where that is to end the run, the first
process of several that is over a limit flags it; all that can publish what they do, log what all have published, and
end with exit code 76. A process that is suspended does none of this: the others name it.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
import traceback

from absl import logging

from estimator.multihost._coordination_client import connected_client
from estimator.multihost._process_group import CALLS, ProcessGroup
from estimator.multihost._progress import Progress, describe_phase
from estimator.multihost._supervisor import SUPERVISOR, run_within
from estimator.runtime._limits import Limits

_LOOKS = 10  # within the shortest limit
_SECS_FOR_REPORTS = 2.5  # of the other processes
_SECS_TO_GATHER = 4.0  # where process 0, which keeps the reports, may not answer
_SECS_TO_LOG = 1.0  # where stderr may be a pipe that nobody reads
_NO_OTHER = "It waits for no other process here."


class LimitWatch:
    """The limits of a run that this thread makes, until `close` is called.

    Args:
      group: the processes that make it.
      limits: the limits.
      progress: the phase of the run.
      path: a local file to which reports are added, beside the log.

    Attributes:
      progress: as above.
    """

    def __init__(
        self, group: ProcessGroup, limits: Limits, progress: Progress, path: str | os.PathLike[str] | None = None
    ) -> None:
        self.progress = progress
        self._group = group
        self._limits = limits
        self._path = path
        self._ends = limits.action == "end"
        self._runs_in = threading.get_ident()
        self._reported: object = None  # the moment of the phase that was reported last
        self._news = SUPERVISOR.news
        self._is_closed = False
        SUPERVISOR.add(self)

    def close(self) -> None:
        self._is_closed = True
        SUPERVISOR.remove(self)

    def look(self, now: float) -> float:
        """Reports a phase that is over its limit, once; returns when to look again."""
        phase, since = moment = self.progress.moment
        limit, period = self._limits.secs(phase, self.progress.slowest_step), self._limits.shortest() / _LOOKS
        if self._is_closed or moment is self._reported:
            return now + period
        if now - since >= limit:
            self._reported = moment
            self._report(f"the limit of phase {phase!r}, {limit:g} s, has passed")
        elif self._ends and self._news != SUPERVISOR.news:
            self._news = SUPERVISOR.news
            if run_within(_SECS_TO_GATHER, self._group.read_flag) is not None:
                self._report("the limit of another process has passed")
        return min(now + period, since + limit)

    def _report(self, why: str) -> None:
        phase, since = self.progress.moment
        doing = describe_phase(phase, time.monotonic() - since)
        own, reports = f"Process {self._group.index} on {socket.gethostname()}: {doing}", None
        if self._ends:
            SUPERVISOR.is_stalled = True
        if self._group.count > 1:
            reports = run_within(_SECS_TO_GATHER, functools.partial(self._gather, own, why))
            why = f"{self._describe_cause(reports)}, and {why}" if self._ends else why
        text = "\n".join([f"{why}.", *(reports or [own]), _format_stacks(self._runs_in)])
        run_within(_SECS_TO_LOG, lambda: self._log(text))
        if self._ends:
            SUPERVISOR.peers.end(why)

    def _gather(self, report: str, why: str) -> list[str]:
        """Publishes a report, and returns all that processes have published a little later."""
        if self._ends:
            self._group.flag(why)
        awaited = next((group.waits_for for group in CALLS.groups if group.waits_for), "no other process here")
        client, folder = connected_client(), f"{self._group.prefix}/reports/{self._limits.action}"
        client.key_value_set(
            f"{folder}/{self._group.index:06}", f"{report} It waits for {awaited}.", allow_overwrite=True
        )
        time.sleep(_SECS_FOR_REPORTS)
        return [text for _, text in sorted(client.key_value_dir_get(folder))]

    def _log(self, text: str) -> None:
        logging.error("%s", text)
        try:
            if self._path is not None:
                with open(self._path, "a") as file:
                    file.write(text + "\n")
        except OSError:
            logging.exception("WatchdogHook cannot add its report to %s.", self._path)

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
    names = " and ".join(map(SUPERVISOR.peers.name_of, processes))
    return f"{names} {of_one if len(processes) == 1 else of_several}"


def _format_stacks(first: int) -> str:
    """Formats the stacks of all threads but this one, the thread `first` before the others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return "\n".join(
        f"Thread {names.get(ident, ident)!r}{' (the run)' * (ident == first)}, most recent call last:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: ident != first)
    )
