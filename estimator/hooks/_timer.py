"""A timer for events that happen every N seconds or steps."""

from __future__ import annotations

import time

from estimator.core._argument_checks import check_intervals


class SecondOrStepTimer:
    """Triggers every N seconds or every N steps: TensorFlow's class of that name.

    >>> timer = SecondOrStepTimer(every_steps=10)
    >>> timer.should_trigger_for_step(1), timer.update_last_triggered_step(1)
    (True, (None, None))
    >>> [step for step in range(1, 12) if timer.should_trigger_for_step(step)]
    [11]
    >>> timer.next_step(1), timer.next_step(11)
    (11, 21)

    Args:
      every_secs: seconds between two times.
      every_steps: steps between two times. Give one of both.

    Raises:
      ValueError: none or both are given, or the one is not positive.
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        check_intervals("SecondOrStepTimer", every_secs=every_secs, every_steps=every_steps)
        self._every_secs = every_secs
        self._every_steps = every_steps
        self.reset()

    def reset(self) -> None:
        """Resets the timer."""
        self._step: int | None = None
        self._time: float | None = None
        self._first: int | None = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether it is time: at the first call, and when the interval has passed. Never twice for a step."""
        if self._step is None:
            return True
        if step == self._step:
            return False
        return step >= self._step + self._every_steps if self._every_steps else self._secs_passed()

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Records that it was done; returns the seconds and the steps since the last time, or (None, None)."""
        now = time.monotonic()
        since = (None, None) if self._step is None or self._time is None else (now - self._time, step - self._step)
        self._step, self._time = step, now
        if self._first is None:
            self._first = step
        return since

    def last_triggered_step(self) -> int | None:
        return self._step

    def next_step(self, step: int) -> int | None:
        """The next step for which it is time, as far as that is known: the answer of `Hook.next_step`."""
        if self._first is None:
            self._first = step + 1
        if step < self._first:
            return self._first
        if self._every_steps:
            # Counted from the first step and not from the last trigger: a late trigger does not shift the next ones.
            return self._first + self._every_steps * ((step - self._first) // self._every_steps + 1)
        # With seconds, the answer holds only now; the loop asks again for each program.
        return step + 1 if self._step is not None and self._secs_passed() else None

    def _secs_passed(self) -> bool:
        assert self._every_secs is not None and self._time is not None
        return time.monotonic() >= self._time + self._every_secs
