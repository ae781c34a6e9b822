"""`StepGuard`: what to do about training steps that are not made."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from estimator.core._state import State


class StepGuard(Protocol):
    """Counts the steps that leave variables and slots as they are, and says what follows from one.

    The model_fn's run puts it into its frame; those who run the compiled steps call it around them.
    """

    def before_step(self, state: State) -> State:
        """The state that a single step starts from."""

    def after_step(self, state: State) -> None:
        """Raises an error if the step was not made and training is to end; waits for the step only then."""

    def watch(self, state: State) -> StepWatch:
        """Begins a training run of many steps."""


class StepWatch(Protocol):
    """A training run under a guard.

    Attributes:
      state: where the run starts.
    """

    state: State

    def look(self, state: Any, skipped: np.ndarray) -> None:
        """Logs the steps that were not made, or raises an error.

        Args:
          state: the newest state, or what has its `slots` and `variables`.
          skipped: of the steps since the last look, whether each was left out.
        """
