"""A run of a model_fn that another model_fn makes, in parts that may run anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from estimator.core._batch import rows_of
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import Frame, current_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn, bind
from estimator.core._typing import Features, Forward, Gradients, Labels, PyTree, Variables
from estimator.optim._apply_updates import StepGradients
from estimator.steps._gradients import run_model_fn
from estimator.steps._run_result import RunResult


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """One call of a model_fn that maps another one.

    This runs a model_fn on two halves of the batch, which `jax.vmap` maps over one device, as if they were towers:

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def in_halves(model_fn):
    ...     def mapped(features, labels, mode, params=None, config=None):
    ...         run = ModelRun.begin("in_halves", model_fn, features, labels, mode, params, config)
    ...         if run.frame.initializing:
    ...             return run.call(run.batch)
    ...
    ...         def half(rows):
    ...             trains = run.frame.mode == "train"
    ...             result = run.on(rows, run.frame.fresh(), differentiate=trains, loss_scale=0.5)
    ...             summed, per_part = result.scale(0.5).split()
    ...             return (summed, result.gradients.by_slots), per_part
    ...
    ...         halves = jax.tree.map(lambda x: x.reshape(2, len(x) // 2, *x.shape[1:]), run.batch)
    ...         to_sum, per_part = jax.vmap(half)(halves)
    ...         summed, gradients = jax.tree.map(lambda x: x.sum(0), to_sum)
    ...         run.leave({}, gradients)
    ...         return per_part.merge(2).join(summed)
    ...
    ...     return mapped
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features) ** 2)
    ...     return est.EstimatorSpec(mode, w * features, loss, est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> model, x = est.transform(in_halves(model_fn)), jnp.arange(4.0)
    >>> state, spec = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(spec.loss, spec.predictions, state.variables["w"])
    3.5 [0. 1. 2. 3.] 0.3

    Attributes:
      call: runs the other model_fn on a batch or a part of one, `(features, labels)`, in the current frame.
      frame: of the run around it.
      batch: features and labels.
      rows: the number of examples in the batch.
    """

    call: Callable[[PyTree], EstimatorSpec]
    frame: Frame
    batch: PyTree
    rows: int

    @classmethod
    def begin(
        cls, caller: str, model_fn: ModelFn, features: Features, labels: Labels, mode: str, params: Any, config: Any
    ) -> ModelRun:
        """The run of `model_fn` with these arguments, of which it gets those that it declares.

        Args:
          caller: named in the error if no Estimator or `est.transform` runs it.

        Raises:
          RuntimeError: see `caller`.
          TypeError, ValueError: the mode or the model_fn is not one. The batch was checked by the run around this one.
        """
        frame, mode = current_frame(caller), ModeKeys(mode)
        bound = bind(model_fn, params, config)
        return cls(lambda batch: bound(*batch, mode), frame, (features, labels), rows_of(features, labels))

    def on(
        self,
        batch: PyTree,
        frame: Frame,
        *,
        differentiate: bool,
        loss_scale: float = 1.0,
        transform: Callable[[Forward], Forward] | None = None,
    ) -> RunResult:
        """Runs the model_fn on a part of the batch, in a frame like `frame`; for the others see `run_model_fn`."""
        return run_model_fn(
            self.call, frame, batch, differentiate=differentiate, loss_scale=loss_scale, transform=transform
        )

    def leave(
        self, written: Variables, gradients: dict[str, Gradients], marks: dict[str, jax.Array] | None = None
    ) -> None:
        """Leaves what all parts have found to the run around them: what they wrote, and the gradients of their updates.

        Args:
          written: the new values of variables, by name.
          gradients, marks: as in `StepGradients`. Losses of other updates are differentiated by the run around.
        """
        known = self.frame.notes.get(StepGradients)
        self.frame.writes.assigned.update(written)
        known.by_slots.update(gradients)
        known.marks.update(marks or {})
