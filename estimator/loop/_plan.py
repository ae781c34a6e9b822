"""Cuts a run into programs so that none passes a step at which a hook is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from estimator.core._hook import Hook


class Bounds(NamedTuple):
    """Bounds of a chunk.

    Attributes:
      most: the number of steps that it may have.
      room: the number of steps for which its program has room.
      look_every: the number of steps after which a run looks at its losses.
    """

    most: int
    room: int = 1
    look_every: int = 1


class Chunk(NamedTuple):
    """Steps that are run together.

    Attributes:
      steps: their number.
      due: the hooks to call after the last of them.
      alone: whether it is one step, in a program of its own.
      reports: whether hooks may read values of the last step.
      room: as in its `Bounds`.
      look_every: as in its `Bounds`.
    """

    steps: int
    due: tuple[Hook, ...]
    alone: bool
    reports: bool
    room: int
    look_every: int


class Plan:
    """Cuts a run into chunks of steps, so that no hook's moment lies within one.

    Args:
      hooks: in the order in which they are called.
      step: the number of steps that are done.
      last_step: where the run ends; if None, with its input.
      bounds: of the next chunk.
    """

    def __init__(self, hooks: Sequence[Hook], step: int, last_step: int | None, bounds: Callable[[], Bounds]) -> None:
        self.hooks = hooks
        self._asking = {i for i, hook in enumerate(hooks) if type(hook).before_run is not Hook.before_run}
        self._alone = {i for i in self._asking if not hooks[i].before_run_may_be_early}
        self._next: list[int | None] = [None] * len(hooks)
        self._step = step
        self._last_step = last_step
        self._bounds = bounds

    def next(self) -> Chunk | None:
        """The next chunk; None if the run ends."""
        start, end = self._step, self._last_step
        if start == end:
            return None
        for i, known in enumerate(self._next):
            # A step that a hook has named stands until it comes. After None it is asked again: it may go by the clock.
            if known is None or known <= start:
                self._next[i] = known = self._ask(self.hooks[i], start)
            if known is not None and (end is None or known < end):
                end = known
        most, *of_program = self._bounds()
        self._step = start + most
        if end is None or self._step < end:
            return Chunk(most, (), False, False, *of_program)
        due = [i for i, known in enumerate(self._next) if known == end]
        alone = not self._alone.isdisjoint(due)
        # The last step is left to the next chunk, so that `before_run` is called right before it and not steps early.
        if alone and end - start > 1:
            self._step = end - 1
            return Chunk(end - 1 - start, (), False, False, *of_program)
        self._step = end
        reports = not self._asking.isdisjoint(due)
        return Chunk(end - start, tuple([self.hooks[i] for i in due]), alone, reports, *of_program)

    def _ask(self, hook: Hook, start: int) -> int | None:
        wanted = hook.next_step(start)
        if wanted is not None and wanted <= start:
            raise ValueError(
                f"{hook!r}.next_step({start}) returned {wanted!r}, which has passed already. Return a later step "
                "or None."
            )
        return wanted
