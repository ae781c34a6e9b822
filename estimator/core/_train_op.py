"""`TrainOp`: the updates that a model_fn asks of a training step; `StepReport`: what the step says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import optax

from estimator.core._frame import RunId
from estimator.core._state import State
from estimator.core._typing import Variables


class UpdatingOptimizer(Protocol):
    """The part of an `est.Optimizer` that a training step needs."""

    sums_over_towers: bool

    @property
    def transformation(self) -> optax.GradientTransformation: ...

    @property
    def loss_scale(self) -> Any: ...

    def get_name(self) -> str: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
    """One call of `minimize` or `apply_gradients`.

    Attributes:
      loss: scalar; None for `apply_gradients`.
      var_list: names of the variables to update.
      slots: name of this call's entry in `State.slots`, which no other call has.
      optimizer: whose transformation turns the gradients into updates.
      run: in which it was made.
      learning_rate: that the run has computed, and 1 (see `optim/_given_rate.py`); None if the optimizer knows it.
    """

    loss: jax.Array | None
    var_list: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    slots: str = dataclasses.field(metadata={"static": True})
    # Static, and equal only to itself: where runs make their own optimizers, their train_ops differ in structure.
    optimizer: UpdatingOptimizer = dataclasses.field(metadata={"static": True})
    run: RunId = dataclasses.field(default_factory=RunId, metadata={"static": True})
    learning_rate: jax.Array | None = None


class Move(Protocol):
    """Variables that change after all updates of a step; a pytree, whose arrays are summed over towers."""

    def apply(self, before: Variables, after: Variables) -> Variables:
        """The new values of what it moves, by name.

        Args:
          before: the variables at the start of the step.
          after: the variables after the updates of the step.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainOp:
    """The changes of variables that a model_fn asks of a training step.

    Attributes:
      updates: applied in this order.
      moves: applied after all updates.
      after: functions of the State after all that, which return it as the step leaves it (block synchronisation).
    """

    updates: tuple[Update, ...] = ()
    moves: tuple[Move, ...] = ()
    after: tuple[Callable[[State], State], ...] = dataclasses.field(default=(), metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepReport(TrainOp):
    """The train_op in the spec of a step that was made: it asks for nothing more, and says what became of the step.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features) ** 2)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.train.AdamOptimizer(0.5).minimize(loss))
    >>> model, x = est.transform(model_fn), jnp.ones(2)
    >>> _, spec = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(spec.train_op.learning_rates, spec.train_op.skipped)
    {'Adam': Array(0.5, dtype=float32)} None

    Attributes:
      skipped: bool scalar, whether variables and slots were left as they are; None if nobody has looked.
      learning_rates: the rates of the step, as `est.learning_rates` names them; scalars.
      gradient_norms: the norms that `est.clip_by_global_norm` has seen, by the names of the optimizers; scalars.
      optimizers: the number of optimizers of the step.
    """

    skipped: jax.Array | None = None
    learning_rates: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradient_norms: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizers: int = dataclasses.field(default=1, metadata={"static": True})

    def scalars(self) -> dict[str, Any]:
        """The values that logs and summaries show beside the loss, by tag: "learning_rate", or, in a step of several
        optimizers, "learning_rate/<name>"; "gradient_norm" likewise."""
        kinds = {"learning_rate": self.learning_rates, "gradient_norm": self.gradient_norms}
        return {
            kind if len(values) == self.optimizers == 1 else f"{kind}/{name}": value
            for kind, values in kinds.items()
            for name, value in values.items()
        }

    def copy_values(self) -> StepReport:
        """The report with copies of the values that are arrays of the state, which the next step may donate."""
        rates, norms = jax.tree.map(lambda x: x.copy(), (self.learning_rates, self.gradient_norms))
        return dataclasses.replace(self, learning_rates=rates, gradient_norms=norms)


class GradientsNeeded(BaseException):
    """Leaves a run at `compute_gradients`, with the loss whose gradients it needs (see `_gradients.py`).

    No `Exception`, so that a model_fn which catches those does not stop it.
    """

    def __init__(self, loss: jax.Array, var_list: tuple[str, ...], slots: str | None) -> None:
        super().__init__("`compute_gradients` was called in a frame that no runner watches over.")
        self.loss = loss
        self.var_list = var_list
        self.slots = slots  # where the loss scale is


def group(*train_ops: TrainOp) -> TrainOp:
    """One train_op that does what several do, in their order; `est.group()` is one that does nothing.

    A step with it is counted, and changes no variable but those that `est.assign` writes. It was `tf.no_op()`.

    >>> import estimator as est
    >>> est.group().updates
    ()
    """
    for train_op in train_ops:
        if not isinstance(train_op, TrainOp):
            raise TypeError(
                f"`est.group` takes what `minimize`, `apply_gradients`, `ExponentialMovingAverage.apply` and `group` "
                f"return; got {train_op!r}. "
                "Write `est.group(est.Optimizer(optimizer).minimize(loss), ...)`."
            )
    return TrainOp(
        tuple(update for train_op in train_ops for update in train_op.updates),
        tuple(move for train_op in train_ops for move in train_op.moves),
        tuple(change for train_op in train_ops for change in train_op.after),
    )
