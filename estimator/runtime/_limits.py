"""`Limits`: how long a run of several processes may stay in a phase."""

from __future__ import annotations

import dataclasses
import math

_HALF_AN_HOUR = 1800.0
_ACTIONS = ("log", "end")
_SLOWEST_STEPS = 10.0  # a step may take as many times the slowest one before it


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that a run of several processes may stay in a phase, before all of them end with exit code 76.

    Processes work in step: where one hangs, the others wait for it in the same phase. When the limit of that phase has
    passed, each process logs what it does, for which other one it waits, and the stacks of its threads; then it ends,
    whatever it is in, and what has started the processes starts them again. A phase that is entered again, for the next
    batch, step or checkpoint, has all of its time again. `WatchdogHook` limits all phases alike, in one process too.

    >>> import estimator as est
    >>> est.RunConfig(limits=est.Limits(step=120, checkpoint=3600)).limits.step
    120

    Args:
      begin: of reading the checkpoint and making the state, and each hook's `begin` and `after_create_state`.
      input: of waiting for a batch, the first one too.
      compile: of compiling a program and running it for the first time.
      step: of a step, or of the steps of one program; ten times the slowest one so far, if that is longer.
      hook: of the hooks called before or after a step. Evaluations within them have these same phases.
      checkpoint: of writing a checkpoint.
      end: of the `end` of all hooks.

      action: what follows the report: "end", the end of all processes; "log", nothing.

    Each limit is a number of seconds, 1800 by default. If None, there is no limit.

    Raises:
      ValueError: one is not a positive number, or the action is unknown.
    """

    begin: float | None = _HALF_AN_HOUR
    input: float | None = _HALF_AN_HOUR
    compile: float | None = _HALF_AN_HOUR
    step: float | None = _HALF_AN_HOUR
    hook: float | None = _HALF_AN_HOUR
    checkpoint: float | None = _HALF_AN_HOUR
    end: float | None = _HALF_AN_HOUR
    action: str = "end"

    def __post_init__(self) -> None:
        for name, value in self._by_phase().items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ValueError(
                    f"`{name}` of Limits should be a positive number of seconds, or None for no limit; got {value!r}."
                )
        check_action("Limits", self.action)

    def secs(self, phase: str, slowest_step: float) -> float:
        """The limit of a phase, infinite if it has none.

        >>> Limits(step=60).secs("step", slowest_step=7.0)
        70.0
        """
        limit = getattr(self, phase, None)
        if limit is None:
            return math.inf
        return max(limit, _SLOWEST_STEPS * slowest_step) if phase == "step" else limit

    def shortest(self) -> float:
        """The shortest limit, infinite if there is none."""
        return min([value for value in self._by_phase().values() if value is not None], default=math.inf)

    def _by_phase(self) -> dict[str, float | None]:
        return {name: value for name, value in vars(self).items() if name != "action"}


def check_action(caller: str, action: str) -> None:
    if action not in _ACTIONS:
        raise ValueError(f"action of {caller} must be one of {list(_ACTIONS)}; got {action!r}.")
