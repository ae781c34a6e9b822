"""Log lines with the loss and the speed of a training run, and its progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl import logging


class TrainingLog:
    """Log lines every few steps, and, within `with`, a progress bar on stderr.

    Args:
      every: the number of steps from line to line; None: without lines.
      step: where the run starts.
      last_step: where it ends; None: with its input.
      shows_bar: whether there is a bar.

    Attributes:
      clock: the step and the time from which the next rate is taken; None before the first program was done.
      last_loss: the newest known loss, or None.
    """

    def __init__(self, every: int | None, step: int, last_step: int | None, shows_bar: bool) -> None:
        self.clock: tuple[int, float] | None = None
        self.last_loss: float | None = None
        self._every = every
        self._logged_step = step
        self._last_step = last_step
        self._shows_bar = shows_bar
        self._bar: Any = _bar(disable=True)

    def __enter__(self) -> TrainingLog:
        self._bar = _bar(total=self._last_step, initial=self._logged_step, unit="step", disable=not self._shows_bar)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def start_clock(self, step: int, losses: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Starts when the first program is done, which led to `step`, and logs its first step.

        The clock starts after it, since compiling is not part of the rate.
        """
        self.clock = step, time.monotonic()
        if (self._every or 1) > 1:  # else the first step is logged with the others, or not at all
            first = step - len(losses) + 1
            self._write([first], first, losses, scalars)

    def add(self, step: int, losses: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Logs the steps that are due among those that led to `step`, whose losses and other values these are."""
        self.last_loss = losses[-1]
        if not self._every or step - self._logged_step < self._every:
            return
        now = time.monotonic()
        since, start = self.clock or (step, now)
        speed = f" ({(step - since) / (now - start):.4g} steps/sec)" if step > since else ""
        self.clock = step, now
        due = range(self._logged_step + self._every, step + 1, self._every)  # some may lie within a program of several
        self._write(due, step - len(losses) + 1, losses, scalars, speed)
        self._logged_step = due[-1]

    def _write(
        self, due: Iterable[int], first: int, losses: np.ndarray, scalars: dict[str, np.ndarray], speed: str = ""
    ) -> None:
        with self._bar.external_write_mode():  # so that the line does not go into the bar
            for step in due:
                shown = "".join(f", {tag} = {of_steps[step - first]:.6g}" for tag, of_steps in scalars.items())
                logging.info("loss = %.6g, step = %d%s%s", losses[step - first], step, shown, speed)
        self._bar.set_postfix(loss=f"{losses[-1]:.4g}", refresh=False)


def _bar(**options: Any) -> Any:
    import tqdm

    return tqdm.tqdm(**options)
