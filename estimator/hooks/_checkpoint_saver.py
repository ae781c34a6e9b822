"""Checkpoints saved during a training run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues, check_methods
from estimator.storage._files import make_absolute


class CheckpointSaverListener:
    """Code that runs around every checkpoint of a training run. Override the methods that you need."""

    def begin(self) -> None:
        """Called once, before there is a state."""

    def before_save(self, context: Context, step: int) -> None:
        """Called before the checkpoint of a step is written."""

    def after_save(self, context: Context, step: int) -> bool | None:
        """Called once it is on disk, before the next step. True ends the training run, except after the first
        checkpoint.

        Training waits for the checkpoint if a listener has this method, also with `save_checkpoints_async`.
        """

    def end(self, context: Context, step: int) -> None:
        """Called once, after the last checkpoint."""


class CheckpointSaverHook(Hook):
    """Saves a checkpoint at the start, every N steps or seconds, and at the end. `train` adds one where none is passed.

    Nothing is saved at the end of a run that failed, and nothing whose loss or variables are NaN.

    >>> hook = CheckpointSaverHook(save_steps=100)

    Args:
      checkpoint_dir: the model_dir of the Estimator, which may be left out.
      save_secs, save_steps: how often, counted from the start of the run. Give one of both.
      listeners: are called around every checkpoint.

    Raises:
      ValueError: not exactly one of `save_secs` and `save_steps` is given; in `train`: another directory.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_secs: float | None = None,
        save_steps: int | None = None,
        listeners: Iterable[CheckpointSaverListener] | None = None,
    ) -> None:
        check_intervals("CheckpointSaverHook", save_secs=save_secs, save_steps=save_steps)
        self._dir = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
        self._secs = save_secs
        self._steps = save_steps
        self._own_listeners = self.listeners = checked_listeners(listeners)
        self._start = 0
        self._time = 0.0
        self._announced_step: int | None = None  # of the last checkpoint that listeners know of

    def listen(self, listeners: Iterable[CheckpointSaverListener]) -> None:
        """Adds listeners for the next run."""
        self.listeners = (*self._own_listeners, *listeners)

    def begin(self) -> None:
        self._announced_step = None
        for listener in self.listeners:
            listener.begin()

    def after_create_state(self, context: Context) -> None:
        if self._dir is not None and make_absolute(self._dir) != make_absolute(str(context.model_dir)):
            raise ValueError(
                f"CheckpointSaverHook got checkpoint_dir={self._dir!r}, but the Estimator saves in "
                f"{context.model_dir!r}. Leave it out."
            )
        self._start = context.global_step
        self._time = time.monotonic()
        self._save(context)

    def next_step(self, step: int) -> int | None:
        if self._steps is not None:
            return self._start + self._steps * ((step - self._start) // self._steps + 1)
        # With `save_secs` no step is known in advance: the loop asks again for each program.
        return step + 1 if self._is_time() else None

    def after_run(self, context: Context, values: RunValues) -> None:
        if (self._steps is not None or context.agreed(self._is_time)) and self._save(context):
            context.request_stop("a checkpoint listener")

    def end(self, context: Context) -> None:
        if context.error is None and self._announced_step != context.global_step:
            self._save(context)
        for listener in self.listeners:
            listener.end(context, context.global_step)

    def _is_time(self) -> bool:
        return self._secs is not None and time.monotonic() >= self._time + self._secs

    def _save(self, context: Context) -> bool:
        """Saves, and says whether a listener wants the run to end."""
        step = context.global_step
        _ = context.state  # looks at the losses: listeners should hear only of what is saved
        if context.found_nan:
            return False
        for listener in self.listeners:
            listener.before_save(context, step)
        # What listeners do, such as an evaluation, belongs to the state of this step, not of a later one.
        inherited = CheckpointSaverListener.after_save
        context.save(
            wait=any(getattr(type(listener), "after_save", None) is not inherited for listener in self.listeners)
        )
        self._announced_step, self._time = step, time.monotonic()
        answers = [listener.after_save(context, step) for listener in self.listeners]
        return any(answer is True for answer in answers)


def checked_listeners(listeners: Iterable[CheckpointSaverListener] | None) -> tuple[CheckpointSaverListener, ...]:
    """Listeners as a tuple.

    Raises:
      TypeError: one is something else, or a run could not call one of its methods.
    """
    if listeners is None:
        return ()
    checked = tuple(listeners) if isinstance(listeners, Iterable) else None
    if checked is None or not all(isinstance(listener, CheckpointSaverListener) for listener in checked):
        raise TypeError(f"saving_listeners must be a list of CheckpointSaverListener, given: {listeners!r}.")
    for listener in checked:
        check_methods(CheckpointSaverListener, listener, "listener")
    return checked
