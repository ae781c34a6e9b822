"""Reports where a stalled run is stuck."""

from __future__ import annotations

import math
import os
from typing import Any

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook
from estimator.multihost._limit_watch import LimitWatch
from estimator.multihost._process_group import CALLS
from estimator.multihost._progress import Progress
from estimator.runtime._limits import Limits, check_action


class WatchdogHook(Hook):
    """Reports where a run is stuck when it has been in a phase for `timeout_secs`, with the stacks of all threads.

    It is `est.Limits` with the same limit for each phase, in one process too, and without an end of the run unless that
    is asked for. A thread watches; the run itself pays nothing. It reports each stall once. An evaluation of one
    process is a phase: allow for the longest compilation, checkpoint or evaluation. The first batch, which is read
    before hooks begin, is not watched; neither is a call that keeps Python's global lock. Each of several processes
    reports what it does, and for which other one it waits: the culprit is the one that waits for none.

    >>> hook = WatchdogHook(timeout_secs=600)

    Args:
      timeout_secs: seconds in a phase.
      action: "log": the run continues; "end": all processes end, with exit code 76.
      path: a local file to which the report is added, beside the log, which absl writes to stderr.

    Raises:
      ValueError: timeout_secs is not a positive number, or the action is unknown.
    """

    def __init__(self, timeout_secs: float, action: str = "log", path: str | os.PathLike[str] | None = None) -> None:
        check_intervals("WatchdogHook", timeout_secs=timeout_secs)
        check_action("WatchdogHook", action)
        self._limits = _SameLimit(hook=timeout_secs, action=action)
        self._path = path
        self._watch: LimitWatch | None = None

    def begin(self) -> None:
        self._watch = LimitWatch(CALLS.group, self._limits, Progress(), self._path)

    def after_create_state(self, context: Any) -> None:
        if self._watch is not None:
            self._watch.progress = context.group.progress

    def end(self, context: Context) -> None:
        if self._watch is None:
            return  # `begin` has failed
        self._watch.close()
        self._watch = None


class _SameLimit(Limits):
    """A limit for all but the time that the caller of `predict` takes, and whatever a step has taken before."""

    def secs(self, phase: str, slowest_step: float) -> float:
        return math.inf if phase == "output" else super().secs("hook", slowest_step)
