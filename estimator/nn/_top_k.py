"""The largest values of rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import unsign_zeros


class TopK(NamedTuple):
    """The result of `top_k`.

    >>> top_k(jnp.array([1.0, 5.0, 3.0]), k=2).indices.tolist()
    [1, 2]

    Attributes:
      values: the largest ones, the largest first, shape `[..., k]`.
      indices: their places in the last dimension, int32 of the same shape.
    """

    values: jax.Array
    indices: jax.Array


def top_k(input: ArrayLike, k: int = 1, sorted: bool = True, name: str | None = None) -> TopK:
    """The `k` largest values of the last dimension and their places, as `tf.nn.top_k`; of equal ones the first.

    >>> values, indices = top_k(jnp.array([1.0, 5.0, 3.0]), k=2)
    >>> values.tolist(), indices.tolist()
    ([5.0, 3.0], [1, 2])

    Args:
      input: shape `[..., n]`.
      k: how many; at most `n`.
      sorted: without effect: they are sorted always.
      name: of TensorFlow's op; without effect here.
    """
    x = jnp.asarray(input)
    places = jax.lax.top_k(unsign_zeros(jax.lax.stop_gradient(x)), k)[1]
    return TopK(jnp.take_along_axis(x, places, -1), places)


def in_top_k(predictions: ArrayLike, targets: ArrayLike, k: int, name: str | None = None) -> jax.Array:
    """A bool for each row: its target is among the `k` largest predictions, as `tf.nn.in_top_k`.

    Classes that are equal to the target's one at the boundary count as smaller. A row with a prediction that is not
    finite, or with a target out of range, is False.

    >>> in_top_k(jnp.array([[1.0, 5.0, 3.0], [1.0, 5.0, 3.0]]), jnp.array([2, 0]), k=2)
    Array([ True, False], dtype=bool)

    Args:
      predictions: shape `[batch, classes]`.
      targets: integers, shape `[batch]`.
      k: how many of the largest.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: there is not one target for each row.
      TypeError: the targets are not integers.
    """
    predictions, targets = jnp.asarray(predictions), jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"`est.nn.in_top_k` needs integers as `targets`; got {targets.dtype}.")
    if predictions.ndim != 2 or targets.shape != predictions.shape[:1]:
        raise ValueError(
            "`est.nn.in_top_k` needs predictions of shape [batch, classes] and targets of shape [batch]; got shapes "
            f"{predictions.shape} and {targets.shape}."
        )
    # As in TensorFlow, a target out of range is not in the top k: it is clipped here, and left out by `in_range`.
    of_target = jnp.take_along_axis(predictions, targets[:, None], 1, mode="clip")
    in_range = (targets >= 0) & (targets < predictions.shape[1])
    known = in_range & jnp.isfinite(predictions).all(1)
    # As in TensorFlow, ties count for the target, and in a row with NaN or an infinity no target is in the top k.
    return known & ((predictions > of_target).sum(1) < k)
