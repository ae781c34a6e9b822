"""The end of a run after some time."""

from __future__ import annotations

import time

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues


class StopAtSecsHook(Hook):
    """Ends a run N seconds after it has its state, once the programs on their way are done.

    >>> hook = StopAtSecsHook(3600)

    Args:
      secs: seconds.

    Raises:
      ValueError: it is not a positive number.
    """

    def __init__(self, secs: float) -> None:
        check_intervals("StopAtSecsHook", secs=secs)
        self._secs = secs
        self._stop = 0.0

    def after_create_state(self, context: Context) -> None:
        self._stop = time.monotonic() + self._secs

    def next_step(self, step: int) -> int | None:
        # The loop asks when it plans each program: the run ends after those that were planned before, and one step
        # more.
        return step + 1 if time.monotonic() >= self._stop else None

    def after_run(self, context: Context, values: RunValues) -> None:
        context.request_stop("StopAtSecsHook")
