"""Trials of Optuna that end early."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from estimator._early_stopping import History, MetricHook, Rule
from estimator.core._hook import Context
from estimator.runtime._extras import import_extra

if TYPE_CHECKING:
    import optuna


class OptunaPruningHook(MetricHook):
    """A hook that reports a metric of evaluations to an Optuna trial, and ends the run if the trial should be pruned.

    It reads the evaluations as early stopping does, right after each of `train_and_evaluate`. A run that is pruned ends
    in order: it saves its last state, its summaries are written, and hooks get their `end`. Then it raises
    `optuna.TrialPruned`, out of `train` or `train_and_evaluate`; there are no exports of the end. A later `train`
    resumes from that checkpoint.

    Several processes train one trial; it is in process 0, and the others give None.

    >>> import estimator as est, numpy as np, optax, optuna, tempfile
    >>> def model_fn(features, labels, mode, params):
    ...     loss = est.losses.mean_squared_error(labels, features @ est.get_variable("w", (1, 1)))
    ...     train_op = est.Optimizer(optax.sgd(params["rate"])).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> x = np.ones((4, 1), np.float32)
    >>> def objective(trial):
    ...     params = {"rate": trial.suggest_float("rate", 1e-3, 1e-1, log=True)}
    ...     estimator = est.Estimator(model_fn, tempfile.mkdtemp(), params=params)
    ...     hooks = [est.OptunaPruningHook(trial, "loss")]
    ...     train_spec = est.TrainSpec(lambda: [(x, x)] * 20, max_steps=20, hooks=hooks)
    ...     metrics, _ = est.train_and_evaluate(estimator, train_spec, est.EvalSpec(lambda: (x, x)), eval_every_steps=5)
    ...     return metrics["loss"]
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    >>> study.optimize(objective, n_trials=3)
    >>> [sorted(trial.intermediate_values) for trial in study.trials][0]
    [5, 10, 15, 20]

    Args:
      trial: the `optuna.Trial`.
      metric: the metric, or "loss"; the study's direction says whether it should be small.
      eval_dir, min_steps, run_every_secs, run_every_steps: as for `stop_if_higher_hook`.

    Raises:
      ImportError: optuna is not installed.
      TypeError: `metric` is not a string.
      ValueError: `min_steps` is negative, or there is no valid period; in a run: the evaluations have no such metric.
    """

    stop_reason = "pruned"

    def __init__(
        self,
        trial: optuna.Trial | None,
        metric: str,
        eval_dir: str | os.PathLike[str] | None = None,
        min_steps: int = 0,
        run_every_secs: float | None = 60,
        run_every_steps: int | None = None,
    ) -> None:
        import_extra("est.OptunaPruningHook", "optuna", "optuna")
        args = (eval_dir, min_steps, run_every_secs, run_every_steps)
        super().__init__("OptunaPruningHook", None, Rule(metric), *args)
        self._trial = trial
        self._known: set[int] = set()  # the steps that the trial knows

    def _find_reason(self, history: History) -> str | None:
        assert self._trial is not None  # in process 0, the one that calls this
        for step, value in history:
            if step not in self._known:
                self._known.add(step)
                self._trial.report(value, step)
        return "is worse than in other trials, says the pruner." if history and self._trial.should_prune() else None

    def end(self, context: Context) -> None:
        import optuna

        if context.error is not None:
            return
        if context.stop_reason == self.stop_reason:
            # Hooks that end after this one find an error: what they would save has to be on the disk before.
            context.save()
            raise optuna.TrialPruned(f"Pruned at step {context.global_step}.")
        # The evaluation of the last state: there is nothing left to prune.
        context.agreed(self._should_stop)
