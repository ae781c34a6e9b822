"""Cuts a run into programs so that none passes a step at which a hook is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from estimator.core._hook import Hook


class Chunk(NamedTuple):
    """Steps that are run together.

    Attributes:
      steps: their number.
      due: the hooks to call after the last of them.
      alone: whether it is one step, in a program of its own.
      reports: whether hooks may read values of the last step.
      most: the number of steps that there could have been.
    """

    steps: int
    due: tuple[Hook, ...]
    alone: bool
    reports: bool
    most: int


class Plan:
    """Cuts a run into chunks of steps, so that no hook's moment lies within one.

    Args:
      hooks: in the order in which they are called.
      step: the number of steps that are done.
      last_step: where the run ends; None: with its input.
      most: the number of steps that a chunk may have at most.
    """

    def __init__(self, hooks: Sequence[Hook], step: int, last_step: int | None, most: Callable[[], int]) -> None:
        self.hooks = hooks
        self._asks = [type(hook).before_run is not Hook.before_run for hook in hooks]
        self._alone = [self._asks[i] and not hook.before_run_may_be_early for i, hook in enumerate(hooks)]
        self._next: list[int | None] = [None] * len(hooks)
        self._step = step
        self._last_step = last_step
        self._most = most

    def next(self) -> Chunk | None:
        """The next chunk; None where the run ends."""
        start = self._step
        if start == self._last_step:
            return None
        for i, hook in enumerate(self.hooks):
            known = self._next[i]
            # A step that a hook has named stands until it comes. After None it is asked again: it may go by the clock.
            if known is None or known <= start:
                self._next[i] = wanted = hook.next_step(start)
                if wanted is not None and wanted <= start:
                    raise ValueError(
                        f"{hook!r}.next_step({start}) returned {wanted!r}, which is over by then. "
                        "Return a later step, or None."
                    )
        end = min((n for n in self._next if n is not None), default=None)
        if self._last_step is not None:
            end = self._last_step if end is None else min(end, self._last_step)
        due = [i for i, n in enumerate(self._next) if n is not None and n == end]
        alone = any(self._alone[i] for i in due)
        most = self._most()
        steps = most if end is None else min(most, end - start)
        # The last step is left to the next chunk, so that `before_run` is called right before it and not steps early.
        if alone and steps > 1 and start + steps == end:
            steps -= 1
        self._step = start + steps
        if self._step != end:
            return Chunk(steps, (), False, False, most)
        return Chunk(steps, tuple(self.hooks[i] for i in due), alone, any(self._asks[i] for i in due), most)
