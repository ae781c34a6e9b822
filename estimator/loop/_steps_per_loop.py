"""The number of steps in one program of the training loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from estimator.core._hook import Hook
from estimator.core._run_config import seconds
from estimator.hooks._stop_at_step import StopAtStepHook
from estimator.loop._context import RunContext
from estimator.loop._plan import Bounds, Plan
from estimator.loop._programs import Programs
from estimator.runtime._jax_settings import debugging

_STEPS_TO_TIME = 20
_MOST_BATCHES_AT_ONCE, _SECONDS_AT_ONCE = 10, 0.005
# Of several processes, which agree on every chunk: that costs each of them up to 20 ms of CPU where the cores are busy.
_MOST_BATCHES_AT_ONCE_OF_SEVERAL, _SECONDS_AT_ONCE_OF_SEVERAL = 100, 0.25
# TensorFlow's interval of log lines. A NaN is noticed about as many steps late, with or without log lines.
_STEPS_BETWEEN_LOOKS = 100
SECONDS_OF_A_CHUNK = 1.0  # and between looks: a run shows that often where it is


def steps_between_looks(log_every: int | None) -> int:
    """The number of steps after which a run looks at its losses, for NaN, and to log them."""
    return min(log_every or _STEPS_BETWEEN_LOOKS, _STEPS_BETWEEN_LOOKS)


def choose(
    requested: int | str, programs: Programs, hooks: Sequence[Hook], context: RunContext, look_every: int
) -> LoopSize:
    """The meaning of `RunConfig(steps_per_loop=requested)` for a run that looks at losses every `look_every` steps.

    "auto" goes by the arithmetic of one step, not by the clock, so that a run that is repeated, or resumes from a
    checkpoint, has the same programs. Fewer steps than there is room for, as measured, run in the same program.
    """
    secs = seconds(requested)
    if isinstance(requested, int):
        steps = requested
    elif secs is not None:
        steps = 1
    else:
        steps = context.agreed(lambda: _automatic(programs, hooks, context.global_step, look_every))
    at_once = _MOST_BATCHES_AT_ONCE, _SECONDS_AT_ONCE
    if context.group.count > 1:
        at_once = _MOST_BATCHES_AT_ONCE_OF_SEVERAL, _SECONDS_AT_ONCE_OF_SEVERAL
    return LoopSize(programs, steps, secs, look_every, at_once, lambda: _working_seconds(context))


def _working_seconds(context: RunContext) -> float:
    """The seconds of a run so far, less what compiling, checkpoints and evaluations took."""
    seconds = context.stopwatch.read()
    return seconds["input"] + seconds["host"] + seconds["device"]


@dataclasses.dataclass(eq=False, repr=False)
class LoopSize:
    """The number of steps in a chunk and in its program; where a time per program is requested, the program follows
    from how long they take.

    A chunk takes at most about a second: the first step runs alone, and then their number doubles while they fit.

    Where steps run alone, the batches of short ones are still read several at once: to hand over a chunk from thread to
    thread takes some 30 us.
    """

    _programs: Programs
    steps: dataclasses.InitVar[int]
    _secs: float | None
    _look_every: int
    _at_once: tuple[int, float]  # batches, and seconds
    _clock: Callable[[], float]

    def __post_init__(self, steps: int) -> None:
        self._looked: tuple[int, float] | None = None
        self._begin: tuple[int, float] | None = None
        self._fit = 1  # steps in the time of a chunk
        self._batches_at_once = 1
        self._programs.steps_per_program = steps
        self._programs.loops = self._programs.info.is_one_program and (steps > 1 or self._secs is not None)

    def bounds(self) -> Bounds:
        """The bounds of the next chunk."""
        room = self._programs.steps_per_program
        most = min(room, self._fit) if self._programs.loops else self._batches_at_once
        return Bounds(most, room, min(self._look_every, self._fit))

    def measure(self, step: int) -> None:
        """Measures how long steps take; called where all steps up to `step` are done."""
        now, room = self._clock(), self._programs.steps_per_program
        if self._looked is not None and step > self._looked[0]:
            # At most twice as many: the first batches may have been read while the first program was compiled.
            fit = int(max(self._secs or 0.0, SECONDS_OF_A_CHUNK) / _per_step(self._looked, (step, now)))
            self._fit = max(1, min(2 * self._fit, fit))
        self._looked = step, now
        if self._begin is not None and step - self._begin[0] >= max(_STEPS_TO_TIME, room):
            per_step = _per_step(self._begin, (step, now))
            if not self._programs.loops:
                most, secs = self._at_once
                most = min(most, self._programs.batches_that_fit)
                self._batches_at_once = max(1, min(most, int(secs / per_step)))
            elif self._secs is not None:
                fit = max(1, int(self._secs / per_step))
                # Each number of steps is compiled: so powers of two, and not for a little more or less.
                if not room <= fit < 2 * room:
                    self._programs.steps_per_program = 2 ** int(math.log2(fit))
                    # The next steps begin with a compilation, whose time must not count.
                    self._begin = self._looked = None
                    return
        if self._begin is None or step - self._begin[0] >= _STEPS_TO_TIME:
            self._begin = step, now


def _per_step(begin: tuple[int, float], end: tuple[int, float]) -> float:
    """The seconds of a step between two moments; more than 0, be the clock ever so coarse."""
    return max((end[1] - begin[1]) / (end[0] - begin[0]), 1e-9)


def _automatic(programs: Programs, hooks: Sequence[Hook], step: int, look_every: int) -> int:
    if not programs.info.is_one_program or debugging():
        return 1
    hooks = [hook for hook in hooks if not isinstance(hook, StopAtStepHook)]  # the end may be near, or far
    plan = Plan(hooks, step, None, lambda: Bounds(look_every))
    # Several, since the first may be short: a run that resumes begins within an interval of its hooks.
    chunks = [plan.next() for _ in range(4)]
    longest = max(chunk.steps for chunk in chunks if chunk is not None)
    if longest == 1:
        return 1
    # In about equal parts: where 30 steps fit, 100 are 4 programs of 25, and not 3 of 30 and one of 10.
    return max(1, longest // math.ceil(longest / programs.steps_that_fit))
