"""`TrainOp`: the updates that a model_fn asks of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import optax

from estimator.core._frame import RunId
from estimator.core._typing import Gradients, PyTree, Slots


class UpdatingOptimizer(Protocol):
    """What a training step needs of an `est.Optimizer`."""

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
      gradients: by variable name; None while they are still to be taken from the loss.
      loss: scalar; None for `apply_gradients`.
      var_list: names of the variables to update.
      slots: name of this call's entry in `State.slots`.
      optimizer: whose transformation turns the gradients into updates.
      run: in which it was made.
      learning_rate: that the run has computed, and 1 (see `optim/_given_rate.py`); None where the optimizer knows it.
      non_finite: by tower, the number of the first gradient with an inf or a NaN, from 1 on in the order of names, or
        0; floats of shape `[towers]`.
    """

    gradients: Gradients | None
    loss: jax.Array | None
    var_list: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    slots: str = dataclasses.field(metadata={"static": True})
    optimizer: UpdatingOptimizer = dataclasses.field(metadata={"static": True})
    run: RunId = dataclasses.field(default_factory=RunId, metadata={"static": True})
    non_finite: jax.Array | None = None
    learning_rate: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AverageUpdate:
    """One call of `ExponentialMovingAverage.apply`.

    Attributes:
      names: pairs of the names of a variable and of its average.
      decay: between 0 and 1.
      count: the number of updates so far, which makes the decay smaller in the beginning, and 1; an array of two, so
        that the sum of several parts' still says which number it is. None: the decay stays what it is.
    """

    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})
    decay: float = dataclasses.field(metadata={"static": True})
    count: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainOp:
    """What a training step does to the variables.

    Attributes:
      updates: applied in this order.
      averages: moved after all updates.
      skipped: bool scalar: in the spec of a step that is done, whether it was skipped (`on_nan`); else None.
      learning_rates: in the spec of a step that is done, those that it was made with, as `est.learning_rates` names
        them; scalars.
      slots: by optimizer name, of a step that has applied its updates itself, in each tower (block synchronisation);
        arrays with the towers as their first dimension. Its new variables are among those it assigned.
    """

    updates: tuple[Update, ...] = ()
    skipped: jax.Array | None = None
    learning_rates: dict[str, Any] = dataclasses.field(default_factory=dict)
    slots: Slots = dataclasses.field(default_factory=dict)
    averages: tuple[AverageUpdate, ...] = ()

    @property
    def pending(self) -> list[Update]:
        """The updates whose gradients are still to be taken from their losses."""
        return [update for update in self.updates if update.gradients is None]

    def gradients(self) -> list[dict[str, PyTree]]:
        """The gradients of each update, by name in the order of its variables."""
        of_updates = [(update.var_list, update.gradients or {}) for update in self.updates]
        return [{name: own[name] for name in names if name in own} for names, own in of_updates]

    def with_gradients(self, gradients: Sequence[dict[str, PyTree]]) -> TrainOp:
        """The same updates with other gradients, by name for each."""
        pairs = zip(self.updates, gradients, strict=True)
        return dataclasses.replace(self, updates=tuple(dataclasses.replace(u, gradients=own) for u, own in pairs))

    def without_gradients(self) -> TrainOp:
        """The same updates, of which no loss is to be differentiated."""
        return self.with_gradients([{} for _ in self.updates])


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
        slots={name: state for train_op in train_ops for name, state in train_op.slots.items()},
        averages=tuple(average for train_op in train_ops for average in train_op.averages),
    )
