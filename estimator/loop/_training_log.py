"""Log lines with the loss and the speed of a training run, and its progress bar."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from estimator.core._run_config import is_default
from estimator.hooks._rates import RateMeter
from estimator.loop._context import RunContext
from estimator.runtime._progress_bar import progress_bar

# From the first line to the second; from each to the next are twice as many as before it, but no more than eight. The
# loop looks at losses about once a second, and is a second or two behind: so there is a line in ten seconds.
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 8.0
_DIVERGED = 1e6  # a final loss is this many times the first one


class TrainingLog:
    """Log lines every few steps or seconds, and, within `with`, a progress bar on stderr.

    Args:
      every: the number of steps from line to line; if None, there are no lines. Where nobody has given it
        (`is_default`), lines come by time: the first ones soon, then one in about ten seconds.
      context: of the run, at its start.
      last_step: where it ends; if None, with its input.
      shows_bar: whether there is a bar.

    Attributes:
      last_loss: the newest known loss, or None.
    """

    def __init__(self, every: int | None, context: RunContext, last_step: int | None, shows_bar: bool) -> None:
        self.last_loss: float | None = None
        self._first_loss = 0.0
        self._every = every
        self._by_time = is_default(every)
        self._seconds = _FIRST_SECONDS  # to the next line by time
        self._logged_at = -math.inf
        self._context = context
        self._meter = RateMeter()
        self._own_seconds: list[tuple[float, float]] = []  # of the processes, at the last line
        self._logged_step = context.global_step
        self._last_step = last_step
        self._shows_bar = shows_bar
        self._bar: Any = progress_bar(disable=True)

    def __enter__(self) -> TrainingLog:
        # `miniters`, since tqdm's own choice is not to look at the clock in as many steps as were quick before.
        options = {"initial": self._logged_step, "unit": "step", "miniters": 1, "disable": not self._shows_bar}
        self._bar = progress_bar(total=self._last_step, **options)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def add_first(self, step: int, losses: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Logs the first step of the first program, which led to `step`."""
        self._first_loss = losses[0]
        if (self._every or 1) > 1:  # else the first step is logged with the others, or not at all
            first = step - len(losses) + 1
            self._write([first], first, losses, scalars)
            if self._by_time:
                self._logged_step = first

    def add(self, step: int, losses: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Logs the steps that are due among those that led to `step`, whose losses and other values these are."""
        self.last_loss = losses[-1]
        if self._shows_bar:
            self._bar.set_postfix(loss=f"{losses[-1]:.4g}", refresh=False)
        if not self._is_due(step):
            return
        rates = self._meter.read(self._context, step)
        own, self._own_seconds = self._own_seconds, self._context.own_seconds
        speed = f" ({_describe(rates)}{_describe_slowest(own, self._own_seconds)})" if rates else ""
        every = step - self._logged_step if self._by_time else self._every
        assert every
        due = range(self._logged_step + every, step + 1, every)  # some may lie within a program of several
        self._write(due, step - len(losses) + 1, losses, scalars, speed)
        self._logged_step = due[-1]

    def say_final_loss(self) -> None:
        logging.info("Loss for final step: %.6g.", self.last_loss)
        if not abs(self.last_loss or 0) <= _DIVERGED * max(1, abs(self._first_loss)):
            logging.warning(
                "The loss was %.6g at the first step of this run, and %.6g at the last: training has diverged. Lower "
                "the learning rate, or clip the gradients by `est.clip_by_global_norm(1.0)`.",
                self._first_loss,
                self.last_loss,
            )

    def _is_due(self, step: int) -> bool:
        if not self._by_time:
            return self._every is not None and step - self._logged_step >= self._every
        if step == self._logged_step or time.monotonic() < self._logged_at + self._seconds:
            return False
        self._seconds = min(2 * self._seconds, _MOST_SECONDS)
        return True

    def _write(
        self, due: Iterable[int], first: int, losses: np.ndarray, scalars: dict[str, np.ndarray], speed: str = ""
    ) -> None:
        with self._bar.external_write_mode():  # so that the line does not go into the bar
            for step in due:
                shown = "".join(f", {tag} = {of_steps[step - first]:.6g}" for tag, of_steps in scalars.items())
                logging.info("loss = %.6g, step = %d%s%s", losses[step - first], step, shown, speed)
        self._logged_at = time.monotonic()


def _describe(rates: Mapping[str, float]) -> str:
    shown = [f"{rates['global_step/sec']:.4g} steps/sec", f"{rates['examples/sec']:.4g} examples/sec"]
    shown.append(f"{rates['input_wait']:.0%} waiting for input")
    if "flops_utilization" in rates:
        shown.append(f"{rates['flops_utilization']:.1%} of peak FLOPs")
    return ", ".join(shown)


def _describe_slowest(before: Sequence[tuple[float, float]], now: Sequence[tuple[float, float]]) -> str:
    """The process that has worked longest since the last line, on its input and its host, as text; empty if it is not
    known. Devices wait for each other in every step: the seconds of all processes for them are about the same."""
    spent = [(reading - old[0], host - old[1]) for (reading, host), old in zip(now, before, strict=False)]
    if len(spent) < 2:
        return ""
    totals = [sum(each) for each in spent]
    slowest = totals.index(max(totals))
    # The lower one of two: else the slowest of two processes were compared with itself.
    longer = totals[slowest] - statistics.median_low(totals)
    medians = [statistics.median_low(column) for column in zip(*spent, strict=True)]
    reading, host = (own - median for own, median in zip(spent[slowest], medians, strict=True))
    where = "reading its input" if reading > host else "on its host"
    return f", process {slowest} slowest: {longer:.2g} s longer {where}"
