"""Counts of right and wrong yes-no predictions, and what is computed from them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.metrics._arrays import arrange
from estimator.metrics._means import Mean, weighted_mean
from estimator.metrics._metric import Metric


class Count(Metric):
    """A sum of weights.

    Attributes:
      count: float32 scalar.
    """

    count: jax.Array

    def result(self) -> Any:
        return self.count


def true_positives(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Count:
    """The number (or weight) of rows that are positive and predicted to be.

    >>> true_positives(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 1, 0])).result().item()
    2.0

    Args:
      labels, predictions: equal shapes, but for a last 1 that only one has; all that is not zero
        is positive, as in TensorFlow, so round or threshold probabilities first.
      weights, name: as in `mean`.

    Raises:
      ValueError: if shapes do not fit.
    """
    labels, predictions, weights = _decisions("true_positives", labels, predictions, weights)
    return _count(labels & predictions, weights)


def false_positives(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Count:
    """The number (or weight) of rows that are negative, but predicted to be positive.

    >>> false_positives(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 1, 0])).result().item()
    1.0

    Args and errors are as in `true_positives`.
    """
    labels, predictions, weights = _decisions("false_positives", labels, predictions, weights)
    return _count(~labels & predictions, weights)


def true_negatives(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Count:
    """The number (or weight) of rows that are negative and predicted to be.

    >>> true_negatives(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 1, 0])).result().item()
    0.0

    Args and errors are as in `true_positives`.
    """
    labels, predictions, weights = _decisions("true_negatives", labels, predictions, weights)
    return _count(~labels & ~predictions, weights)


def false_negatives(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Count:
    """The number (or weight) of rows that are positive, but predicted to be negative.

    >>> false_negatives(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 1, 0])).result().item()
    1.0

    Args and errors are as in `true_positives`.
    """
    labels, predictions, weights = _decisions("false_negatives", labels, predictions, weights)
    return _count(labels & ~predictions, weights)


def precision(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Mean:
    """The fraction of the rows predicted to be positive that are; 0 without any.

    >>> precision(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 0, 0])).result().item()
    0.5

    Args and errors are as in `true_positives`.
    """
    labels, predictions, weights = _decisions("precision", labels, predictions, weights)
    # A mean over the positive predictions: its two sums merge over batches and towers, which a quotient cannot.
    return weighted_mean(labels, jnp.where(predictions, weights, 0))


def recall(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> Mean:
    """The fraction of the positive rows that are predicted to be; 0 without any.

    >>> recall(jnp.array([0, 1, 1, 0]), jnp.array([1, 1, 0, 0])).result().item()
    0.5

    Args and errors are as in `true_positives`.
    """
    labels, predictions, weights = _decisions("recall", labels, predictions, weights)
    return weighted_mean(predictions, jnp.where(labels, weights, 0))


def _decisions(
    caller: str, labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    labels, predictions, weights = arrange(caller, labels, predictions, weights)
    return labels.astype(bool), predictions.astype(bool), weights


def _count(rows: jax.Array, weights: jax.Array) -> Count:
    return Count(jnp.sum(jnp.where(rows, weights, 0)))
