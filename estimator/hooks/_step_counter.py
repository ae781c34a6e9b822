"""`StepCounterHook`: the speed of a run in steps per second."""

from __future__ import annotations

import os
from typing import Any

import jax
from absl import logging

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.hooks._timer import SecondOrStepTimer
from estimator.storage._folders import WorkingFolder


class StepCounterHook(Hook):
    """Logs, and shows in TensorBoard, the steps and the examples per second.

    As in TensorFlow the first step, which compiles, starts the clock: with `every_n_steps=100`, lines are of the steps
    101, 201 and so on. It does not wait for the devices: one or two of the programs counted may still run.

    >>> hook = StepCounterHook(every_n_steps=100)

    Args:
      every_n_steps, every_n_secs: how often. Give one, and None for the other.
      output_dir: the directory of an event file to write, in a store at the end; if None, none is written.
      summary_writer: writes instead; any object with `add_scalar(tag, value, step)`, such as tensorboardX's
        `SummaryWriter`.

    Raises:
      ValueError: not exactly one interval is given, or it is not positive; output_dir and summary_writer are given.
      TypeError: the summary_writer has no `add_scalar`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "_log_and_record"):
            raise TypeError(
                f"{cls.__name__}._log_and_record would never be called: it is private to TensorFlow's StepCounterHook. "
                "Pass `summary_writer=`, whose `add_scalar(tag, value, step)` gets the rates, or override "
                "`after_run(self, context, values)`."
            )

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: Any = None,
    ) -> None:
        check_intervals("StepCounterHook", every_n_steps=every_n_steps, every_n_secs=every_n_secs)
        if output_dir is not None and summary_writer is not None:
            raise ValueError(
                "Only one of output_dir and summary_writer can be provided to StepCounterHook; "
                f"got {output_dir!r} and {summary_writer!r}."
            )
        if summary_writer is not None and not hasattr(summary_writer, "add_scalar"):
            raise TypeError(
                "summary_writer of StepCounterHook needs `add_scalar(tag, value, step)`, as "
                f"`tensorboardX.SummaryWriter` has it; got {summary_writer!r}."
            )
        self._timer = SecondOrStepTimer(every_n_secs, every_n_steps)
        self._output_dir = output_dir
        self._given = self._writer = summary_writer
        self._examples = 0

    def begin(self) -> None:
        self._timer.reset()
        if self._output_dir is not None and jax.process_index() == 0:
            import tensorboardX  # takes a while

            self._folder = WorkingFolder(os.fspath(self._output_dir))
            self._writer = tensorboardX.SummaryWriter(self._folder.path)

    def next_step(self, step: int) -> int | None:
        return self._timer.next_step(step)

    def after_run(self, context: Context, values: RunValues) -> None:
        if not self._timer.should_trigger_for_step(context.step):
            return
        seconds, steps = self._timer.update_last_triggered_step(context.step)
        # Examples are counted one by one, since the last batch of an input may be smaller.
        examples, self._examples = context.examples - self._examples, context.examples
        if not seconds or not steps:  # the first time
            return
        rates = {"global_step/sec": steps / seconds, "examples/sec": examples / seconds}
        logging.info("%s", ", ".join(f"{tag}: {rate:.6g}" for tag, rate in rates.items()))
        if self._writer is not None and jax.process_index() == 0:
            for tag, rate in rates.items():
                self._writer.add_scalar(tag, rate, context.step)

    def end(self, context: Context) -> None:
        if self._writer is not self._given:
            self._writer.close()
            self._folder.upload()
            self._writer = self._given
