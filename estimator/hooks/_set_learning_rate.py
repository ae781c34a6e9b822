"""Learning rates set from outside during a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues

_Rates = Mapping[str, float]


class SetLearningRateHook(Hook):
    """Sets learning rates of optimizers under `optax.inject_hyperparams`, every N steps.

    A schedule within the program is better for what is known beforehand. This is for what comes from outside: a file, a
    notebook, a search. The rates hold from the step after, and are saved with the checkpoint of the step: a run that
    resumes from there is the same as one that was not interrupted. Nothing is compiled again, and nothing waits.

    A hook of your own sets a rate by `context.set_learning_rate(name, value)`.

    >>> rates = {"optimizer": 1e-3}  # to be changed during the run
    >>> hook = SetLearningRateHook(rates, every_n_steps=100)
    >>> hook = SetLearningRateHook(lambda step: {"optimizer": 0.1 if step < 1000 else 0.01})

    Args:
      rates: rates by their names in `est.learning_rates(state)`, read each time; or a function of the number of steps
        done that returns such a dict, or None to leave all as they are. Of several processes, process 0 decides.
      every_n_steps: they are set when the number of steps done is a multiple of it; the rates of a dict are also set
        when a run starts, at any step.

    Raises:
      TypeError: `rates`, or what it returns, is neither.
      ValueError: `every_n_steps` is not positive; what `est.set_learning_rate` raises.
    """

    def __init__(self, rates: _Rates | Callable[[int], _Rates | None], every_n_steps: int = 100) -> None:
        check_intervals("SetLearningRateHook", every_n_steps=every_n_steps)
        if not isinstance(rates, Mapping) and not callable(rates):
            raise TypeError(
                "SetLearningRateHook takes a dict of learning rates by name, or a function of the step that returns "
                f'one: `SetLearningRateHook({{"optimizer": 1e-3}})`; got {rates!r}.'
            )
        self._rates = rates
        self._every = every_n_steps

    def after_create_state(self, context: Context) -> None:
        # Rates from a checkpoint would otherwise hold until the next multiple of N.
        if isinstance(self._rates, Mapping) or context.global_step % self._every == 0:
            self._set(context)

    def next_step(self, step: int) -> int:
        return step + self._every - step % self._every

    def after_run(self, context: Context, values: RunValues) -> None:
        if context.global_step % self._every == 0:
            self._set(context)

    def get_state(self) -> Any:
        """None; but a hook that overrides this is called before the one that saves."""

    def _set(self, context: Context) -> None:
        step = context.global_step
        rates = self._rates if isinstance(self._rates, Mapping) else self._rates(step)
        if rates is not None and not isinstance(rates, Mapping):
            raise TypeError(
                f"The function given to SetLearningRateHook returned {rates!r} at step {step}. It returns a dict of "
                'learning rates by name, such as {"optimizer": 1e-3}, or None.'
            )
        # All processes use the rates of process 0: a function may read a clock or a file.
        for name, value in context.agreed(lambda: dict(rates or {})).items():
            context.set_learning_rate(name, value)
