"""Means over rows: of values, of hits, of errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_real, hide_absent
from estimator.core._frame import innermost_frame
from estimator.metrics._arrays import agree, arrange, divide, namespace, spread
from estimator.metrics._metric import Metric


class Mean(Metric):
    """A weighted mean; 0 as long as the weights sum to 0.

    Attributes:
      total: sum of weight times value, float32; an array if it is a mean for each of some classes.
      count: sum of the weights, shape of `total`.
    """

    total: jax.Array
    count: jax.Array

    def result(self) -> Any:
        return divide(self.total, self.count)


class RootMean(Mean):
    """The square root of a weighted mean."""

    def result(self) -> Any:
        # The root is taken last, after all merges: a mean of the roots of batches would be another number.
        return namespace(self.total).sqrt(super().result())


def weighted_mean(values: jax.Array, weights: jax.Array) -> Mean:
    """The mean over all elements; both of one shape."""
    values = hide_absent(weights, values.astype(jnp.float32))
    return Mean(total=jnp.sum(values * weights), count=jnp.sum(weights))


def mean(values: ArrayLike, weights: ArrayLike | None = None, name: str | None = None) -> Mean:
    """The weighted mean of the values of all rows.

    >>> mean(jnp.array([1.0, 2.0, 6.0]), weights=jnp.array([1.0, 1.0, 0.0])).result().item()
    1.5

    Args:
      values: any shape; on towers, a value for each example: of one number each tower counts once, whatever its rows.
      weights: None, a scalar, or as many dimensions as `values`, each 1 or equal (a last 1 may
        be missing or too much). An element of weight 0 counts as absent, also where it is NaN.
      name: of TensorFlow's op; without effect here, where eval_metric_ops names metrics.

    Raises:
      ValueError: if the shape of `weights` does not fit.
    """
    values = as_real(values)
    # A scalar has the weight 1, however many rows the tower has.
    if values.ndim == 0 and weights is None:
        _warn_in_towers()
    return weighted_mean(values, spread("mean", weights, values.shape, "values"))


def _warn_in_towers() -> None:
    frame = innermost_frame()
    if frame is not None and frame.replica.towers > 1:
        logging.log_first_n(
            logging.WARNING,
            "`est.metrics.mean` of one number in each of several towers counts towers, not rows, whatever the weights "
            "of their rows. Give the values of the examples: `est.metrics.mean(losses, weights=weights)`.",
            1,
        )


def accuracy(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Mean:
    """The fraction of predictions that equal their labels.

    >>> accuracy(jnp.array([1, 0, 2, 2]), jnp.array([1, 1, 2, 2])).result().item()
    0.75

    Args:
      labels: any shape and dtype.
      predictions: shape of `labels`, classes and not scores; cast to their dtype, as in TensorFlow: 1.0 is the class 1.
        One that this dtype cannot hold is wrong.
        A last dimension of 1 that only one of the two has is dropped.
      weights, name: as in `mean`.

    Raises:
      ValueError: if shapes do not fit.
    """
    labels, predictions, weights = arrange("accuracy", labels, predictions, weights)
    return weighted_mean(agree(labels, predictions), weights)


def mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Mean:
    """The mean of `(predictions - labels)**2`.

    >>> mean_squared_error(jnp.array([1.0, 2.0]), jnp.array([2.0, 5.0])).result().item()
    5.0

    Args:
      labels, predictions: equal shapes, but for a last 1 that only one has.
      weights, name: as in `mean`.

    Raises:
      ValueError: if shapes do not fit.
    """
    errors, weights = _errors("mean_squared_error", labels, predictions, weights)
    return weighted_mean(jnp.square(errors), weights)


def root_mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> RootMean:
    """The square root of the mean of `(predictions - labels)**2` over all rows of all batches.

    >>> root_mean_squared_error(jnp.array([1.0, 2.0]), jnp.array([4.0, 5.0])).result().item()
    3.0

    Args and errors are as in `mean_squared_error`.
    """
    errors, weights = _errors("root_mean_squared_error", labels, predictions, weights)
    squares = weighted_mean(jnp.square(errors), weights)
    return RootMean(squares.total, squares.count)


def mean_absolute_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Mean:
    """The mean of `|predictions - labels|`.

    >>> mean_absolute_error(jnp.array([1.0, 2.0]), jnp.array([2.0, 5.0])).result().item()
    2.0

    Args and errors are as in `mean_squared_error`.
    """
    errors, weights = _errors("mean_absolute_error", labels, predictions, weights)
    return weighted_mean(jnp.abs(errors), weights)


def _errors(
    caller: str, labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    labels, predictions, weights = arrange(caller, labels, predictions, weights)
    # Cast first: the difference of unsigned integers would wrap around.
    return hide_absent(weights, predictions.astype(jnp.float32) - labels.astype(jnp.float32)), weights
