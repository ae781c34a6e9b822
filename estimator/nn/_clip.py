"""Arrays scaled down to a largest norm."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, widen


def clip_by_norm(
    t: ArrayLike, clip_norm: ArrayLike, axes: int | Sequence[int] | None = None, name: str | None = None
) -> jax.Array:
    """The array, scaled so that its Euclidean norm is at most `clip_norm`, as `tf.clip_by_norm`.

    >>> clip_by_norm(jnp.array([3.0, 4.0]), 1.0)
    Array([0.6, 0.8], dtype=float32)

    Of gradients that `compute_gradients` gives, it is the norm of one tower's gradient.

    Args:
      t: any shape, floating.
      clip_norm: the largest norm, positive.
      axes: the axes that a norm is taken over; all if None.
      name: of TensorFlow's op; without effect here.
    """
    t = as_float(t)
    axis = tuple(axes) if isinstance(axes, Sequence) else axes
    return _clip(t, _norm(t, axis), clip_norm)


def clip_by_average_norm(t: ArrayLike, clip_norm: ArrayLike, name: str | None = None) -> jax.Array:
    """The array, scaled so that its norm divided by its number of elements is at most `clip_norm`, as in TensorFlow.

    >>> clip_by_average_norm(jnp.array([3.0, 4.0]), 1.0)
    Array([1.2, 1.6], dtype=float32)

    Args:
      t: any shape, floating.
      clip_norm: the largest norm per element, positive.
      name: of TensorFlow's op; without effect here.
    """
    t = as_float(t)
    return _clip(t, _norm(t, None) / t.size, clip_norm)


def _clip(t: jax.Array, norm: jax.Array, clip_norm: ArrayLike) -> jax.Array:
    clip_norm = jnp.asarray(clip_norm, norm.dtype)
    # As in TensorFlow, the product comes first: `t * (clip_norm / norm)` rounds in another way.
    return (widen(t) * clip_norm / jnp.maximum(norm, clip_norm)).astype(t.dtype)


def _norm(t: jax.Array, axis: int | tuple[int, ...] | None) -> jax.Array:
    """The Euclidean norm, in float32 at least, with dimensions of 1; its gradient is zero where it is zero."""
    squares = jnp.sum(jnp.square(widen(t)), axis, keepdims=True)
    positive = squares > 0
    # Two `where`s: the derivative of the root is infinite at zero, and zero times infinity is NaN, also in the branch
    # that is not chosen.
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
