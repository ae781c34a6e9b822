"""Optimizers that scale a gradient by whether its sign is the sign of its mean: PowerSign and AddSign."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator.core._rng import global_step
from estimator.core._typing import PyTree
from estimator.optim._given_rate import LearningRate, with_learning_rate
from estimator.optim._optimizer import Optimizer
from estimator.train._rule import apply_rule, fill_slot


class PowerSignOptimizer(Optimizer):
    """PowerSign, as in `tf.contrib.opt`: the gradient times `base ** (decay * sign(gradient) * sign(m))`.

    `m` is the moving average of the gradient; its slot has this name.

    >>> import estimator as est
    >>> optimizer = est.train.PowerSignOptimizer(0.1)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      base: of the power.
      beta: decay of the average.
      sign_decay_fn: a function of the global step, which returns `decay`; 1 if None.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        base: float = math.e,
        beta: float = 0.9,
        sign_decay_fn: Callable[[jax.Array], Any] | None = None,
        use_locking: bool = False,
        name: str = "PowerSignOptimizer",
    ) -> None:
        def make(rate: jax.Array) -> optax.GradientTransformation:
            # As TensorFlow computes it; `base ** agreement` rounds in another way.
            return _by_sign(rate, beta, sign_decay_fn, lambda agreement: jnp.exp(math.log(base) * agreement))

        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class AddSignOptimizer(Optimizer):
    """AddSign, as in `tf.contrib.opt`: the gradient times `alpha + decay * sign(gradient) * sign(m)`.

    `m` is the moving average of the gradient; its slot has this name.

    >>> import estimator as est
    >>> optimizer = est.train.AddSignOptimizer(0.1, alpha=1.0)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      alpha: the first summand.
      beta, sign_decay_fn: as for `est.train.PowerSignOptimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        alpha: float = 1.0,
        beta: float = 0.9,
        sign_decay_fn: Callable[[jax.Array], Any] | None = None,
        use_locking: bool = False,
        name: str = "AddSignOptimizer",
    ) -> None:
        def make(rate: jax.Array) -> optax.GradientTransformation:
            return _by_sign(rate, beta, sign_decay_fn, lambda agreement: alpha + agreement)

        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class SignState(NamedTuple):
    """Slot of `PowerSignOptimizer` and of `AddSignOptimizer`."""

    m: PyTree


def _by_sign(
    rate: jax.Array,
    beta: float,
    sign_decay_fn: Callable[[jax.Array], Any] | None,
    factor: Callable[[jax.Array], jax.Array],
) -> optax.GradientTransformation:
    def update(gradients: optax.Updates, state: SignState, params: optax.Params) -> tuple[optax.Updates, SignState]:
        # The global step, not a count of updates, which would start at 0 for a new optimizer.
        decay = 1.0 if sign_decay_fn is None else sign_decay_fn(global_step())

        def rule(gradient: jax.Array, value: jax.Array, m: jax.Array) -> tuple[jax.Array, ...]:
            m = m * beta + gradient * (1 - beta)
            return value - rate * factor(decay * jnp.sign(gradient) * jnp.sign(m)) * gradient, m

        return apply_rule(rule, gradients, params, state, "m")

    return optax.GradientTransformation(lambda params: SignState(fill_slot(params)), update)
