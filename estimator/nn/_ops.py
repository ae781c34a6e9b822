"""Short functions of `tf.nn`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, widen


def l2_loss(t: ArrayLike, name: str | None = None) -> jax.Array:
    """Half the sum of the squares, as `tf.nn.l2_loss`.

    >>> l2_loss(jnp.array([3.0, 4.0])).item()
    12.5

    Args:
      t: any shape. The sum is in float32 at least, also of integers, which TensorFlow refuses.
      name: of TensorFlow's op; without effect here.
    """
    return jnp.sum(jnp.square(widen(as_float(t)))) / 2


def l2_normalize(
    x: ArrayLike,
    axis: int | Sequence[int] | None = None,
    epsilon: float = 1e-12,
    name: str | None = None,
    dim: int | Sequence[int] | None = None,
) -> jax.Array:
    """The array divided by its Euclidean norm along an axis, as `tf.nn.l2_normalize`.

    >>> l2_normalize(jnp.array([3.0, 4.0]), 0)
    Array([0.6, 0.8], dtype=float32)

    Args:
      x: any shape, floating.
      axis: the axis, or several of them; all if None.
      epsilon: the least sum of squares that is divided by.
      name: of TensorFlow's op; without effect here.
      dim: TensorFlow's older name of `axis`.
    """
    x, axis = as_float(x), axis if dim is None else dim
    wide = widen(x)
    squares = jnp.sum(jnp.square(wide), tuple(axis) if isinstance(axis, Sequence) else axis, keepdims=True)
    # As in TensorFlow, `epsilon` bounds the sum of squares within the root, so that the gradient at zero is finite.
    return (wide * jax.lax.rsqrt(jnp.maximum(squares, epsilon))).astype(x.dtype)


def local_response_normalization(
    input: ArrayLike,
    depth_radius: int = 5,
    bias: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.5,
    name: str | None = None,
) -> jax.Array:
    """Each value divided by `(bias + alpha * s) ** beta`, as `tf.nn.local_response_normalization`.

    `s` is the sum of the squares of the channels that are at most `depth_radius` away.

    >>> local_response_normalization(jnp.array([[[[2.0, 0.0]]]]), bias=0.0).tolist()
    [[[[1.0, 0.0]]]]

    Args:
      input: shape `[batch, height, width, channels]`, floating.
      depth_radius, bias, alpha, beta: see above; TensorFlow's defaults.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: the input has other than 4 dimensions.
    """
    x = as_float(input)
    if x.ndim != 4:
        raise ValueError(
            "`est.nn.local_response_normalization` needs an input of shape [batch, height, width, channels]; got shape "
            f"{x.shape}."
        )
    window, padding = (1, 1, 1, 2 * depth_radius + 1), ((0, 0), (0, 0), (0, 0), (depth_radius, depth_radius))
    # A sum over the neighbouring channels, as in TensorFlow; torch's layer of this name takes the mean.
    wide = widen(x)
    squares = jax.lax.reduce_window(jnp.square(wide), 0.0, jax.lax.add, window, (1, 1, 1, 1), padding)
    return (wide / (bias + alpha * squares) ** beta).astype(x.dtype)


lrn = local_response_normalization


def xw_plus_b(x: ArrayLike, weights: ArrayLike, biases: ArrayLike, name: str | None = None) -> jax.Array:
    """`x @ weights + biases`, as `tf.nn.xw_plus_b`.

    >>> xw_plus_b(jnp.ones((1, 2)), jnp.ones((2, 1)), jnp.array([3.0]))
    Array([[5.]], dtype=float32)

    Args:
      x: shape `[batch, inputs]`.
      weights: shape `[inputs, outputs]`.
      biases: shape `[outputs]`.
      name: of TensorFlow's op; without effect here.
    """
    x, weights, biases = jnp.asarray(x), jnp.asarray(weights), jnp.asarray(biases)
    dtype = jnp.result_type(x, weights, biases)
    wide = widen(jnp.zeros((), dtype)).dtype
    return (jnp.matmul(x, weights, preferred_element_type=wide) + biases.astype(wide)).astype(dtype)


def crelu(features: ArrayLike, name: str | None = None, axis: int = -1) -> jax.Array:
    """The positive parts of the values and of their negatives, side by side, as `tf.nn.crelu`.

    >>> crelu(jnp.array([1.0, -2.0]))
    Array([1., 0., 0., 2.], dtype=float32)

    Args:
      features: any shape of at least one dimension.
      name: of TensorFlow's op; without effect here.
      axis: the one that becomes twice as long.
    """
    features = jnp.asarray(features)
    return jax.nn.relu(jnp.concatenate([features, -features], axis))
