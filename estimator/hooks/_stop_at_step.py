"""The end of a run after a number of steps."""

from __future__ import annotations

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.core._mode_keys import ModeKeys


class StopAtStepHook(Hook):
    """Ends a run at a step; in `evaluate` and `predict`, batches are its steps. It may be used for several runs.

    >>> hook = StopAtStepHook(num_steps=1000)

    Args:
      num_steps: how many steps to make in a run.
      last_step: at which global step to stop; a run that begins there makes none. Give one of both.

    Raises:
      ValueError: none or both are given, or the one is not a positive int.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        check_intervals("StopAtStepHook", num_steps=num_steps, last_step=last_step)
        self._num_steps = num_steps
        self._last_step = last_step
        self._stop = 0

    def after_create_state(self, context: Context) -> None:
        start = context.global_step if context.mode == ModeKeys.TRAIN else 0
        self._stop = start + self._num_steps if self._last_step is None else self._last_step  # type: ignore[operator]
        if start >= self._stop:
            context.request_stop("StopAtStepHook")

    def next_step(self, step: int) -> int:
        return max(self._stop, step + 1)

    def after_run(self, context: Context, values: RunValues) -> None:
        context.request_stop("StopAtStepHook")
