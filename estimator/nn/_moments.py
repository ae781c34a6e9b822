"""Means, variances, what they normalize, and the part of zeros."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, hide_absent, widen


def moments(
    x: ArrayLike, axes: int | Sequence[int], shift: None = None, name: str | None = None, keep_dims: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The mean and the variance along the axes, as `tf.nn.moments`.

    On towers they are of a tower's rows; `replicate.cross_tower_mean` merges means.

    >>> mean, variance = moments(jnp.array([1.0, 3.0]), 0)
    >>> mean.item(), variance.item()
    (2.0, 1.0)

    Args:
      x: any shape, floating; of half precision it is computed in float32.
      axes: an axis, or several.
      shift, name: without effect, as in TensorFlow.
      keep_dims: whether the axes stay, with 1 element.
    """
    return weighted_moments(x, axes, 1.0, name, keep_dims)


def weighted_moments(
    x: ArrayLike,
    axes: int | Sequence[int],
    frequency_weights: ArrayLike,
    name: str | None = None,
    keep_dims: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The weighted mean and variance along the axes, as `tf.nn.weighted_moments`.

    >>> mean, variance = weighted_moments(jnp.array([1.0, 3.0]), 0, jnp.array([3.0, 1.0]))
    >>> mean.item(), variance.item()
    (1.5, 0.75)

    Args:
      x: any shape, floating; of half precision it is computed in float32.
      axes: an axis, or several.
      frequency_weights: one for each element; it is broadcast to the shape of `x`.
      name: of TensorFlow's op; without effect here.
      keep_dims: whether the axes stay, with 1 element.
    """
    x = as_float(x)
    wide = hide_absent(frequency_weights, widen(x))
    axis = tuple(axes) if isinstance(axes, Sequence) else axes
    weights = jnp.broadcast_to(jnp.asarray(frequency_weights, wide.dtype), x.shape)
    total = jnp.sum(weights, axis, keepdims=True)
    mean = jnp.sum(weights * wide, axis, keepdims=True) / total
    # From deviations, since E[x^2] - E[x]^2 cancels where the mean is large.
    variance = jnp.sum(weights * jnp.square(wide - mean), axis, keepdims=True) / total
    if not keep_dims:
        mean, variance = jnp.squeeze(mean, axis), jnp.squeeze(variance, axis)
    return mean.astype(x.dtype), variance.astype(x.dtype)


def batch_normalization(
    x: ArrayLike,
    mean: ArrayLike,
    variance: ArrayLike,
    offset: ArrayLike | None,
    scale: ArrayLike | None,
    variance_epsilon: float,
    name: str | None = None,
) -> jax.Array:
    """The array normalized by a given mean and variance, as `tf.nn.batch_normalization`.

    `est.layers.batch_normalization` has moments and variables of its own.

    >>> batch_normalization(jnp.array([1.0, 3.0]), 2.0, 0.25, None, 3.0, 0.0)
    Array([-6.,  6.], dtype=float32)

    Args:
      x: any shape, floating; of half precision it is computed in float32.
      mean, variance: broadcast to the shape of `x`.
      offset, scale: what is added after, and multiplied by; None leaves it out.
      variance_epsilon: added to the variance.
      name: of TensorFlow's op; without effect here.
    """
    x = as_float(x)
    wide = widen(x)
    mean, variance = jnp.asarray(mean, wide.dtype), jnp.asarray(variance, wide.dtype)
    factor = jax.lax.rsqrt(variance + variance_epsilon)
    if scale is not None:
        factor *= jnp.asarray(scale, wide.dtype)
    y = (wide - mean) * factor
    return (y if offset is None else y + jnp.asarray(offset, wide.dtype)).astype(x.dtype)


def zero_fraction(value: ArrayLike, name: str | None = None) -> jax.Array:
    """The part of the elements that are zero, as `tf.nn.zero_fraction`; NaN if there are no elements.

    >>> zero_fraction(jnp.array([0.0, 3.0])).item()
    0.5

    Args:
      value: any shape and dtype.
      name: of TensorFlow's op; without effect here.
    """
    return jnp.mean(jnp.asarray(value) == 0, dtype=jnp.float32)
