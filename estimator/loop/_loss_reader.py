"""Reads the losses of a training run a program late: logs them, and ends the run at a NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.tree_util import tree_flatten, tree_unflatten

from estimator.core._hook import Hook
from estimator.core._step_guard import StepWatch
from estimator.hooks._nan import NanTensorHook
from estimator.inputs._recent_batches import RecentBatches
from estimator.loop._context import RunContext
from estimator.loop._programs import Pair, Programs, StepOutputs
from estimator.loop._training_log import TrainingLog
from estimator.steps._step_loops import Carry


class NanLossDuringTrainingError(RuntimeError):
    """The loss, or a variable about to be saved, is not a number."""


@dataclasses.dataclass(eq=False, repr=False)
class LossReader:
    """Reads the losses of several programs at once: to read each at once would cost every step, on several CPU devices,
    a tenth of its time.

    Args:
      programs: the programs that are run.
      watch: looks at the steps that were not made; None if all are made.
      hooks: say whether a NaN is an error.
      context: of the run.
      log: gets the losses.
      newest_checkpoint: what to say of it in an error.

    Attributes:
      step: the last step whose loss was read.
      ended_by_nan: whether a NaN was read that hooks do not take for an error.
    """

    _programs: Programs
    _watch: StepWatch | None
    _hooks: Sequence[Hook]
    _context: RunContext
    _log: TrainingLog
    _newest_checkpoint: Callable[[], str]

    def __post_init__(self) -> None:
        self._waiting: list[tuple[StepOutputs, int]] = []  # the outputs of each program, and the number of its steps
        self._batches = RecentBatches(self._context.global_step)
        self.step = self._context.global_step
        self.ended_by_nan = False

    def add(self, outputs: StepOutputs, pairs: Sequence[Pair]) -> None:
        """Notes a program that was started, and its batches; waits for the first one, to start the clock."""
        self._waiting.append((outputs, len(pairs)))
        self._batches.add(pairs)
        if self._context.clock is None:
            with self._context.stopwatch.part("device"):
                outputs.losses.block_until_ready()
            known = _concatenate(self._waiting)
            # Compiling is not part of the rates, which are measured from here.
            self._context.start_clock()
            self._log.add_first(self._context.global_step, known.losses, known.report.scalars())

    def read(self, carry: Carry, but: int = 0) -> None:
        """Reads and logs the losses that wait, except for the last `but` programs.

        Args:
          carry: after the newest program.
        """
        programs = self._waiting[: len(self._waiting) - but]
        if not programs:
            return
        with self._context.stopwatch.part("device"):
            losses, report = _concatenate(programs)
        self._waiting = self._waiting[len(programs) :]
        first, last = self.step + 1, self.step + len(losses)
        is_nan = np.isnan(losses)
        # Before the watchers are called: one that reads the state, or saves, has the rest of the losses read meanwhile.
        self.step = last
        self._context.report = report
        if not is_nan.any():
            self._log.add(last, losses, report.scalars())
        self._context.notify_loss_watchers(first, losses)
        # Before the error for a NaN loss: the guard's names the tower and the variable.
        if self._watch and report.skipped is not None:
            self._watch.look(carry, report.skipped)
        if is_nan.any():
            self._end_by_nan(first + int(np.argmax(is_nan)))
            self._log.add(last, losses, report.scalars())
        self._batches.forget_until(last)

    def _end_by_nan(self, step: int) -> None:
        found = self._batches.describe_nan(step)
        advice = f"NaN loss during training, at step {step}. {self._newest_checkpoint()} " + (
            f"{found}. Leave such rows out in input_fn, or write `np.nan_to_num(x)`."
            if found
            else f"{self._programs.guard.about_nan()}, lower the learning rate, or run with "
            "jax.config.update('jax_debug_nans', True)."
        )
        if all(hook.fail_on_nan_loss for hook in self._hooks if isinstance(hook, NanTensorHook)):
            raise NanLossDuringTrainingError(advice)
        if not self.ended_by_nan:
            logging.warning("%s", advice)
        self.ended_by_nan = self._context.found_nan = True
        self._context.request_stop("NaN loss")


def _concatenate(programs: Sequence[tuple[StepOutputs, int]]) -> Any:
    """The `StepOutputs` of some programs, as numpy arrays with an element per step."""
    counts = [count for _, count in programs]

    def join(*of_programs: jax.Array) -> np.ndarray:
        # To take one of equal copies apart costs more than to read it.
        parts = [np.asarray(x if x.is_fully_replicated else x.addressable_data(0)) for x in of_programs]
        # The outputs of a loop have room for the most steps of a program; only the first `count` were made.
        return np.concatenate([part.reshape(-1)[:count] for part, count in zip(parts, counts, strict=True)])

    leaves, structures = zip(*[tree_flatten(outputs) for outputs, _ in programs], strict=True)
    return tree_unflatten(structures[0], map(join, *leaves))
