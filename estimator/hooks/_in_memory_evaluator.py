"""Evaluations during a training run, without checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.multihost._preemption import SIGNALS


class InMemoryEvaluatorHook(Hook):
    """Evaluates the variables as they are: at the start of a training run, every N steps, and at its end.

    No checkpoint is written or read, and the evaluation is compiled once. TensorFlow's hook of this name keeps no
    results.

    >>> import estimator as est
    >>> estimator = est.Estimator(lambda features, labels, mode: None, model_dir="/tmp/model")
    >>> hook = InMemoryEvaluatorHook(estimator, lambda: [], every_n_iter=1000)
    >>> hook.results
    []

    Args:
      estimator: the Estimator that trains, or one with the same variables, for example of `est.add_metrics`.
      input_fn, steps, hooks, name: as for `Estimator.evaluate`.
      every_n_iter: how many steps lie between two evaluations, counted from the start of the run.

    Attributes:
      results: what the evaluations of the last run returned, in their order.

    Raises:
      ValueError: every_n_iter is not a positive int.
      TypeError: the estimator is not an `est.Estimator`, or input_fn is not a function.
    """

    def __init__(
        self,
        estimator: Any,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Iterable[Hook] | None = None,
        name: str | None = None,
        every_n_iter: int = 100,
    ) -> None:
        check_intervals("InMemoryEvaluatorHook", every_n_iter=every_n_iter)
        if not hasattr(estimator, "evaluate_state"):
            raise TypeError(f"InMemoryEvaluatorHook needs an `est.Estimator`; got {estimator!r}.")
        if not callable(input_fn):
            raise TypeError(f"`input_fn` of InMemoryEvaluatorHook must be callable; got {input_fn!r}.")
        self._estimator = estimator
        self._args = input_fn, steps, hooks if hooks is None else tuple(hooks), name
        self._every = every_n_iter
        self._start = 0
        self.results: list[dict[str, Any]] = []

    def after_create_state(self, context: Context) -> None:
        self._start = context.global_step
        self.results = []
        self._evaluate(context)

    def next_step(self, step: int) -> int:
        return self._start + self._every * ((step - self._start) // self._every + 1)

    def after_run(self, context: Context, values: RunValues) -> None:
        self._evaluate(context)

    def end(self, context: Context) -> None:
        # After a signal little time is left, which the last checkpoint needs.
        if context.error is None and context.stop_reason not in SIGNALS:
            # If the last step was evaluated already, its state is not evaluated again.
            if self.results[-1]["global_step"] != context.global_step:
                self._evaluate(context)

    def _evaluate(self, context: Context) -> None:
        with context.evaluating():
            self.results.append(self._estimator.evaluate_state(context.state, *self._args))
