"""Hooks that end a training run early, by the results of its evaluations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import logging

from estimator._estimator import Estimator
from estimator._runs import eval_dir
from estimator.checkpoint._checkpoint import Checkpoint, name_of
from estimator.checkpoint._checkpoints import take_values
from estimator.checkpoint._model_dir import list_sound
from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.hooks._timer import SecondOrStepTimer
from estimator.multihost._preemption import SIGNALS
from estimator.storage._files import exists
from estimator.summary._history import HISTORY, read_history

History = list[tuple[int, float]]  # steps and values of a metric
_VERBS = {1: "decrease", -1: "increase"}  # what is good, by the sign of a rule


class Rule(NamedTuple):
    """A condition on the evaluations of a metric that ends training: a value beyond a threshold, or no value that is
    better, by `min_delta`, for some steps or evaluations."""

    metric: str
    sign: int = 1  # -1 if large values are good
    threshold: float | None = None
    max_steps: int | None = None
    max_evals: int | None = None
    min_delta: float = 0.0

    def check_patience(self, caller: str) -> Rule:
        verb = _VERBS[self.sign]
        if self.max_steps is None and self.max_evals is None:
            raise ValueError(f"{caller} needs max_steps_without_{verb} or max_evals_without_{verb}; got None for both.")
        for unit, limit in (("steps", self.max_steps), ("evals", self.max_evals)):
            if limit is not None and limit <= 0:
                raise ValueError(f"Must specify max_{unit}_without_{verb} > 0 for {caller}, given: {limit!r}.")
        if not self.min_delta >= 0:  # NaN is refused, too
            raise ValueError(f"Must specify min_delta >= 0 for {caller}, given: {self.min_delta!r}.")
        return self

    def find_reason(self, history: History) -> str | None:
        """Finds the reason why to stop; None if there is none."""
        # While all values are NaN, steps are counted from the first evaluation.
        best, best_step, evals = math.nan, history[0][0] if history else 0, 0
        for step, value in history:
            if self.threshold is not None and self.sign * value < self.sign * self.threshold:
                side = "lower" if self.sign > 0 else "higher"
                return f"was {value:.6g}, {side} than {self.threshold}, at step {step}."
            # Comparisons with NaN are false, so that the first number needs its own condition.
            first = math.isnan(best) and not math.isnan(value)
            if first or self.sign * value < self.sign * best - self.min_delta:
                best, best_step, evals = value, step, 0
            else:
                evals += 1
            steps = step - best_step
            if steps >= (self.max_steps or math.inf) or evals >= (self.max_evals or math.inf):
                past = f"{evals} evaluations and {steps} steps; it was {best:.6g} at step {best_step}."
                return f"had no {_VERBS[self.sign]} in {past}"
        return None


class EarlyStoppingHook(Hook):
    """Ends a training run when a function says so; `est.make_early_stopping_hook` makes it.

    Attributes:
      stop_reason: of a run that it has ended.
    """

    stop_reason = "early stopping"
    restores_best = False

    def __init__(
        self,
        caller: str,
        should_stop_fn: Callable[[], object],
        run_every_secs: float | None,
        run_every_steps: int | None,
    ) -> None:
        if not callable(should_stop_fn):
            raise TypeError(f"`should_stop_fn` of {caller} must be callable, given: {should_stop_fn!r}.")
        # Steps come first, since seconds have a default.
        secs = run_every_secs if run_every_steps is None else None
        check_intervals(caller, run_every_secs=secs, run_every_steps=run_every_steps)
        self.caller = caller
        self._should_stop_fn = should_stop_fn
        self._timer = SecondOrStepTimer(secs, run_every_steps)

    def begin(self) -> None:
        # One hook may be passed to several runs, and each looks after its first step.
        self._timer.reset()

    def next_step(self, step: int) -> int | None:
        return self._timer.next_step(step)

    def after_run(self, context: Context, values: RunValues) -> None:
        # Each process has its own clock: process 0 decides for all.
        if context.agreed(lambda: self._timer.should_trigger_for_step(context.global_step)):
            self._timer.update_last_triggered_step(context.global_step)
            self._look(context)

    def after_evaluation(self, context: Context) -> None:
        """Called by `train_and_evaluate`, when the state now has been evaluated."""
        self._look(context)

    def restore_best(self, path: str) -> bool:
        """Gives the newest checkpoint the best values, if the hook knows of some that were better; says whether."""
        return False

    def _look(self, context: Context) -> None:
        # All processes call `agreed`, or none: `stop_requested` is set in all of them at the same point of the run.
        if not context.stop_requested and context.agreed(self._should_stop_fn):
            logging.info("Early stopping at step %d.", context.global_step)
            context.request_stop(self.stop_reason)


class MetricHook(EarlyStoppingHook):
    """An early stopping hook that goes by the recorded values of one metric.

    Evaluations recorded before this run, of later steps than the one that it resumes from, do not count: they are
    from a run that was killed, and are repeated.

    Args:
      model_dir: of the Estimator that it is for; if None, of the one that trains.
      rule: says why to stop.
      restores_best: whether the last state will be the best one.

    Attributes:
      eval_dir: where the evaluations are recorded, if the user has said so.
      connected_dir: where they are otherwise, in the `train_and_evaluate` that runs.
    """

    def __init__(
        self,
        caller: str,
        model_dir: str | None,
        rule: Rule,
        eval_dir: str | os.PathLike[str] | None,
        min_steps: int,
        run_every_secs: float | None,
        run_every_steps: int | None,
        restores_best: bool = False,
    ) -> None:
        super().__init__(caller, self._should_stop, run_every_secs, run_every_steps)
        if not isinstance(rule.metric, str):
            raise TypeError(f"`metric_name` of {caller} must be a string, given: {rule.metric!r}.")
        if min_steps < 0:
            raise ValueError(f"Must specify min_steps >= 0 for {caller}, given: {min_steps!r}.")
        self.eval_dir = None if eval_dir is None else os.fspath(eval_dir)
        self.connected_dir: str | None = None
        self.restores_best = restores_best
        self._rule = rule
        self._min_steps = min_steps
        self._model_dir = model_dir
        # The times of the rows that do not count, by step: before a run, or where `train` makes no step, all count.
        self._lost: dict[int, float] = {}
        self._reported: set[int] = set()

    def after_create_state(self, context: Context) -> None:
        self._model_dir = self._model_dir or context.model_dir
        if context.model_dir != self._model_dir:
            raise ValueError(
                f"{self.caller} was made for the Estimator of {self._model_dir}, "
                f"but trains the one of {context.model_dir}."
            )
        # A run that was killed after its last checkpoint may have evaluated steps that this run repeats: their rows are
        # of a state that does not exist any more, until they are written again. Another process may write them, on a
        # host whose clock differs, so times are only compared for equality.
        self._lost = {row["step"]: row["time"] for row in self._rows() if row["step"] > context.global_step}
        # A resumed run may have to stop at once, because of evaluations of the run before.
        self._look(context)

    def end(self, context: Context) -> None:
        if context.error is None and not self._rows():
            logging.warning(
                "%s has seen no evaluation in %s, and stops nothing. `est.train_and_evaluate` makes evaluations, and "
                "so does an `est.InMemoryEvaluatorHook`; for one with a name give `eval_dir=estimator.eval_dir(name)`.",
                self.caller,
                self._dir(),
            )
        # After a signal another run continues, from its last state.
        if context.error is None and context.stop_reason not in SIGNALS and self.restores_best:
            path = context.save()
            if path is not None and context.agreed(lambda: self.restore_best(path)):
                context.note_restored()

    def restore_best(self, path: str) -> bool:
        if not self.restores_best:
            return False
        last = Checkpoint(path).named_step
        values = dict(self._history(last))
        best = self._best_step(values)
        # If the last state is as good as the best, it is kept, since it was trained longer.
        if best is None or values.get(last) == values[best] or Checkpoint(path).restored_from == best:
            return False
        source = Checkpoint(os.path.join(str(self._model_dir), name_of(best)))
        if last not in values or source not in list_sound(str(self._model_dir)):
            logging.warning(
                "%s restores nothing: the best evaluation is of step %d, but %s. It has to look right after each "
                "evaluation, also the last state's: use `train_and_evaluate`.",
                self.caller,
                best,
                "its state was not saved" if last in values else f"the last state, of step {last}, was not evaluated",
            )
            return False
        logging.info("Restoring the variables of step %d, the best by %r.", best, self._rule.metric)
        logging.warning(
            "The optimizers' slots go back to step %d as well, and Adam's count and schedules of optax in them; "
            "global_step stays %d, and so do schedules that read it.",
            best,
            last,
        )
        take_values(path, source.path)
        return True

    def _look(self, context: Context) -> None:
        super()._look(context)
        if self.restores_best and context.agreed(lambda: self._best_step(dict(self._history())) == context.global_step):
            path = context.save()  # a later run resumes from here, or later, so it needs no other
            context.agreed(lambda: self._pin(path))

    def _pin(self, path: str | None) -> None:
        for each in list_sound(str(self._model_dir)):
            if each.path == path:
                each.pin()
            elif each.is_pinned():
                each.unpin()

    def _should_stop(self) -> bool:
        reason = self._find_reason(self._history())
        if reason is not None:
            logging.info("%s: %r %s", self.caller, self._rule.metric, reason)
        return reason is not None

    def _find_reason(self, history: History) -> str | None:
        return self._rule.find_reason(history)

    def _best_step(self, values: dict[int, float]) -> int | None:
        numbers = [step for step, value in values.items() if not math.isnan(value)]
        # The earliest of equal values.
        return min(numbers, key=lambda step: (self._rule.sign * values[step], step), default=None)

    def _history(self, last_step: float = math.inf) -> History:
        """The values up to a step, by step."""
        name = self._rule.metric
        valid = [row for row in self._rows() if self._lost.get(row["step"]) != row["time"]]
        rows = [row for row in valid if self._min_steps <= row["step"] <= last_step]
        if rows and name not in rows[-1]:
            raise ValueError(
                f"{self.caller} got metric_name={name!r}, but the evaluation of step {rows[-1]['step']} "
                f"in {self._dir()} has {sorted(rows[-1].keys() - {'step', 'time'})}. Name one of these."
            )
        history = [(row["step"], row[name]) for row in rows if name in row]
        for step, value in history:
            if math.isnan(value) and step not in self._reported:
                self._reported.add(step)
                logging.warning("%s: %r is NaN at step %d, no improvement.", self.caller, name, step)
        return history

    def _rows(self) -> list[dict[str, Any]]:
        return read_history(self._dir()) if exists(os.path.join(self._dir(), HISTORY)) else []

    def _dir(self) -> str:
        return self.eval_dir or self.connected_dir or eval_dir(str(self._model_dir), None)


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], object],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> Hook:
    """A hook that ends the training run when a function says so.

    The function is called after the first step and then every N seconds or steps; in `train_and_evaluate` also right
    after every evaluation. The checkpoint, the evaluation and the exports of the end are made as usual.

    >>> import estimator as est
    >>> estimator = est.Estimator(lambda features, mode: None, "/tmp/model")
    >>> def is_good():
    ...     evaluations = est.read_eval_metrics(estimator.eval_dir())
    ...     return any(metrics["accuracy"] > 0.9 for metrics in evaluations.values())
    >>> hook = est.make_early_stopping_hook(estimator, is_good, run_every_steps=100)

    Args:
      estimator: the one that is trained.
      should_stop_fn: function of nothing that says whether to stop.
      run_every_secs: every how many seconds to call it.
      run_every_steps: every how many steps to call it, instead of `run_every_secs`.

    Raises:
      TypeError: `estimator` is not an Estimator, or `should_stop_fn` not a function.
      ValueError: the two periods are both None, or one is not positive.
    """
    caller = "make_early_stopping_hook"
    _model_dir(caller, estimator)
    return EarlyStoppingHook(caller, should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> Hook:
    """A hook that ends the training run when a metric was above a threshold in any evaluation.

    >>> import estimator as est
    >>> estimator = est.Estimator(lambda features, mode: None, "/tmp/model")
    >>> hook = est.stop_if_higher_hook(estimator, "accuracy", 0.9)

    Args:
      estimator: the one that is trained, by `train_and_evaluate`, or with another hook that evaluates it.
      metric_name: what to look at; a name that the evaluations do not have is an error at the first of them.
      threshold: the value to exceed.
      eval_dir: where to read the evaluations. Default: as `train_and_evaluate` does, if it has one EvalSpec, else
        `estimator.eval_dir()`.
      min_steps: evaluations of earlier global steps do not count.
      run_every_secs: every how many seconds to look, besides at the start and after each evaluation by
        `train_and_evaluate`.
      run_every_steps: every how many steps to look, instead of `run_every_secs`.

    Raises:
      TypeError: `estimator` is not an Estimator, or `metric_name` not a string.
      ValueError: `min_steps` is negative, or there is no valid period.
    """
    caller, rule = "stop_if_higher_hook", Rule(metric_name, -1, threshold)
    return MetricHook(caller, _model_dir(caller, estimator), rule, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> Hook:
    """A hook that ends the training run when a metric was below a threshold in any evaluation.

    >>> import estimator as est
    >>> estimator = est.Estimator(lambda features, mode: None, "/tmp/model")
    >>> hook = est.stop_if_lower_hook(estimator, "loss", 0.1, min_steps=1000)

    Args and errors are as for `stop_if_higher_hook`.
    """
    caller, rule = "stop_if_lower_hook", Rule(metric_name, 1, threshold)
    return MetricHook(caller, _model_dir(caller, estimator), rule, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int | None = None,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
    *,
    max_evals_without_increase: int | None = None,
    min_delta: float = 0.0,
    restore_best: bool = False,
) -> Hook:
    """A hook that ends the training run when a metric does not increase any more.

    >>> import estimator as est
    >>> estimator = est.Estimator(lambda features, mode: None, "/tmp/model")
    >>> hook = est.stop_if_no_increase_hook(estimator, "accuracy", max_evals_without_increase=3, restore_best=True)

    Args and errors are as for `stop_if_no_decrease_hook`.
    """
    caller, args = "stop_if_no_increase_hook", (eval_dir, min_steps, run_every_secs, run_every_steps, restore_best)
    rule = Rule(metric_name, -1, None, max_steps_without_increase, max_evals_without_increase, min_delta)
    return MetricHook(caller, _model_dir(caller, estimator), rule.check_patience(caller), *args)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int | None = None,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
    *,
    max_evals_without_decrease: int | None = None,
    min_delta: float = 0.0,
    restore_best: bool = False,
) -> Hook:
    """A hook that ends the training run when a metric does not decrease any more.

    A run that is started again, after it was killed or had ended, resumes the count.

    With `restore_best`, a run that ends without an error or signal has the variables and optimizer slots of the best
    evaluation: the last checkpoint has these, and `evaluate`, `predict`, exports and later training start from them.
    The number of steps still counts all steps made, while counts in slots (Adam's, and schedules of optax) go back with
    them. Until then the best has a checkpoint, which is not removed. `train_and_evaluate` writes the evaluation of the
    restored state into `estimator.eval_dir("restored")`, of an EvalSpec with a name "<name>_restored", so that the
    curve of the evaluations keeps the one of the last state.

    >>> import estimator as est
    >>> estimator = est.Estimator(lambda features, mode: None, "/tmp/model")
    >>> hook = est.stop_if_no_decrease_hook(estimator, "loss", max_steps_without_decrease=500, min_delta=0.01)

    Args:
      estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps: as for `stop_if_higher_hook`.
      max_steps_without_decrease: stop at an evaluation that is N global steps later than the best one.
      max_evals_without_decrease: stop after N evaluations without a decrease. Give this, or the number of steps,
        or both: then the first one counts.
      min_delta: the least difference that counts as a decrease; NaN never does.
      restore_best: whether to end with the variables that had the lowest value, be it by less than `min_delta`.

    Raises:
      TypeError: `estimator` is not an Estimator, or `metric_name` not a string.
      ValueError: there is no limit, or one is not positive; `min_steps` or `min_delta` is negative; there is no valid
        period.
    """
    caller, args = "stop_if_no_decrease_hook", (eval_dir, min_steps, run_every_secs, run_every_steps, restore_best)
    rule = Rule(metric_name, 1, None, max_steps_without_decrease, max_evals_without_decrease, min_delta)
    return MetricHook(caller, _model_dir(caller, estimator), rule.check_patience(caller), *args)


def _model_dir(caller: str, estimator: object) -> str:
    """The model_dir of the Estimator that a hook is for."""
    if not isinstance(estimator, Estimator):
        raise TypeError(f"`estimator` of {caller} must have type `est.Estimator`, given: {estimator!r}.")
    return estimator.model_dir
