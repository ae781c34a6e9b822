"""Summaries written during a run, for TensorBoard."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Histogram, OfTowers, Report, Rows, Scalar
from estimator.hooks._rates import RateMeter
from estimator.hooks._timer import SecondOrStepTimer
from estimator.storage._files import normalize
from estimator.summary._event_writer import shown_metrics, write_into

_Moment = tuple[int, float, RunValues]  # the step, the time, and what will be known of it
_SECONDS = 1.0  # between two rates, at least
_MOST_WAITING = 2  # programs in flight. Older values are ready, so that reading them never blocks


class SummarySaverHook(Hook):
    """Writes the loss, what the model_fn shows by `est.summary.*`, `global_step/sec` and `examples/sec`; and for
    optimizers under `optax.inject_hyperparams` the `learning_rate`, several as `learning_rate/<name>`.

    With the rates come `input_wait`, the share of the time that the run waited for its input while its devices had
    nothing to do, from 0 to 1, and on GPUs whose peak is known `flops_utilization`, the share of it: the FLOPs of a
    step by `est.summarize`, by the steps per second, over the most that one device makes, of dense matrices in half
    precision.

    They go into an event file for TensorBoard, and the numbers into `history.jsonl` too (see `est.read_history`); the
    rates once a second at most. `train` has such a hook unless one is given that writes into the model_dir;
    `RunConfig.save_summary_steps` says how often it writes. It never blocks the training loop: values are written once
    the training has passed them, and before the next checkpoint. A model_fn that shows nothing costs no program.

    In `evaluate`, whose metrics are written anyway, it writes what the model_fn shows of the last batch
    that was due. There it counts batches, not steps.

    >>> hook = SummarySaverHook(save_steps=10)

    Args:
      save_steps: write at the steps 1, 1 + save_steps, 1 + 2 save_steps ..., wherever the run begins.
      save_secs: write every N seconds. Give one of both.
      output_dir: where to; default: the model_dir, in `evaluate` the eval_dir.
      summary_writer: a `tensorboardX.SummaryWriter` to write to instead; it is flushed, and stays open.

    Raises:
      ValueError: not exactly one of `save_steps` and `save_secs` is given, or the one is not positive; when a run
        of `predict` begins: `output_dir` is missing.
    """

    before_run_may_be_early = True  # it requests the same each time

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: Any = None,
    ) -> None:
        check_intervals("SummarySaverHook", save_secs=save_secs, save_steps=save_steps)
        self._timer = SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps)
        self._steps = save_steps
        self._dir = None if output_dir is None else normalize(output_dir)
        self._given_writer = summary_writer

    def writes_to(self, directory: str | None) -> bool:
        """Returns whether it writes into the directory of the run."""
        return self._given_writer is None and self._dir in (None, directory and normalize(directory))

    def begin(self) -> None:
        self._timer.reset()
        self._write: Callable[[int, float, dict[str, Any]], None] | None = None  # only for the chief
        self._names: list[str] = []
        self._of_towers: list[str] = []
        self._waiting: list[_Moment] = []
        self._passed = 0  # the last step whose loss is known
        self._meter = RateMeter()

    def after_create_state(self, context: Context) -> None:
        if self._given_writer is None and self._dir is None and context.output_dir is None:
            raise ValueError(f"SummarySaverHook needs an output_dir in mode {str(context.mode)!r}; got None.")
        self._names = [name for name, report in context.reported.items() if _is_shown(report)]
        self._of_towers = [name for name in self._names if isinstance(context.reported[name], OfTowers)]
        if context.mode == ModeKeys.TRAIN:
            context.watch_losses(self._write_due)
        if jax.process_index() == 0:
            if self._given_writer is None:
                self._write = context.events(self._dir).write
            else:
                self._write = functools.partial(write_into, self._given_writer)

    def next_step(self, step: int) -> int | None:
        if not self._names:
            return None  # losses come in any case
        if self._steps is not None:
            return step + self._steps - (step - 1) % self._steps
        return self._timer.next_step(step)

    def before_run(self, context: Context) -> Any:
        return self._names

    def after_run(self, context: Context, values: RunValues) -> None:
        if self._steps is None:
            if not self._timer.should_trigger_for_step(context.step):
                return  # planned before the step that was due by the same clock
            self._timer.update_last_triggered_step(context.step)
        step = context.global_step
        self._waiting.append((step, time.time(), values))
        if context.mode != ModeKeys.TRAIN:
            self._waiting = self._waiting[-1:]
        elif len(self._waiting) > _MOST_WAITING or step <= self._passed:
            self._write_moment(context, self._waiting.pop(0))

    def end(self, context: Context) -> None:
        if context.error is not None:
            context.look()
        for moment in self._waiting:
            self._write_moment(context, moment)

    def _write_due(self, context: Context, first: int, losses: np.ndarray) -> None:
        """Writes what is due of the steps from `first` on: their losses are known by now, and so all their values.

        The loop calls it when it looks at its losses. Values of the model_fn have been in `_waiting` since their step;
        where it shows none, only the losses are written, and no step was requested for them. A value of a step that
        was passed here before it came is written by `after_run`, as are the oldest where too many wait.
        """
        last = self._passed = first + len(losses) - 1
        if self._names:
            due = [moment for moment in self._waiting if moment[0] <= last]
            self._waiting = self._waiting[len(due) :]
            for moment in due:
                rates = self._meter.read(context, last, _SECONDS) if moment is due[-1] else {}
                self._write_moment(context, moment, rates)
            return
        if self._steps is not None:
            steps = range(first + (1 - first) % self._steps, last + 1, self._steps)
        else:
            steps = range(last, last + 1 if self._timer.should_trigger_for_step(last) else last)
        for step in steps:
            if self._write is not None:
                rates = self._meter.read(context, last, _SECONDS) if step == steps[-1] else {}
                shown = {tag: float(of_steps[step - first]) for tag, of_steps in context.scalars.items()}
                self._write(step, time.time(), {"loss": float(losses[step - first]), **shown, **rates})
            self._timer.update_last_triggered_step(step)

    def _write_moment(self, context: Context, moment: _Moment, rates: Mapping[str, float] | None = None) -> None:
        if self._write is None:
            return  # nothing is fetched for it
        step, walltime, values = moment
        loss = {"loss": values.loss, **values.scalars} if context.mode == ModeKeys.TRAIN else {}
        shown = {name: x for name, x in zip(self._names, values.results, strict=True) if x is not None}
        for name in [name for name in self._of_towers if name in shown]:
            shown |= {f"{name}/tower_{i}": value for i, value in enumerate(shown.pop(name))}
        self._write(step, walltime, {**loss, **(rates or {}), **shown})


def write_evaluation(context: Context, checkpoint_path: str | None) -> None:
    """Writes the metrics of an evaluation, and the path of its checkpoint."""
    if jax.process_index() == 0:
        assert context.metrics is not None
        text = {"checkpoint_path": checkpoint_path} if checkpoint_path else {}
        context.events().write(context.global_step, time.time(), {**shown_metrics(context.metrics), **text})


def _is_shown(report: Report) -> bool:
    match report:
        case Scalar():
            return report.summary
        case Rows():
            return report.image
        case OfTowers():
            return report.value.ndim == 1
        case _:
            return isinstance(report, Histogram)
