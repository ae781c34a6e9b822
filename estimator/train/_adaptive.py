"""Optimizers that divide by the root of squared gradients: Adagrad, Adadelta, RMSProp."""

from __future__ import annotations

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp

from estimator.optim._given_rate import LearningRate, with_learning_rate
from estimator.optim._optimizer import Optimizer
from estimator.optim._sparse_update import RowWise
from estimator.train._rule import row_wise


class AdagradOptimizer(Optimizer):
    """Adagrad: `accum += gradient**2`, `var -= learning_rate * gradient / sqrt(accum)`.

    It has no epsilon, while `optax.adagrad` adds 1e-7 under the root. With a sparse gradient only the looked-up rows
    change. Slot: "accumulator".

    >>> import estimator as est
    >>> optimizer = est.train.AdagradOptimizer(0.1, initial_accumulator_value=0.01)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      initial_accumulator_value: what the slot begins with; above 0.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        check_accumulator(type(self).__name__, initial_accumulator_value > 0, initial_accumulator_value)
        make = functools.partial(_adagrad, initial=initial_accumulator_value)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class AdadeltaOptimizer(Optimizer):
    """Adadelta: the gradient times the root of the mean of squared updates, over the root of the mean of its square.

    With a sparse gradient only the looked-up rows change. Slots: "accum", "accum_update".

    >>> import estimator as est
    >>> optimizer = est.train.AdadeltaOptimizer(1.0, rho=0.9)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      rho: decay of the two means.
      epsilon: is added to both under the roots.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        make = functools.partial(_adadelta, rho=rho, epsilon=epsilon)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class RMSPropOptimizer(Optimizer):
    """RMSProp: the gradient over the root of the mean of its square, with momentum.

    The slot "rms" begins with ones, and epsilon is under the root, unlike in `optax.rmsprop`. With a sparse gradient
    only the looked-up rows change. Slots: "rms", "momentum", and "mg" if it is centered.

    >>> import estimator as est
    >>> optimizer = est.train.RMSPropOptimizer(0.01, momentum=0.9, centered=True)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      decay: of the means.
      momentum: the factor on the last update, which includes its learning rate.
      epsilon: is added under the root.
      centered: whether the square of the mean is subtracted from the mean of the square.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        make = functools.partial(_rmsprop, decay=decay, momentum=momentum, epsilon=epsilon, centered=centered)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


# The slots, by TensorFlow's names.
AdagradState = namedtuple("AdagradState", ["accumulator"])
AdadeltaState = namedtuple("AdadeltaState", ["accum", "accum_update"])
RMSPropState = namedtuple("RMSPropState", ["rms", "momentum"])
CenteredRMSPropState = namedtuple("CenteredRMSPropState", ["rms", "mg", "momentum"])


def check_accumulator(caller: str, is_right: bool, value: float, bound: str = "above 0") -> None:
    if not is_right:
        raise ValueError(f"`{caller}` needs an initial_accumulator_value {bound}; got {value!r}.")


def _adagrad(rate: jax.Array, initial: float) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, accum: jax.Array) -> tuple[jax.Array, ...]:
        accum = accum + gradient * gradient
        # No epsilon, as in TensorFlow: the accumulator starts above 0 and never falls.
        return value - rate * gradient * jax.lax.rsqrt(accum), accum

    return row_wise(rule, AdagradState, accumulator=initial)


def _adadelta(rate: jax.Array, rho: float, epsilon: float) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, accum: jax.Array, moved: jax.Array) -> tuple[jax.Array, ...]:
        accum = accum * rho + gradient * gradient * (1 - rho)
        # `moved` starts at zero, so that `epsilon` sets the size of the first steps, which are small.
        step = jnp.sqrt(moved + epsilon) * jax.lax.rsqrt(accum + epsilon) * gradient
        return value - rate * step, accum, moved * rho + step * step * (1 - rho)

    return row_wise(rule, AdadeltaState)


def _rmsprop(rate: jax.Array, decay: float, momentum: float, epsilon: float, centered: bool) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, rms: jax.Array, *means: jax.Array) -> tuple[jax.Array, ...]:
        # A centered one has one slot more, the mean of gradients.
        *mg, step = means
        rms = rms + (gradient * gradient - rms) * (1 - decay)
        mg = [mean + (gradient - mean) * (1 - decay) for mean in mg]
        # As in TensorFlow, the momentum includes the learning rate, and the root epsilon: earlier steps keep their
        # rate.
        step = step * momentum + rate * gradient * jax.lax.rsqrt(rms - sum(m * m for m in mg) + epsilon)
        return value - step, rms, *mg, step

    # TensorFlow starts the mean of squares at 1, optax at 0, which makes the first steps larger.
    return row_wise(rule, CenteredRMSPropState if centered else RMSPropState, rms=1.0)
