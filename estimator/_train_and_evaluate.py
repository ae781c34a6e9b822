"""Training with evaluations, of the variables as they are in memory at the time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from estimator._early_stopping import EarlyStoppingHook, MetricHook
from estimator._estimator import Estimator
from estimator._evaluator import evaluate_checkpoints
from estimator._runs import check_eval_dir
from estimator._train_spec import EvalSpec, TrainSpec
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._model_dir import training_in
from estimator.core._argument_checks import check_steps
from estimator.core._hook import Context, Hook, RunValues
from estimator.hooks._checkpoint_saver import CheckpointSaverListener
from estimator.multihost._collective_call import run_on_chief
from estimator.multihost._preemption import SIGNALS, ends_by_signals
from estimator.multihost._tf_config import EVALUATOR, TRAINER, read_role
from estimator.summary._history import read_eval_metrics


def train_and_evaluate(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec | Sequence[EvalSpec] | Mapping[str, EvalSpec],
    eval_every_steps: int | None = None,
    *,
    role: str | None = None,
) -> tuple[dict[Any, Any], Any]:
    """Trains, evaluates during training and at its end, and exports; returns the last metrics and exports.

    It is one call of `train`: evaluations do not restart the input. These read the variables in memory,
    after one compilation, and no checkpoint. As in TensorFlow, there is one after each checkpoint (`RunConfig` says
    when these are saved), but for the first; or, where `eval_every_steps` is given, at its multiples in
    global steps, so that an interrupted run resumes with the same ones. The state at the end is always evaluated, and
    saved. If `max_steps` was reached before, the newest checkpoint is evaluated and exported.

    An early stopping hook among the `hooks` of the TrainSpec looks at the metrics right after each evaluation.

    With an evaluator, training does not wait for evaluations. It is a process of its own, which makes the same call,
    with `role="evaluator"`, on the same model_dir, while the others have `role="trainer"` and evaluate nothing. It
    evaluates each checkpoint, the first included, oldest first, exports, and returns when training has ended: at
    `max_steps`, or when a training run has ended in another way, but not by a signal or an error. Checkpoints that
    training removes before their turn are left out. Started again, it continues where it was. Early stopping hooks of
    the trainers read its results every `run_every_secs` or `run_every_steps`. Several evaluators share the EvalSpecs,
    one at a time for each; in a store, which has no locks, give each evaluator its own EvalSpecs.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     train_op = est.Optimizer(optax.sgd(0.1)).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> x = np.array([[1.0], [2.0]], np.float32)
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp())
    >>> metrics, exports = est.train_and_evaluate(
    ...     estimator,
    ...     est.TrainSpec(lambda: [(x, 3 * x)] * 50, max_steps=50),
    ...     est.EvalSpec(lambda: [(x, 3 * x)]),
    ...     eval_every_steps=20,
    ... )
    >>> f"{metrics['loss']:.3f}", metrics["global_step"], exports
    ('0.000', 50, [])
    >>> list(est.read_eval_metrics(estimator.eval_dir()))
    [20, 40, 50]

    Args:
      estimator: what to train and evaluate.
      train_spec: how to train.
      eval_spec: how to evaluate; or several, in a list or by name, each with its own name.
      eval_every_steps: at which multiples of global steps to evaluate; an EvalSpec may say otherwise for itself.
        If None, at checkpoints.
      role: "evaluator" or "trainer", as above. If None, as TF_CONFIG says if its task is an evaluator or its cluster
        has one; otherwise this call does both. A process whose task is the evaluator is one, also with "trainer".

    Returns:
      What `evaluate` returns for the last state, and the list of what its exporters returned: the path of an export, of
      a `BestExporter` the best one's. Given several EvalSpecs, both are dicts of these by the name of the EvalSpec.
      `({}, [])` in a trainer.

    Raises:
      TypeError: an argument is of another kind.
      ValueError: `eval_every_steps` is not positive, names are given twice, there is no EvalSpec, or one that an early
        stopping hook could read; nothing saves checkpoints and `eval_every_steps` is not given; there is no training
        batch and there is no checkpoint; `role` is another word; with a role, `eval_every_steps` is given, or a hook
        has `restore_best`, or the evaluator has several processes. And what `train` and `evaluate` raise.
    """
    if not isinstance(estimator, Estimator):
        raise TypeError(f"`estimator` must have type `est.Estimator`, given: {estimator!r}.")
    if not isinstance(train_spec, TrainSpec):
        raise TypeError(f"`train_spec` must have type `est.TrainSpec`, given: {train_spec!r}.")
    specs = _by_name(eval_spec)
    check_steps("train_and_evaluate", eval_every_steps=eval_every_steps)
    for name in specs:
        check_eval_dir(estimator.model_dir, name)
    stoppers = [hook for hook in train_spec.hooks if isinstance(hook, EarlyStoppingHook)]
    _connect(estimator, stoppers, list(specs))
    role = _choose_role(role)
    if role is not None:
        _check_for_evaluator(role, estimator, specs, eval_every_steps, stoppers)
    if role == TRAINER:
        hooks, listeners = train_spec.hooks, train_spec.saving_listeners
        estimator.train(train_spec.input_fn, hooks, max_steps=train_spec.max_steps, saving_listeners=listeners)
        return {}, []
    if role == EVALUATOR:
        return _arrange(evaluate_checkpoints(estimator, specs, train_spec.max_steps), eval_spec)
    evaluations = {
        name: _Evaluation(
            estimator, spec, name, spec.eval_every_steps or eval_every_steps, train_spec.max_steps, stoppers
        )
        for name, spec in specs.items()
    }
    # As in TensorFlow, an evaluation without its own interval follows each checkpoint.
    listeners = [_AtCheckpoints(each) for each in evaluations.values() if each.every_steps is None]
    # Several processes lock the directory in `train`, where an error of one is an error of all.
    alone = estimator.config.process_count == 1
    # Held beyond `train`: no other run may change the newest checkpoint before it is evaluated and exported.
    # Signals are handled before, as in `train`: one between two runs must not leave the lock.
    with ends_by_signals(), training_in(estimator.model_dir, is_chief=True) if alone else contextlib.nullcontext():
        estimator.train(
            train_spec.input_fn,
            # Evaluations first: early stopping, one of the user's hooks, reads the results of this step.
            hooks=[*evaluations.values(), *train_spec.hooks],
            max_steps=train_spec.max_steps,
            saving_listeners=[*train_spec.saving_listeners, *listeners],
        )
        path = estimator.latest_checkpoint()
        if path is None:
            raise ValueError(
                "`train_and_evaluate` got no batch from the input_fn of its TrainSpec, and there is no checkpoint in "
                f"{estimator.model_dir}: nothing to evaluate. Check that input_fn starts again at each call."
            )
        for each in evaluations.values():
            each.evaluate_newest()
        # `end` of the hook has done this already, unless an earlier run was killed right after its last step.
        if run_on_chief("restore_best", lambda: any([stopper.restore_best(path) for stopper in stoppers])):
            for each in evaluations.values():
                each.evaluate_newest(again=True)
        outcomes = {
            name: (each.metrics, each.export(lambda: path, is_final=True)) for name, each in evaluations.items()
        }
        return _arrange(outcomes, eval_spec)


def _arrange(outcomes: Mapping[str | None, tuple[Any, Any]], eval_spec: object) -> tuple[dict[Any, Any], Any]:
    """The metrics and the exports, each by the names of the EvalSpecs if there are several."""
    if isinstance(eval_spec, EvalSpec):
        return next(iter(outcomes.values()))
    metrics, exports = ({name: outcome[i] for name, outcome in outcomes.items()} for i in range(2))
    return metrics, exports


def _choose_role(role: str | None) -> str | None:
    if role not in (None, TRAINER, EVALUATOR):
        raise ValueError(
            f"`role` of train_and_evaluate must be {TRAINER!r}, {EVALUATOR!r}, or None to train and evaluate in one "
            f"process; given: {role!r}."
        )
    detected = read_role(os.environ.get("TF_CONFIG"))
    # A script gives all its processes one role; TF_CONFIG, which Kubeflow's TFJob writes, names only the evaluator.
    return EVALUATOR if detected == EVALUATOR else role or detected


def _check_for_evaluator(
    role: str,
    estimator: Estimator,
    specs: Mapping[str | None, EvalSpec],
    eval_every_steps: int | None,
    stoppers: Sequence[EarlyStoppingHook],
) -> None:
    """Checks what cannot be if an evaluator reads checkpoints."""
    every = [eval_every_steps, *(spec.eval_every_steps for spec in specs.values())]
    for steps in filter(None, every):
        raise ValueError(
            "`eval_every_steps` is for evaluations of the variables in memory, but an evaluator reads checkpoints; "
            f"given: {steps} with role={role!r}. Leave it out, and write RunConfig(save_checkpoints_steps={steps})."
        )
    if best := [hook.caller for hook in stoppers if hook.restores_best]:
        raise ValueError(
            f"{best[0]} has restore_best=True, for which training has to wait for each evaluation; given with "
            f"role={role!r}. Leave it out, and take the best model from an `est.BestExporter`."
        )
    if role == EVALUATOR and estimator.config.process_count > 1:
        raise ValueError(
            f"An evaluator is one process, but jax has connected {estimator.config.process_count}. Start it by itself, "
            "and leave `initialize_distributed` out there."
        )


@dataclasses.dataclass(eq=False, repr=False)
class _Evaluation(Hook):
    """The evaluations of one EvalSpec.

    Args:
      every_steps: at which multiples of steps to evaluate; if None, `_AtCheckpoints` says when.
      max_steps: the step that is evaluated at the end.
      stoppers: are called after every evaluation.
    """

    _estimator: Estimator
    _spec: EvalSpec
    _name: str | None
    every_steps: int | None
    _max_steps: int | None
    _stoppers: Sequence[EarlyStoppingHook]

    def __post_init__(self) -> None:
        self._started: float | None = None  # when the last evaluation was
        self.metrics: dict[str, Any] = {}  # of the last evaluation
        self._ended: Context | None = None  # of the training run, once it has ended

    def after_create_state(self, context: Context) -> None:
        """Repeats an evaluation that was interrupted by a crash, since early stopping counts evaluations."""
        step = context.global_step
        due = step > 0 and (self.every_steps is None or step % self.every_steps == 0)
        if self._stoppers and due:
            directory = self._estimator.eval_dir(self._name)
            if context.agreed(lambda: step not in read_eval_metrics(directory)):
                self._evaluate(context)

    def next_step(self, step: int) -> int | None:
        return None if self.every_steps is None else step + self.every_steps - step % self.every_steps

    def after_run(self, context: Context, values: RunValues) -> None:
        self.evaluate_if_due(context)

    def evaluate_if_due(self, context: Context) -> None:
        """Evaluates, exports and lets hooks stop the run; not for the last state, which has its turn later."""
        if context.phase == "end" or context.global_step == self._max_steps:
            return
        # Each process has its own clock, and all of them evaluate or none.
        if context.agreed(self._is_too_early):
            logging.info("Skip the evaluation at step %d due to throttle secs.", context.global_step)
            return
        self._evaluate(context)
        if self._is_of(context):
            self.export(context.save, is_final=False)
            for stopper in self._stoppers:
                stopper.after_evaluation(context)

    def _is_too_early(self) -> bool:
        return self._started is not None and time.monotonic() < self._started + self._spec.throttle_secs

    def end(self, context: Context) -> None:
        if context.error is None and context.stop_reason not in SIGNALS:
            # Also where no hook saves checkpoints: what comes after the run reads the last state from one.
            context.save()
            if not self._is_of(context):
                self._evaluate(context)
            for stopper in self._stoppers:
                stopper.after_evaluation(context)
            self._ended = context

    def evaluate_newest(self, again: bool = False) -> None:
        """Evaluates the newest checkpoint, unless its state was the last one evaluated."""
        if again or self._ended is None or self._ended.restored or not self._is_of(self._ended):
            spec = self._spec
            self.metrics = self._estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name=self._name_of_newest())

    def _name_of_newest(self) -> str | None:
        """The name under which the newest checkpoint is evaluated: where its values were replaced by better ones of an
        earlier step, another one, since under the usual one this step has the evaluation that training led to."""

        def is_restored() -> bool:
            path = self._estimator.latest_checkpoint()
            return path is not None and Checkpoint(path).restored_from is not None

        # By process 0 for all, since the name is a part of the call that they make together.
        if not run_on_chief("evaluate the newest checkpoint", is_restored):
            return self._name
        return f"{self._name}_restored" if self._name else "restored"

    def _evaluate(self, context: Context) -> None:
        # First: reading the state looks at the losses so far, and so may find the NaN.
        state = context.state
        if context.found_nan:
            return  # nothing of it will be saved
        spec, self._started = self._spec, time.monotonic()
        name = self._name if context.batches else self._name_of_newest()
        with context.evaluating():
            self.metrics = self._estimator.evaluate_state(state, spec.input_fn, spec.steps, spec.hooks, name)

    def _is_of(self, context: Context) -> bool:
        """Returns whether the last evaluation was of the present state."""
        return self.metrics.get("global_step") == context.global_step and not context.found_nan

    def export(self, save: Callable[[], str | None], is_final: bool) -> list[str | None]:
        base = os.path.join(self._estimator.model_dir, "export")
        exporters = [(each, os.path.join(base, each.name)) for each in self._spec.exporters]
        if not exporters:
            return []
        # Asked before a checkpoint is written, which is not needed if no exporter exports this state.
        wanting = run_on_chief("wants", lambda: [each.wants(path, self.metrics, is_final) for each, path in exporters])
        checkpoint = save() if any(wanting) else None
        return run_on_chief(
            "export",
            lambda: [
                each.export(self._estimator, path, checkpoint, self.metrics, is_final) for each, path in exporters
            ],
        )


class _AtCheckpoints(CheckpointSaverListener):
    """Evaluates after each checkpoint but the first, which is saved at the start."""

    def __init__(self, evaluation: _Evaluation) -> None:
        self._evaluation = evaluation

    def begin(self) -> None:
        self._is_first = True

    def after_save(self, context: Context, step: int) -> None:
        # As in TensorFlow: the first checkpoint is of a state that this run has not trained.
        if not self._is_first:
            self._evaluation.evaluate_if_due(context)
        self._is_first = False


def _by_name(eval_spec: object) -> dict[str | None, EvalSpec]:
    """The EvalSpecs by their names, which differ."""
    if isinstance(eval_spec, Mapping):
        named = list(eval_spec.items())
    else:
        several = [eval_spec] if isinstance(eval_spec, EvalSpec) or not isinstance(eval_spec, Sequence) else eval_spec
        named = [(getattr(spec, "name", None), spec) for spec in several]
    for name, spec in named:
        if not isinstance(spec, EvalSpec) or not isinstance(name, str | None):
            raise TypeError(
                "`eval_spec` must have type `est.EvalSpec`, or be a list of these, or a dict of them by name; "
                f"given: {eval_spec!r}."
            )
        if spec.name not in (None, name):
            raise ValueError(f"An EvalSpec has name={spec.name!r}, but is called {name!r} in the dict `eval_spec`.")
    names = [name for name, _ in named]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`eval_spec` must hold at least one EvalSpec, each with its own `name`; given: {names}.")
    # Their names are folders in <model_dir>/export, which all EvalSpecs share.
    exporters = [exporter.name for _, spec in named for exporter in spec.exporters]
    if len(set(exporters)) < len(exporters):
        raise ValueError(f"`exporters` must have unique names, in all EvalSpecs together; given: {exporters}.")
    return dict(named)


def _connect(estimator: Estimator, stoppers: Sequence[EarlyStoppingHook], names: list[str | None]) -> None:
    """Sets which evaluations the hooks read, where the user has not."""
    by_metric = [hook for hook in stoppers if isinstance(hook, MetricHook)]
    for hook in by_metric:
        if hook.eval_dir is None and len(names) > 1 and None not in names:
            raise ValueError(
                f"{hook.caller} reads the evaluations of the EvalSpec without a name, but the ones of "
                f"`train_and_evaluate` are called {names}. Give it eval_dir=estimator.eval_dir({names[0]!r}), say."
            )
        # Of several EvalSpecs the one without a name. Where all have names, the check above wants an `eval_dir`.
        hook.connected_dir = estimator.eval_dir(names[0] if len(names) == 1 else None)
    if sum(hook.restores_best for hook in by_metric) > 1:
        raise ValueError("Several early stopping hooks have restore_best=True. Only one of them can say which is best.")
