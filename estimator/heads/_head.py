"""The base of all heads, which creates the EstimatorSpec."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator import metrics as metrics_lib
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._export_output import ExportOutput
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Scalar, report_in_training
from estimator.core._train_op import TrainOp
from estimator.core._typing import Features
from estimator.losses import Reduction
from estimator.metrics import Metric
from estimator.optim._optimizer import Optimizer

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO

# Of a `MultiHead` they are dicts by the names of its heads.
Labels: TypeAlias = "ArrayLike | BCOO | Mapping[str, ArrayLike | BCOO] | None"
Logits: TypeAlias = ArrayLike | Mapping[str, ArrayLike]
Predictions = dict[Any, Any]  # arrays, and `ClassNames`
RegularizationLosses = Sequence[jax.Array] | None


class Head(abc.ABC):
    """Computes loss, predictions and metrics from the logits of a model, such as `est.BinaryClassHead`.

    TensorFlow's `metrics` and `update_metrics` are one function here, since a metric is a value.

    Attributes:
      name: the suffix of the names of all metrics, after a "/"; if None, they have no suffix.
      logits_dimension: the size of the last dimension of the logits.
      loss_reduction: how the losses of the examples are reduced to the loss. If it is SUM, pass it to
        `replicate_model_fn` too.
    """

    name: str | None
    logits_dimension: int
    loss_reduction: Reduction

    @abc.abstractmethod
    def loss(
        self,
        labels: Labels,
        logits: Logits,
        features: Features = None,
        mode: str | None = None,
        regularization_losses: RegularizationLosses = None,
    ) -> jax.Array:
        """The loss to train on, a float32 scalar.

        Args:
          labels, logits: as documented for the class of the head.
          features: the features of the batch, with the weights if the head has a `weight_column`.
          mode: not used.
          regularization_losses: scalars to add. In towers they are averaged like the losses of examples, unless the
            reduction is SUM, which sums them too.
        """

    @abc.abstractmethod
    def predictions(self, logits: Logits, keys: Sequence[Hashable] | None = None) -> Predictions:
        """The predictions by name: those in `keys`, or all."""

    @abc.abstractmethod
    def metrics(
        self,
        labels: Labels,
        logits: Logits,
        features: Features = None,
        regularization_losses: RegularizationLosses = None,
    ) -> dict[str, Metric]:
        """The metrics of a batch by name; arguments as for `loss`."""

    @abc.abstractmethod
    def export_outputs(self, predictions: Predictions) -> dict[str, ExportOutput]:
        """The export outputs of PREDICT, from all predictions."""

    def create_estimator_spec(
        self,
        features: Features,
        mode: str,
        logits: Logits,
        labels: Labels = None,
        optimizer: Optimizer | None = None,
        trainable_variables: Sequence[str] | None = None,
        train_op_fn: Callable[[jax.Array], TrainOp] | None = None,
        regularization_losses: RegularizationLosses = None,
    ) -> EstimatorSpec:
        """The EstimatorSpec for a model_fn to return.

        Args:
          features: the features of the batch.
          mode: the argument of the model_fn.
          logits: floats of shape `(batch, logits_dimension)`.
          labels: required in TRAIN and EVAL.
          optimizer: an `est.Optimizer`, or a `TowerOptimizer`. TRAIN requires either it or `train_op_fn`.
          trainable_variables: names of the variables to optimize; default: all trainable ones.
          train_op_fn: function from the loss to a train_op.
          regularization_losses: as for `loss`.

        As in TensorFlow, TRAIN shows the loss of a named head, or of each head of a MultiHead, as loss/<name>, and
        regularization_loss, in TensorBoard and to hooks.
        """
        # As in TensorFlow, a mode may be a plain string: "train", "eval" or "infer".
        mode = ModeKeys(mode)
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions, export_outputs=self.export_outputs(predictions))
        loss = self.loss(labels, logits, features, mode, regularization_losses)
        if mode == ModeKeys.EVAL:
            metrics = self.metrics(labels, logits, features, regularization_losses)
            return EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=metrics)
        train_op = _train_op(loss, optimizer, trainable_variables, train_op_fn)
        self._show(loss, labels, logits, features, regularization_losses)
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)

    def _show(
        self,
        loss: jax.Array,
        labels: Labels,
        logits: Logits,
        features: Features,
        regularization_losses: RegularizationLosses,
    ) -> None:
        """Shows the summaries of TensorFlow's heads in TRAIN; `train` shows the loss of a head without a name."""
        if self.name is not None:
            self._show_loss(self._key("loss"), loss)
        self._show_regularization(self._key("regularization_loss"), regularization_losses)

    def _show_loss(self, tag: str, loss: jax.Array) -> None:
        # Merged over towers in the same way as the loss itself.
        is_sum = self.loss_reduction == Reduction.SUM
        report_in_training(tag, lambda: Scalar(loss, summary=True, is_sum=is_sum))

    def _show_regularization(self, tag: str, losses: RegularizationLosses) -> None:
        if losses is not None:
            self._show_loss(tag, add_regularization(jnp.zeros((), jnp.float32), losses))

    def _key(self, key: str) -> str:
        return key if self.name is None else f"{key}/{self.name}"

    def _regularization_metric(self, rows: int, regularization_losses: RegularizationLosses) -> dict[str, Metric]:
        if regularization_losses is None:
            return {}
        total = add_regularization(jnp.zeros((), jnp.float32), regularization_losses)
        return {self._key("regularization_loss"): batch_mean(total, rows)}


