"""One row of numbers for each example."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.layers._layer import channels_are_last


def flatten(inputs: ArrayLike, name: str | None = None, data_format: str = "channels_last") -> jax.Array:
    """The inputs as `[batch, numbers]`, as `tf.layers.flatten`.

    >>> print(flatten(jnp.ones((2, 3, 4))).shape)
    (2, 12)

    Args:
      inputs: `[batch, ...]`.
      name: has no effect, since the layer has no variables.
      data_format: with "channels_first" the channels become the last dimension before, so that the order of the
        numbers is the same for both.
    """
    x = jnp.asarray(inputs)
    if x.ndim == 0:
        raise ValueError(f"`est.layers.flatten` needs inputs with a batch dimension; got the number {inputs!r}.")
    if not channels_are_last("flatten", data_format) and x.ndim > 2:
        # Channels last, as in TensorFlow: a dense layer after it has the same kernel for both data formats.
        x = jnp.moveaxis(x, 1, -1)
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
