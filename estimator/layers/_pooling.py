"""Pooling: the largest value or the mean of a window, or of all places."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.layers import _cpu_forms
from estimator.layers._layer import as_input, channels_are_last, check_not_empty, padding_of, sizes

_MOST_SHIFTS = 64  # of the inputs on a CPU: each is an operation of the program


def max_pooling1d(
    inputs: ArrayLike,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> jax.Array:
    """The largest value of each window, as `tf.layers.max_pooling1d`.

    >>> x = jnp.array([[[1.0], [5.0], [2.0], [3.0]]])
    >>> print(max_pooling1d(x, 2, 2).ravel())
    [5. 3.]

    Args:
      inputs: `[batch, steps, channels]`, or with "channels_first" `[batch, channels, steps]`.
      pool_size, strides: an integer.
      padding: "valid" or "same".
      data_format: "channels_last" or "channels_first".
      name: has no effect, since the layer has no variables.
    """
    return _max("max_pooling1d", 1, inputs, pool_size, strides, padding, data_format)


def average_pooling1d(
    inputs: ArrayLike,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> jax.Array:
    """The mean of each window, as `tf.layers.average_pooling1d`. Places that the padding adds do not count.

    >>> x = jnp.array([[[1.0], [5.0], [2.0], [3.0]]])
    >>> print(average_pooling1d(x, 2, 2).ravel())
    [3.  2.5]

    Args:
      inputs, pool_size, strides, padding, data_format, name: as in `max_pooling1d`.
    """
    return _average("average_pooling1d", 1, inputs, pool_size, strides, padding, data_format)


def max_pooling2d(
    inputs: ArrayLike,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> jax.Array:
    """The largest value of each window, as `tf.layers.max_pooling2d`.

    >>> x = jnp.array([[1.0, 5.0], [2.0, 3.0]]).reshape(1, 2, 2, 1)
    >>> print(max_pooling2d(x, 2, 2).ravel())
    [5.]

    Args:
      inputs: `[batch, height, width, channels]`, or with "channels_first" `[batch, channels, height, width]`.
      pool_size, strides: an integer, or two.
      padding: "valid" or "same".
      data_format: "channels_last" or "channels_first".
      name: has no effect, since the layer has no variables.
    """
    return _max("max_pooling2d", 2, inputs, pool_size, strides, padding, data_format)


def average_pooling2d(
    inputs: ArrayLike,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> jax.Array:
    """The mean of each window, as `tf.layers.average_pooling2d`. Places that the padding adds do not count.

    >>> x = jnp.array([[1.0, 5.0], [2.0, 4.0]]).reshape(1, 2, 2, 1)
    >>> print(average_pooling2d(x, 2, 2).ravel())
    [3.]

    Args:
      inputs, pool_size, strides, padding, data_format, name: as in `max_pooling2d`.
    """
    return _average("average_pooling2d", 2, inputs, pool_size, strides, padding, data_format)


def global_average_pooling1d(inputs: ArrayLike, data_format: str = "channels_last") -> jax.Array:
    """The mean of all places, `[batch, channels]`, as Keras' `GlobalAveragePooling1D`.

    >>> print(global_average_pooling1d(jnp.array([1.0, 3.0]).reshape(1, 2, 1)))
    [[2.]]
    """
    return jnp.mean(*_all_places("global_average_pooling1d", 1, inputs, data_format))


def global_average_pooling2d(inputs: ArrayLike, data_format: str = "channels_last") -> jax.Array:
    """The mean of all places, `[batch, channels]`, as Keras' `GlobalAveragePooling2D`.

    >>> print(global_average_pooling2d(jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)))
    [[2.]]
    """
    return jnp.mean(*_all_places("global_average_pooling2d", 2, inputs, data_format))


def global_max_pooling1d(inputs: ArrayLike, data_format: str = "channels_last") -> jax.Array:
    """The largest value of all places, `[batch, channels]`, as Keras' `GlobalMaxPooling1D`.

    >>> print(global_max_pooling1d(jnp.array([1.0, 3.0]).reshape(1, 2, 1)))
    [[3.]]
    """
    return jnp.max(*_all_places("global_max_pooling1d", 1, inputs, data_format))


def global_max_pooling2d(inputs: ArrayLike, data_format: str = "channels_last") -> jax.Array:
    """The largest value of all places, `[batch, channels]`, as Keras' `GlobalMaxPooling2D`.

    >>> print(global_max_pooling2d(jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)))
    [[3.]]
    """
    return jnp.max(*_all_places("global_max_pooling2d", 2, inputs, data_format))


def _all_places(layer: str, ndim: int, inputs: ArrayLike, data_format: str) -> tuple[jax.Array, tuple[int, ...]]:
    x = as_input(layer, inputs, ndim + 2)
    first = 1 if channels_are_last(layer, data_format) else 2
    return x, tuple(range(first, first + ndim))


def _max(layer: str, ndim: int, inputs: ArrayLike, *window: int | str | Sequence[int]) -> jax.Array:
    x = as_input(layer, inputs, ndim + 2)
    size, strides, padding = _window(layer, ndim, *window)  # type: ignore[arg-type]
    by_xla = functools.partial(_max_by_xla, size=size, strides=strides, padding=padding)
    check_not_empty(layer, "pool_size", window[0], x, jax.eval_shape(by_xla, x))
    if sum(size) > _MOST_SHIFTS:
        return by_xla(x)
    on_cpu = functools.partial(_cpu_forms.max_pool, size=size, strides=strides, padding=padding)
    return jax.lax.platform_dependent(x, cpu=on_cpu, default=by_xla)


def _max_by_xla(x: jax.Array, size: Sequence[int], strides: Sequence[int], padding: str) -> jax.Array:
    # jax has a gradient of this reduction only if it starts from -inf, the identity of max.
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, strides, padding)


def _average(layer: str, ndim: int, inputs: ArrayLike, *window: int | str | Sequence[int]) -> jax.Array:
    x = as_input(layer, inputs, ndim + 2)
    size, strides, padding = _window(layer, ndim, *window)  # type: ignore[arg-type]
    total = jax.lax.reduce_window(x, 0.0, jax.lax.add, size, strides, padding)
    check_not_empty(layer, "pool_size", window[0], x, total)
    if padding == "VALID":
        return total / jnp.asarray(size, x.dtype).prod()
    # One example and one channel are enough, and one place along a dimension without a window: the rest broadcasts.
    places = jnp.ones((1, *(x.shape[i] if n > 1 else 1 for i, n in enumerate(size) if i)), x.dtype)
    return total / jax.lax.reduce_window(places, 0.0, jax.lax.add, size, strides, padding)


def _window(
    layer: str, ndim: int, pool_size: int | Sequence[int], strides: int | Sequence[int], padding: str, data_format: str
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Sizes and strides by dimension, and the padding, for `jax.lax.reduce_window`."""
    last = channels_are_last(layer, data_format)

    def add_outer(spatial: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *spatial, 1) if last else (1, 1, *spatial)

    size, steps = sizes(layer, "pool_size", pool_size, ndim), sizes(layer, "strides", strides, ndim)
    return add_outer(size), add_outer(steps), padding_of(layer, padding)
