"""Losses, as in `tf.losses`: labels first, one weight per element or row, one scalar out.

Weighted means divide by a denominator that is averaged over the towers of a replicated model_fn,
so that the sum of the scaled tower losses is the mean over all rows.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax.losses
from jax.typing import ArrayLike

from estimator.core._argument_checks import (
    as_float,
    as_real,
    check_order,
    check_same_shape,
    check_weights,
    hide_absent,
    squeeze_last,
    widen,
    widen_int,
)
from estimator.core._frame import average_denominator
from estimator.losses._collected import collect_loss
from estimator.porting._missing_names import missing_attribute


class _WithNames(enum.EnumType):
    """An enum whose errors say what there is instead of TensorFlow's names."""

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            if name in cls.__members__:  # where Python 3.11 finds them
                return cls.__members__[name]
            raise missing_attribute(cls.NONE, cls.__name__, name)


class Reduction(enum.StrEnum, metaclass=_WithNames):
    """The reductions of the weighted losses of a batch; the values are TensorFlow's.

    >>> compute_weighted_loss(jnp.array([1.0, 5.0]), reduction=Reduction.SUM).item()
    6.0

    Attributes:
      NONE: not at all.
      SUM: their sum.
      MEAN: their sum divided by the sum of the weights.
      SUM_OVER_BATCH_SIZE: their sum divided by the number of elements.
      SUM_BY_NONZERO_WEIGHTS: their sum divided by the number of elements of non-zero weight.
    """

    NONE = "none"
    SUM = "weighted_sum"
    MEAN = "weighted_mean"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"

    @classmethod
    def _missing_(cls, value: object) -> Reduction:
        known = ", ".join(f"Reduction.{member.name} ({member.value!r})" for member in cls)
        raise ValueError(f"Unknown loss reduction {value!r}; the known ones are {known}.")


_DEFAULT = Reduction.SUM_BY_NONZERO_WEIGHTS


