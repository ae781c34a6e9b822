"""Gradient descent, with and without momentum."""

from __future__ import annotations

import functools
from collections import namedtuple

import jax
import optax

from estimator.optim._given_rate import LearningRate, with_learning_rate
from estimator.optim._optimizer import Optimizer
from estimator.optim._sparse_update import RowWise
from estimator.train._rule import row_wise
from estimator.train._weight_decay import with_weight_decay


class GradientDescentOptimizer(Optimizer):
    """Gradient descent: `var -= learning_rate * gradient`.

    >>> import estimator as est
    >>> optimizer = est.train.GradientDescentOptimizer(0.1)

    Args:
      learning_rate: as for `est.train.AdamOptimizer`; so are the arguments of this name of all optimizers here.
      use_locking: without effect: XLA orders what it compiles.
      name: of its entries in `State.slots`.
    """

    def __init__(self, learning_rate: LearningRate, use_locking: bool = False, name: str = "GradientDescent") -> None:
        super().__init__(with_learning_rate(type(self).__name__, optax.sgd, learning_rate), name)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum: `accum = momentum * accum + gradient`, `var -= learning_rate * accum`.

    With a sparse gradient it moves only the looked-up rows. Slot: "momentum".

    >>> import estimator as est
    >>> optimizer = est.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      momentum: the factor on the slot.
      use_nesterov: Nesterov's momentum: `var -= learning_rate * (gradient + momentum * accum)`.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        make = functools.partial(_momentum, momentum=momentum, use_nesterov=use_nesterov)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class MomentumWOptimizer(Optimizer):
    """`est.train.MomentumOptimizer` with decoupled weight decay, as in `tf.contrib.opt`.

    >>> import estimator as est
    >>> optimizer = est.train.MomentumWOptimizer(1e-4, 0.1, 0.9)

    Args:
      weight_decay: as for `est.train.AdamWOptimizer`.
      learning_rate, momentum, use_locking, name, use_nesterov: as for `est.train.MomentumOptimizer`.
    """

    def __init__(
        self,
        weight_decay: float,
        learning_rate: LearningRate,
        momentum: float,
        use_locking: bool = False,
        name: str = "MomentumW",
        use_nesterov: bool = False,
    ) -> None:
        def make(rate: jax.Array) -> RowWise:
            return RowWise(*with_weight_decay(_momentum(rate, momentum, use_nesterov), weight_decay))

        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


MomentumState = namedtuple("MomentumState", ["momentum"])


def _momentum(rate: jax.Array, momentum: float, use_nesterov: bool) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, accum: jax.Array) -> tuple[jax.Array, ...]:
        # As in TensorFlow, the accumulator does not include the learning rate: a new rate scales earlier gradients,
        # too.
        accum = momentum * accum + gradient
        return value - rate * (gradient + momentum * accum if use_nesterov else accum), accum

    return row_wise(rule, MomentumState)