def batch_mean(value: jax.Array, rows: int) -> Metric:
    """The mean over the examples of a value that is the same for all rows of a batch or tower."""
    return metrics_lib.mean(value, weights=jnp.float32(rows))


def add_regularization(loss: jax.Array, regularization_losses: RegularizationLosses) -> jax.Array:
    if regularization_losses is None:
        return loss
    if not isinstance(regularization_losses, list | tuple):
        raise TypeError(
            f"regularization_losses must be a list or tuple of scalars; got {regularization_losses!r}. "
            "Write `[regularization_loss]`."
        )
    for i, term in enumerate(regularization_losses):
        if jnp.shape(term) != ():
            raise ValueError(
                f"regularization_losses[{i}] must be a scalar; it has shape {jnp.shape(term)}. Reduce it by `jnp.sum`."
            )
        # The loss keeps its dtype, whatever the dtype of a term is.
        loss = loss + jnp.asarray(term).astype(loss.dtype)
    return loss


def checked_reduction(loss_reduction: str) -> Reduction:
    if loss_reduction == Reduction.NONE:
        raise ValueError(
            f"Invalid loss_reduction: {str(loss_reduction)!r}. A head needs one number to train on: use "
            "Reduction.SUM_OVER_BATCH_SIZE, SUM, or another mean."
        )
    return Reduction(loss_reduction)


def checked_optimizer(caller: str, optimizer: object) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"`{caller}` needs an `est.Optimizer` or a `TowerOptimizer` as optimizer; got {optimizer!r}. "
            "Write `optimizer=est.Optimizer(optax.adam(1e-3))`."
        )
    return optimizer


def _train_op(
    loss: jax.Array,
    optimizer: Optimizer | None,
    trainable_variables: Sequence[str] | None,
    train_op_fn: Callable[[jax.Array], TrainOp] | None,
) -> TrainOp:
    if optimizer is not None and train_op_fn is not None:
        raise ValueError(f"train_op_fn and optimizer cannot both be set; got {train_op_fn!r} and {optimizer!r}.")
    if train_op_fn is not None:
        return train_op_fn(loss)
    if optimizer is None:
        raise ValueError(
            "train_op_fn and optimizer cannot both be None in TRAIN. Write `optimizer=est.Optimizer(optax.adam(1e-3))`."
        )
    if trainable_variables is not None and not isinstance(trainable_variables, list | tuple):
        raise ValueError(
            f"trainable_variables should be a list or a tuple of names of variables; got {trainable_variables!r}."
        )
    return checked_optimizer("create_estimator_spec", optimizer).minimize(loss, trainable_variables)
