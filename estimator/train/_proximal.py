"""Optimizers with regularization in their step, which makes weights zero: FTRL, the proximal ones, AdagradDA."""

from __future__ import annotations

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import optax

from estimator.core._frame import current_frame
from estimator.optim._arguments import check_global_step
from estimator.optim._given_rate import LearningRate, with_learning_rate
from estimator.optim._optimizer import Optimizer
from estimator.optim._sparse_update import RowWise
from estimator.train._adaptive import AdagradState, check_accumulator
from estimator.train._rule import row_wise


class FtrlOptimizer(Optimizer):
    """FTRL-proximal, the default of linear models: Adagrad with L1 and L2 regularization, L1 making weights zero.

    With a sparse gradient only the looked-up rows change. Slots: "accum", "linear".

    >>> import estimator as est
    >>> est.train.FtrlOptimizer(0.2, l1_regularization_strength=0.01).get_name()
    'Ftrl'

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      learning_rate_power: of the accumulator in the step; at most 0, and 0 for a constant rate.
      initial_accumulator_value: what "accum" begins with; at least 0.
      l1_regularization_strength, l2_regularization_strength: at least 0.
      accum_name, linear_name: without effect.
      l2_shrinkage_regularization_strength: at least 0; of a penalty that is added only to the gradient, and so does not
        grow with the accumulator.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
    ) -> None:
        caller = type(self).__name__
        check_accumulator(caller, initial_accumulator_value >= 0, initial_accumulator_value, "of at least 0")
        if learning_rate_power > 0:
            raise ValueError(f"`{caller}` needs a learning_rate_power of at most 0; got {learning_rate_power!r}.")
        _check_strengths(
            caller, l1_regularization_strength, l2_regularization_strength, l2_shrinkage_regularization_strength
        )
        make = functools.partial(
            _ftrl,
            power=learning_rate_power,
            initial=initial_accumulator_value,
            l1=l1_regularization_strength,
            l2=l2_regularization_strength,
            shrinkage=l2_shrinkage_regularization_strength,
        )
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class ProximalAdagradOptimizer(Optimizer):
    """Adagrad with L1 and L2 regularization in its step. Slot: "accumulator".

    With a sparse gradient only the looked-up rows change.

    >>> import estimator as est
    >>> optimizer = est.train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.01)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      initial_accumulator_value: as for `est.train.AdagradOptimizer`.
      l1_regularization_strength, l2_regularization_strength: at least 0.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
    ) -> None:
        caller = type(self).__name__
        check_accumulator(caller, initial_accumulator_value > 0, initial_accumulator_value)
        l1, l2 = _check_strengths(caller, l1_regularization_strength, l2_regularization_strength)
        make = functools.partial(_proximal_adagrad, initial=initial_accumulator_value, l1=l1, l2=l2)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class ProximalGradientDescentOptimizer(Optimizer):
    """Gradient descent with L1 and L2 regularization in its step.

    With a sparse gradient only the looked-up rows change.

    >>> import estimator as est
    >>> optimizer = est.train.ProximalGradientDescentOptimizer(0.1, l1_regularization_strength=0.01)

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      l1_regularization_strength, l2_regularization_strength: at least 0.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalGradientDescent",
    ) -> None:
        l1, l2 = _check_strengths(type(self).__name__, l1_regularization_strength, l2_regularization_strength)
        make = functools.partial(_proximal_descent, l1=l1, l2=l2)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class AdagradDAOptimizer(Optimizer):
    """Adagrad by dual averaging: a variable follows from the sums of all its gradients, not from its value before.

    With a sparse gradient only the looked-up rows change. Slots: "gradient_accumulator",
    "gradient_squared_accumulator".

    >>> import estimator as est
    >>> def make_optimizer():  # in a model_fn
    ...     return est.train.AdagradDAOptimizer(0.1, est.global_step())

    Args:
      learning_rate, use_locking, name: as for `est.train.AdamOptimizer`.
      global_step: `est.global_step()`.
      initial_gradient_squared_accumulator_value: what the second slot begins with; above 0.
      l1_regularization_strength, l2_regularization_strength: at least 0.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        global_step: jax.Array,
        initial_gradient_squared_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "AdagradDA",
    ) -> None:
        caller, initial = type(self).__name__, initial_gradient_squared_accumulator_value
        check_global_step(caller, current_frame(caller), global_step)
        check_accumulator(caller, initial > 0, initial)
        l1, l2 = _check_strengths(caller, l1_regularization_strength, l2_regularization_strength)
        make = functools.partial(_adagrad_da, initial=initial, l1=l1, l2=l2)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


