"""Traces of what the host and the devices do in some steps."""

from __future__ import annotations

import os
import time

import jax
from absl import logging

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.storage._folders import WorkingFolder


class ProfilerHook(Hook):
    """Writes a `jax.profiler` trace of a few steps every N steps or seconds, for TensorBoard or Perfetto.

    As many steps as a trace holds go before the first one, so that compiling is not part of it. The trace that is open
    at the end of a run, however it ends, is written. If someone else is tracing at the time, it warns and continues.

    >>> hook = ProfilerHook(save_steps=1000, num_steps=10)

    Args:
      save_steps, save_secs: how often. Give one of both.
      output_dir: where traces go, as `plugins/profile/<time>/`; by default the model_dir.
      num_steps: how many steps a trace holds; less than `save_steps`. If None, 5, or what `save_steps` leaves room for.

    Raises:
      ValueError: not exactly one interval is given, it or `num_steps` is not positive, or `num_steps` does not fit in.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        num_steps: int | None = None,
    ) -> None:
        check_intervals("ProfilerHook", save_steps=save_steps, save_secs=save_secs)
        if num_steps is None:
            num_steps = min(5, max(1, save_steps - 1)) if save_steps else 5
        check_intervals("ProfilerHook", num_steps=num_steps)
        if save_steps is not None and num_steps >= save_steps:
            raise ValueError(
                f"num_steps of ProfilerHook must be less than save_steps; got {num_steps!r} and {save_steps!r}."
            )
        self._every_steps = save_steps
        self._every_secs = save_secs
        self._output_dir = os.fspath(output_dir)
        self._steps = num_steps
        self._tracing = False

    def after_create_state(self, context: Context) -> None:
        self._first = context.step + self._steps  # where a trace begins; by seconds: the newest one
        self._ended: float | None = None  # by seconds: when the last trace did, until the next one is planned
        self._dir = self._output_dir or str(context.model_dir)

    def next_step(self, step: int) -> int | None:
        begin = self._begin(step)
        if step < begin + self._steps:
            return begin if step < begin else begin + self._steps
        if self._every_steps is not None:
            return begin + self._every_steps
        if self._ended is not None and time.monotonic() >= self._ended + self._every_secs:  # type: ignore[operator]
            self._ended, self._first = None, step + 1
            return self._first
        return None

    def after_run(self, context: Context, values: RunValues) -> None:
        _ = values.loss  # so that a trace holds its own steps, and whole
        if context.step != self._begin(context.step):
            self._stop()
            self._ended = time.monotonic()
            return
        try:
            self._folder = WorkingFolder(self._dir)
            jax.profiler.start_trace(self._folder.path)
            self._tracing = True
        except RuntimeError as error:
            logging.warning("ProfilerHook leaves out the trace from step %d on: %s", context.step, error)

    def end(self, context: Context) -> None:
        self._stop()

    def _begin(self, step: int) -> int:
        """The first step of the trace that a step lies in; between two traces, of the one before."""
        if self._every_steps is None or step < self._first:
            return self._first
        return step - (step - self._first) % self._every_steps

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            self._folder.upload()
            logging.info("Wrote a trace of some steps to %s.", self._dir)
