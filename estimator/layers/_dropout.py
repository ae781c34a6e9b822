"""Dropout."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._rng import make_rng
from estimator.layers._layer import as_input, is_training


def dropout(
    inputs: ArrayLike,
    rate: float = 0.5,
    noise_shape: Sequence[int | None] | None = None,
    seed: int | None = None,
    training: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """Sets a part of the inputs to zero in training, as `tf.layers.dropout`; the others are divided by `1 - rate`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=est.layers.dropout(features, 0.5))
    >>> model, x = est.transform(model_fn), jnp.ones(4)
    >>> print(model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions)
    [1. 1. 1. 1.]

    Args:
      inputs: any shape, floating.
      rate: the part that is set to zero, from 0 to less than 1. `tf.nn.dropout` has `keep_prob` in its place, the part
        that stays: write `1 - keep_prob`. An error cannot tell the one from the other.
      noise_shape: if it has 1, one choice is made for the whole dimension; if None, the dimension's size.
      seed: makes the choice a different one, the same in each run with the same seed of `RunConfig`.
      training: whether to do it at all. By default in TRAIN, where TensorFlow's default is False in all modes.
      name: choices of one name do not change if other layers are added.

    Raises:
      TypeError: the inputs are not floating, or the rate is not a number.
      ValueError: the rate is outside of its bounds, the noise does not fit the inputs, or it was called in the body
        of a loop (see `est.make_rng`).
    """
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise TypeError(f"`est.layers.dropout` needs a number as `rate`; got {rate!r}.")
    if not 0 <= rate < 1:
        raise ValueError(f"`est.layers.dropout` needs a rate of at least 0 and less than 1; got {rate!r}.")
    x = as_input("dropout", inputs, at_least=0)
    if not is_training("dropout", training) or rate == 0:
        return x
    key = make_rng(name or "dropout")
    # As in TensorFlow, a seed selects a sequence of masks and not one mask: each step has another. Here each tower
    # does, too.
    if seed is not None:
        key = jax.random.fold_in(key, seed)
    mask = jax.random.bernoulli(key, 1 - rate, _shape(x, noise_shape))
    # Not a product with the mask: zero times an input that is infinite or NaN would be NaN.
    return jnp.where(mask, x / (1 - rate), 0)


def _shape(x: jax.Array, noise_shape: Sequence[int | None] | None) -> tuple[int, ...]:
    if noise_shape is None:
        return x.shape
    sizes = tuple(noise_shape)
    if len(sizes) == x.ndim:
        shape = tuple(size if one is None else one for one, size in zip(sizes, x.shape, strict=True))
        if all(one in (1, size) for one, size in zip(shape, x.shape, strict=True)):
            return shape
    raise ValueError(
        f"`est.layers.dropout` got noise_shape={noise_shape!r} for inputs of shape {x.shape}. Give 1 or None for each "
        "dimension, or its size."
    )