# The slots, by TensorFlow's names.
FtrlState = namedtuple("FtrlState", ["accum", "linear"])
AdagradDAState = namedtuple("AdagradDAState", ["gradient_accumulator", "gradient_squared_accumulator"])


def _check_strengths(caller: str, *strengths: float) -> tuple[float, ...]:
    if min(strengths) < 0:
        raise ValueError(f"`{caller}` needs regularization strengths of at least 0; got {strengths}.")
    return strengths


def _ftrl(rate: jax.Array, power: float, initial: float, l1: float, l2: float, shrinkage: float) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, accum: jax.Array, linear: jax.Array) -> tuple[jax.Array, ...]:
        def root(x: jax.Array) -> jax.Array:
            # TensorFlow has this branch, too: a root and a power round differently.
            return jnp.sqrt(x) if power == -0.5 else x**-power

        new_accum = accum + gradient * gradient
        per_rate = root(new_accum) / rate
        # The shrinkage is not in the accumulator, so that it does not lower the learning rate.
        linear = linear + (gradient + 2 * shrinkage * value - (per_rate - root(accum) / rate) * value)
        shrunk = _shrink(-linear, l1) / (per_rate + 2 * l2)
        return shrunk, new_accum, linear

    return row_wise(rule, FtrlState, accum=initial)


def _proximal_adagrad(rate: jax.Array, initial: float, l1: float, l2: float) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, accum: jax.Array) -> tuple[jax.Array, ...]:
        accum = accum + gradient * gradient
        # Penalties are scaled by each element's own rate, as in TensorFlow's kernel.
        return _proximal(value, gradient, rate * jax.lax.rsqrt(accum), l1, l2), accum

    return row_wise(rule, AdagradState, accumulator=initial)


def _proximal_descent(rate: jax.Array, l1: float, l2: float) -> RowWise:
    return row_wise(lambda gradient, value: (_proximal(value, gradient, rate, l1, l2),), optax.EmptyState)


def _adagrad_da(rate: jax.Array, initial: float, l1: float, l2: float) -> RowWise:
    def rule(gradient: jax.Array, value: jax.Array, total: jax.Array, squares: jax.Array) -> tuple[jax.Array, ...]:
        # The number of gradients, including this one. TensorFlow also adds 1 to `global_step`.
        step = current_frame("AdagradDAOptimizer").global_step + 1
        total, squares = total + gradient, squares + gradient * gradient
        # If the mean gradient is at most `l1`, `|total| <= l1 * step`, the weight is zero.
        return -rate * _shrink(total, l1 * step) / (l2 * step * rate + jnp.sqrt(squares)), total, squares

    return row_wise(rule, AdagradDAState, gradient_squared_accumulator=initial)


def _proximal(value: jax.Array, gradient: jax.Array, rate: jax.Array, l1: float, l2: float) -> jax.Array:
    # This minimizes both penalties plus the squared distance from the plain step; only L1 makes exact zeros.
    return _shrink(value - rate * gradient, rate * l1) / (1 + rate * l2)


def _shrink(x: jax.Array, by: jax.Array | float) -> jax.Array:
    """The array moved towards zero, where it stops."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - by, 0)
