"""Shapes, dtypes, sums and division for all metrics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_real, check_same_shape, check_weights, squeeze_last, widen, widen_int

_MOST_SUMS = 2**16  # these fit into the cache of a processor


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
    labels, predictions = widen(as_real(labels)), widen(as_real(predictions))
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


def agree(labels: jax.Array, predictions: jax.Array) -> jax.Array:
    """A bool for each prediction: it is its label, after it was cast to the dtype of the labels, as in TensorFlow.

    One that does not fit into this dtype, such as NaN or 256 among bytes, is wrong.
    """
    cast = predictions.astype(labels.dtype)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        return cast == labels
    whole = jnp.trunc(predictions) if jnp.issubdtype(predictions.dtype, jnp.floating) else predictions
    return (cast == labels) & (cast.astype(predictions.dtype) == whole)


def known_classes(x: jax.Array, num_classes: int) -> tuple[jax.Array, jax.Array]:
    """The classes in int32, and a bool for each: it is in `[0, num_classes)`. The others, NaN too, have the class 0."""
    x = jnp.trunc(x) if jnp.issubdtype(x.dtype, jnp.floating) else widen_int(x)
    known = (x >= 0) & (x < num_classes)
    return jnp.where(known, x, 0).astype(jnp.int32), known


def sum_by(group: jax.Array, weights: jax.Array, num_groups: int) -> jax.Array:
    """The sum of the weights of each group, in one pass: a one-hot matrix would have rows times groups numbers."""
    group, weights = group.ravel(), weights.ravel()
    # Several sums for each group, of interleaved rows: one alone would lose digits, from 2^24 rows on all of them.
    parts = max(1, _MOST_SUMS // max(1, num_groups))
    part = jnp.arange(group.size, dtype=group.dtype) % parts
    sums = jax.ops.segment_sum(weights, group * parts + part, num_groups * parts)
    return sums.reshape(num_groups, parts).sum(1)
