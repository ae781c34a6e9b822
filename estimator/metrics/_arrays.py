"""Shapes, dtypes and division for all metrics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_real, check_same_shape, check_weights, squeeze_last
from estimator.variables._policy import cast_to_full


def namespace(*states: Any) -> Any:
    """`jax.numpy` if one of the states is a jax array, otherwise `numpy`, which keeps float64."""
    return jnp if any(isinstance(state, jax.Array) for state in states) else np


def divide(numerator: Any, denominator: Any) -> Any:
    """`numerator / denominator`, 0 if the denominator is 0."""
    xp = namespace(numerator, denominator)
    # The inner `where` keeps numpy from warning, and the gradient of the division from NaN.
    empty = denominator == 0
    return xp.where(empty, 0, numerator / xp.where(empty, 1, denominator))


def arrange(
    caller: str, labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Labels, predictions and float32 weights of one shape.

    As in TensorFlow, a last dimension of 1 that only one of labels and predictions has is dropped.
    """
    labels, predictions = cast_to_full(as_real(labels)), cast_to_full(as_real(predictions))
    labels = squeeze_last(labels, predictions.ndim)
    predictions = squeeze_last(predictions, labels.ndim)
    check_same_shape(caller, labels, predictions)
    return labels, predictions, spread(caller, weights, predictions.shape, "predictions")


def spread(caller: str, weights: ArrayLike | None, shape: tuple[int, ...], what: str) -> jax.Array:
    """The weights in float32 and of `shape`; ones for None.

    As in TensorFlow, weights may have a last dimension of 1 too much, or lack the last one.
    """
    weights = as_real(1.0 if weights is None else weights).astype(jnp.float32)
    if weights.ndim > 0:
        weights = squeeze_last(weights, len(shape))
        # One weight for each row of several values.
        weights = weights[..., None] if weights.ndim == len(shape) - 1 else weights
    check_weights(caller, weights, shape, what)
    return jnp.broadcast_to(weights, shape)
