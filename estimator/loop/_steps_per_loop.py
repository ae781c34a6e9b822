"""How many steps make one program of the training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from estimator.core._hook import Hook
from estimator.core._run_config import seconds
from estimator.hooks._stop_at_step import StopAtStepHook
from estimator.loop._context import RunContext
from estimator.loop._flops import debugging
from estimator.loop._plan import Plan
from estimator.loop._programs import Programs

_STEPS_TO_TIME = 20
_MOST_BATCHES_AT_ONCE, _SECONDS_AT_ONCE = 10, 0.005
_SECONDS_AT_ONCE_OF_SEVERAL = 0.05  # processes, which agree on every piece: that takes a millisecond


def choose(
    asked: int | str, programs: Programs, hooks: Sequence[Hook], context: RunContext, look_every: int
) -> LoopSize:
    """What `RunConfig(steps_per_loop=asked)` means for a run that begins and looks at losses so often.

    "auto" goes by the arithmetic of one step, not by the clock, so that a run that is repeated, or goes on from a
    checkpoint, has the same programs.
    """
    wanted = seconds(asked)
    if isinstance(asked, int):
        steps = asked
    elif wanted is not None:
        steps = 1
    else:
        steps = context.agreed(lambda: _automatic(programs, hooks, context.global_step, look_every))
    return LoopSize(
        programs, steps, wanted, _SECONDS_AT_ONCE if context.group.count == 1 else _SECONDS_AT_ONCE_OF_SEVERAL
    )


class LoopSize:
    """The number of steps in a program, which a time asked for makes follow from how long they take.

    Where steps run alone, the batches of short ones still come several at once: to hand over a piece from thread to
    thread takes some 30 us.
    """

    def __init__(self, programs: Programs, steps: int, wanted: float | None, at_once: float) -> None:
        self._programs = programs
        self._at_once = at_once  # seconds
        self._wanted = wanted
        self._begin: tuple[int, float] | None = None
        self._batches_at_once = 1
        programs.steps_per_program = steps
        programs.loops = programs.traits.is_one_program and (steps > 1 or wanted is not None)

    def most(self) -> int:
        """How many steps a piece may have."""
        return self._programs.steps_per_program if self._programs.loops else self._batches_at_once

    def timed(self, step: int) -> None:
        """To be called where all steps up to `step` are done."""
        now = time.monotonic()
        if self._begin is not None and step - self._begin[0] >= max(_STEPS_TO_TIME, self.most()):
            per_step = (now - self._begin[1]) / (step - self._begin[0])
            if not self._programs.loops:
                self._batches_at_once = max(1, min(_MOST_BATCHES_AT_ONCE, int(self._at_once / per_step)))
            elif self._wanted is not None:
                fit = max(1, int(self._wanted / per_step))
                # Compiled anew for each number of steps: so powers of two, and not for a little more or less.
                if not self.most() <= fit < 2 * self.most():
                    self._programs.steps_per_program = 2 ** int(math.log2(fit))
                    self._begin = None
                    return
        if self._begin is None or step - self._begin[0] >= _STEPS_TO_TIME:
            self._begin = step, now


def _automatic(programs: Programs, hooks: Sequence[Hook], step: int, look_every: int) -> int:
    if not programs.traits.is_one_program or debugging():
        return 1
    hooks = [hook for hook in hooks if not isinstance(hook, StopAtStepHook)]  # the end may be near, or far
    plan = Plan(hooks, step, None, lambda: look_every)
    pieces = [plan.next() for _ in range(4)]
    longest = max(piece.steps for piece in pieces if piece is not None)
    if longest == 1:
        return 1
    return max(1, longest // math.ceil(longest / programs.steps_that_fit))
