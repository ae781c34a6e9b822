"""Regularizers: functions of a variable's value that give a term of the loss.

As in TensorFlow, nothing adds them to a loss by itself: `est.losses.get_regularization_loss()` is their sum.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from estimator.core._argument_checks import widen
from estimator.core._typing import PyTree

__all__ = ["l1", "l1_l2", "l2"]

Regularizer = Callable[[PyTree], jax.Array]


def l1(scale: float) -> Regularizer:
    """`scale` times the sum of the absolute values, as `tf.contrib.layers.l1_regularizer`.

    >>> print(l1(0.5)(jnp.array([-1.0, 3.0])))
    2.0
    """
    return l1_l2(_check_scale("l1", scale), 0.0)


def l2(scale: float) -> Regularizer:
    """`scale` times half the sum of squares, as `tf.contrib.layers.l2_regularizer`; Keras' `l2` has no half.

    >>> print(l2(0.5)(jnp.array([-1.0, 3.0])))
    2.5
    """
    return l1_l2(0.0, _check_scale("l2", scale))


def l1_l2(scale_l1: float = 1.0, scale_l2: float = 1.0) -> Regularizer:
    """The sum of both, as `tf.contrib.layers.l1_l2_regularizer`. The value may be a pytree of arrays.

    Sums are taken in float32 at least.

    >>> print(l1_l2(0.5, 0.5)(jnp.array([-1.0, 3.0])))
    4.5

    Raises:
      TypeError: a scale is not a number.
      ValueError: it is negative.
    """
    scale_l1, scale_l2 = _check_scale("l1_l2", scale_l1), _check_scale("l1_l2", scale_l2)

    def regularize(value: PyTree) -> jax.Array:
        terms = []
        for leaf in map(widen, map(jnp.asarray, jax.tree.leaves(value))):
            # Left out for a scale of 0: zero times an infinite weight would be NaN.
            if scale_l1:
                terms.append(scale_l1 * jnp.sum(jnp.abs(leaf)))
            if scale_l2:
                terms.append(scale_l2 / 2 * jnp.sum(jnp.square(leaf)))
        return sum(terms[1:], terms[0]) if terms else jnp.zeros(())

    return regularize


def _check_scale(name: str, scale: float) -> float:
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"`est.regularizers.{name}` needs a number as its scale; got {scale!r}.")
    if scale < 0:
        raise ValueError(f"`est.regularizers.{name}` needs a scale of at least 0; got {scale!r}.")
    return float(scale)