def compute_weighted_loss(
    losses: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """The weighted losses, reduced to one number (unless `reduction` is NONE).

    >>> losses = jnp.array([1.0, 2.0, 6.0])
    >>> compute_weighted_loss(losses).item()
    3.0
    >>> compute_weighted_loss(losses, weights=jnp.array([2.0, 1.0, 0.0])).item()  # 4 / 2
    2.0

    A mean over nothing (weights that are all zero, no elements) is 0, as in TensorFlow. An element of weight 0 counts
    as absent, here and in all other losses: its labels and predictions may be out of range, NaN or infinite without an
    effect on the loss and on gradients.

    Args:
      losses: shape `[d0, ..., dn]`.
      weights: a number, or an array of as many dimensions as `losses`, each 1 or equal.
      reduction: a `Reduction` or its value.
      scope, name: of TensorFlow's op; without effect here.

    Returns:
      A scalar, or for NONE the shape of `losses`; in float32, or in float64 if the losses are.

    Raises:
      ValueError: if the reduction is unknown or the shape of `weights` does not fit.
    """
    return _reduce("compute_weighted_loss", widen(as_float(losses)), weights, reduction)


def absolute_difference(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of `|predictions - labels|`.

    >>> absolute_difference(jnp.array([1.0, 2.0]), jnp.array([2.0, 5.0])).item()
    2.0

    Args:
      labels: shape of `predictions`; cast to their dtype. Losses are computed in float32 at least.
      predictions: any shape.
      weights, reduction, scope, name: as in `compute_weighted_loss`.

    Raises:
      ValueError: if shapes differ, or as `compute_weighted_loss` does.
    """
    labels, predictions = _pair("absolute_difference", labels, predictions, weights)
    losses = jnp.abs(predictions - labels)
    return _reduce("absolute_difference", losses, weights, reduction)


def mean_squared_error(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of `(predictions - labels)**2`.

    >>> mean_squared_error(jnp.array([1.0, 2.0]), jnp.array([2.0, 5.0])).item()
    5.0

    Args and errors are as in `absolute_difference`.
    """
    labels, predictions = _pair("mean_squared_error", labels, predictions, weights)
    losses = optax.losses.squared_error(predictions, labels)
    return _reduce("mean_squared_error", losses, weights, reduction)


def huber_loss(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
    *,
    delta: float = 1.0,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of errors squared up to `delta`, then linear.

    >>> huber_loss(jnp.array([0.0, 0.0]), jnp.array([1.0, 3.0])).item()  # (0.5 + 2.5) / 2
    1.5

    Args:
      labels, predictions, weights, reduction, scope, name: as in `absolute_difference`, also for errors.
      delta: the absolute error above which the loss grows linearly.
    """
    labels, predictions = _pair("huber_loss", labels, predictions, weights)
    losses = optax.losses.huber_loss(predictions, labels, delta=delta)
    return _reduce("huber_loss", losses, weights, reduction)


def hinge_loss(
    labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of `max(0, 1 - (2 labels - 1) logits)`.

    >>> hinge_loss(jnp.array([0, 1]), jnp.array([1.0, 3.0])).item()  # (2 + 0) / 2
    1.0

    Args:
      labels: 0 or 1 (TensorFlow's convention, not -1 and 1), shape of `logits`.
      logits: any shape, floats; positive for class 1.
      weights, reduction, scope, name: as in `compute_weighted_loss`, also for errors.

    Raises:
      ValueError: if shapes differ, or as `compute_weighted_loss` does.
      TypeError: if labels and logits have changed places: labels are floats and logits integers.
    """
    labels, logits = _pair("hinge_loss", labels, logits, weights, "logits")
    losses = optax.losses.hinge_loss(logits, 2 * labels - 1)
    return _reduce("hinge_loss", losses, weights, reduction)


def log_loss(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
    *,
    epsilon: float = 1e-7,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of the cross entropy of probabilities.

    >>> round(log_loss(jnp.array([1, 0]), jnp.array([0.5, 0.5])).item(), 4)
    0.6931

    Args:
      labels: 0 or 1, shape of `predictions`.
      predictions: probabilities of class 1; for logits take `sigmoid_cross_entropy`.
      weights, reduction, scope, name: as in `compute_weighted_loss`, also for errors.
      epsilon: added within the logarithms.
    """
    labels, predictions = _pair("log_loss", labels, predictions, weights)
    known = (predictions + epsilon > 0) & (1 - predictions + epsilon > 0)
    predictions = hide_absent(weights, predictions, known, by=0.5)
    positive = labels * jnp.log(predictions + epsilon)
    negative = (1 - labels) * jnp.log(1 - predictions + epsilon)
    return _reduce("log_loss", -positive - negative, weights, reduction)


def sigmoid_cross_entropy(
    labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
    *,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of the cross entropy of independent classes.

    >>> round(sigmoid_cross_entropy(jnp.array([[1, 0]]), jnp.array([[0.0, 0.0]])).item(), 4)
    0.6931

    Args:
      labels: 0, 1 or between, shape of `logits`.
      logits: any shape, `[batch, classes]` mostly.
      weights, reduction, scope, name: as in `compute_weighted_loss`.
      label_smoothing: moves labels towards 1/2 by this fraction.

    Errors are as in `hinge_loss`.
    """
    labels, logits = _pair("sigmoid_cross_entropy", labels, logits, weights, "logits")
    labels = labels * (1 - label_smoothing) + 0.5 * label_smoothing
    losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
    return _reduce("sigmoid_cross_entropy", losses, weights, reduction)


def softmax_cross_entropy(
    onehot_labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
    *,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of the cross entropy of exclusive classes.

    >>> round(softmax_cross_entropy(jnp.array([[1, 0]]), jnp.array([[0.0, 0.0]])).item(), 4)
    0.6931

    Args:
      onehot_labels: a distribution over the classes, shape of `logits`. No gradient flows back
        to it, as in TensorFlow.
      logits: shape `[..., classes]`.
      weights, reduction, scope, name: as in `compute_weighted_loss`; losses have shape `[...]`.
      label_smoothing: moves labels towards 1 / classes by this fraction.

    Errors are as in `hinge_loss`.
    """
    labels, logits = _pair("softmax_cross_entropy", onehot_labels, logits, weights, "logits", of_rows=True)
    # As in TensorFlow, no gradient flows into labels, not even into the soft ones of another model.
    labels = optax.losses.smooth_labels(jax.lax.stop_gradient(labels), label_smoothing)
    losses = optax.losses.softmax_cross_entropy(logits, labels)
    return _reduce("softmax_cross_entropy", losses, weights, reduction)


def sparse_softmax_cross_entropy(
    labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike = 1.0,
    reduction: Reduction | str = _DEFAULT,
    scope: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """The weighted mean (or another `reduction`) of the cross entropy with the right classes.

    >>> round(sparse_softmax_cross_entropy(jnp.array([1, 0]), jnp.zeros((2, 4))).item(), 4)
    1.3863

    Args:
      labels: integers in `[0, classes)`, shape `[...]` or, as TensorFlow allows, `[..., 1]`.
        The loss of a label out of range is NaN, unless its weight is 0.
      logits: shape `[..., classes]`.
      weights, reduction, scope, name: as in `compute_weighted_loss`, where losses have shape `[...]`; weights
        of shape `[..., 1]` are squeezed.

    Raises:
      ValueError: if shapes do not fit, or as `compute_weighted_loss` does.
      TypeError: if labels are not integers, or labels and logits have changed places.
    """
    caller = "sparse_softmax_cross_entropy"
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    check_order(caller, labels, logits)
    logits = widen(as_float(logits))
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"`{caller}` takes integer labels, one class per row; got {labels.dtype}. Write "
            "`labels.astype(jnp.int32)`, or call `softmax_cross_entropy` for one-hot labels."
        )
    labels = squeeze_last(labels, logits.ndim - 1)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"`{caller}` got labels of shape {labels.shape} and logits of shape {logits.shape}. "
            f"Labels must be classes of shape {logits.shape[:-1]}: for one-hot labels call "
            "`softmax_cross_entropy`, else reshape them."
        )
    # Indexing wraps negative labels around to the last classes; labels that are too large give NaN.
    num_classes = logits.shape[-1]
    labels = widen_int(labels)
    labels = jnp.where(labels < 0, num_classes, labels)
    # TensorFlow takes weights `[batch, 1]` for losses `[batch]`; not squeezed, they would broadcast to a matrix.
    if not isinstance(weights, int | float):
        weights = squeeze_last(jnp.asarray(weights), labels.ndim)
    logits = _hide_absent_rows(caller, weights, logits)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return _reduce(caller, losses, weights, reduction)


def _pair(
    caller: str,
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike,
    what: str = "predictions",
    of_rows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Both as arrays of one shape and of the predictions' floating dtype, finite where the weight is 0.

    There is a weight for each element, or, with `of_rows`, for all elements along the last dimension.
    """
    labels, predictions = as_real(labels), as_real(predictions)
    # With logits the dtypes show whether both were swapped: labels may be integers, logits must not.
    if what == "logits":
        check_order(caller, labels, predictions)
    predictions = widen(as_float(predictions))
    check_same_shape(caller, labels, predictions, what)
    labels = labels.astype(predictions.dtype)
    if of_rows:
        return _hide_absent_rows(caller, weights, labels), _hide_absent_rows(caller, weights, predictions)
    check_weights(caller, as_real(weights), predictions.shape)
    return hide_absent(weights, labels), hide_absent(weights, predictions)


def _hide_absent_rows(caller: str, weights: ArrayLike, x: jax.Array) -> jax.Array:
    """`hide_absent` of values whose last dimension the weights lack."""
    if isinstance(weights, int | float):
        return hide_absent(weights, x)
    weights = as_real(weights)
    check_weights(caller, weights, x.shape[:-1])
    return hide_absent(weights[..., None] if weights.ndim else weights, x)


def _reduce(caller: str, losses: jax.Array, weights: ArrayLike, reduction: Reduction | str) -> jax.Array:
    """`compute_weighted_loss` for losses in float32 at least; `caller` is named in errors."""
    reduction = Reduction(reduction)
    weight = as_real(weights).astype(losses.dtype)
    check_weights(caller, weight, losses.shape)
    weighted = hide_absent(weights, losses) * weight
    if reduction == Reduction.NONE:
        return weighted
    total = jnp.sum(weighted)
    if reduction == Reduction.SUM:
        return collect_loss(total, reduction)
    denominator = _denominator(reduction, jnp.broadcast_to(weight, losses.shape))
    if not isinstance(weights, int | float):
        # With a plain number the denominators are proportional to the rows: equal on all towers.
        denominator = average_denominator(denominator)
    # As in TensorFlow, a mean over nothing is 0; with two `where`s its gradient is 0 too, and not NaN.
    empty = denominator == 0
    return collect_loss(jnp.where(empty, 0, total / jnp.where(empty, 1, denominator)), reduction)


def _denominator(reduction: Reduction, weights: jax.Array) -> jax.Array:
    """The divisor of the sum of the losses; `weights` have the shape of the losses."""
    match reduction:
        case Reduction.MEAN:
            return jnp.sum(weights)
        case Reduction.SUM_OVER_BATCH_SIZE:
            return jnp.asarray(weights.size, weights.dtype)
        case _:
            return jnp.sum(weights != 0, dtype=weights.dtype)
