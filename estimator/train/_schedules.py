"""Learning rate schedules with TensorFlow's arguments and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Step = jax.Array | np.ndarray | None
Rate = jax.Array | Callable[[Any], jax.Array]


def exponential_decay(
    learning_rate: float | jax.Array,
    global_step: Step,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    """`learning_rate * decay_rate ** (global_step / decay_steps)`.

    All schedules of `est.train` return, given `est.global_step()`, the rate of this step, a scalar: for an optimizer of
    `est.train`, for `est.Optimizer(optax.adam, learning_rate=rate)`, for a summary, or to compute with. Given None
    instead of the step they return a function of it, which an optimizer of `est.train` or of optax takes too (optax
    counts its own updates).

    >>> import estimator as est
    >>> rate = est.train.exponential_decay(0.5, None, 10, 0.5, staircase=True)
    >>> print(rate(9), rate(10))
    0.5 0.25

    Args:
      learning_rate: in step 0; a number, or a scalar.
      global_step: `est.global_step()`, or None.
      decay_steps, decay_rate: as in the formula.
      staircase: whether the exponent is rounded down.
      name: without effect.

    Raises:
      TypeError: the step is a Python number, as with arguments in the order of optax, which leaves it out.
    """

    def rate_at(step: Any) -> jax.Array:
        return jnp.asarray(learning_rate * decay_rate ** _periods(step, decay_steps, staircase))

    return _apply_schedule("exponential_decay", global_step, rate_at)


def natural_exp_decay(
    learning_rate: float | jax.Array,
    global_step: Step,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    """`learning_rate * exp(-decay_rate * global_step / decay_steps)`.

    >>> import estimator as est
    >>> rate = est.train.natural_exp_decay(0.5, None, 10, 0.5)
    >>> print(f"{rate(0):.3f} {rate(20):.3f}")
    0.500 0.184

    Args:
      learning_rate, global_step, decay_steps, decay_rate, staircase, name: as for `est.train.exponential_decay`.
    """

    def rate_at(step: Any) -> jax.Array:
        return learning_rate * jnp.exp(-decay_rate * _periods(step, decay_steps, staircase))

    return _apply_schedule("natural_exp_decay", global_step, rate_at)


def inverse_time_decay(
    learning_rate: float | jax.Array,
    global_step: Step,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    """`learning_rate / (1 + decay_rate * global_step / decay_steps)`.

    >>> import estimator as est
    >>> rate = est.train.inverse_time_decay(0.5, None, 10, 1.0)
    >>> print(f"{rate(0):.3f} {rate(10):.3f}")
    0.500 0.250

    Args:
      learning_rate, global_step, decay_steps, decay_rate, staircase, name: as for `est.train.exponential_decay`.
    """

    def rate_at(step: Any) -> jax.Array:
        return learning_rate / (1 + decay_rate * _periods(step, decay_steps, staircase))

    return _apply_schedule("inverse_time_decay", global_step, rate_at)


def polynomial_decay(
    learning_rate: float | jax.Array,
    global_step: Step,
    decay_steps: float,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> Any:
    """A decay from `learning_rate` to `end_learning_rate` by `(1 - global_step / decay_steps) ** power`.

    >>> import estimator as est
    >>> rate = est.train.polynomial_decay(0.5, None, 10, 0.25)
    >>> print(f"{rate(0):.3f} {rate(10):.3f}")
    0.500 0.250

    Args:
      learning_rate, global_step, name: as for `est.train.exponential_decay`.
      decay_steps: the step of the end, after which the rate stays.
      end_learning_rate, power: as in the formula.
      cycle: whether it begins again after the end, each time for the next multiple of `decay_steps` in all.
    """

    def rate_at(step: Any) -> jax.Array:
        step, end = _float(step), _float(decay_steps)
        if cycle:
            # In step 0 `ceil` gives 0, and `step / end` would divide by zero.
            end = decay_steps * jnp.maximum(jnp.ceil(step / decay_steps), 1)
        else:
            step = jnp.minimum(step, decay_steps)
        return (learning_rate - end_learning_rate) * (1 - step / end) ** power + end_learning_rate

    return _apply_schedule("polynomial_decay", global_step, rate_at)


def piecewise_constant(
    x: Step, boundaries: Sequence[float], values: Sequence[float | jax.Array], name: str | None = None
) -> Any:
    """`values[0]` up to and including step `boundaries[0]`, then `values[1]` up to `boundaries[1]`, and so on.

    `optax.piecewise_constant_schedule` changes at a boundary, one step earlier.

    >>> import estimator as est
    >>> rate = est.train.piecewise_constant(None, [10, 20], [0.5, 0.25, 0.125])
    >>> print(rate(10), rate(11), rate(21))
    0.5 0.25 0.125

    Args:
      x: `est.global_step()`, or None, as for `est.train.exponential_decay`.
      boundaries: steps, ascending.
      values: one more than boundaries.
      name: without effect.
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"`piecewise_constant` needs one value more than boundaries; got {len(values)} values and "
            f"{len(boundaries)} boundaries."
        )

    def rate_at(step: Any) -> jax.Array:
        # As in TensorFlow, the step of a boundary still has the value before it; in optax it has the value after it.
        piece = sum((jnp.asarray(step) > boundary).astype(jnp.int32) for boundary in boundaries)
        return jnp.stack([_float(value) for value in values])[piece]

    return _apply_schedule("piecewise_constant", x, rate_at)


def cosine_decay(
    learning_rate: float | jax.Array, global_step: Step, decay_steps: float, alpha: float = 0.0, name: str | None = None
) -> Any:
    """A decay from `learning_rate` to `alpha * learning_rate` along half a cosine.

    >>> import estimator as est
    >>> rate = est.train.cosine_decay(0.5, None, 10)
    >>> print(f"{rate(0):.3f} {rate(5):.3f}")
    0.500 0.250

    Args:
      learning_rate, global_step, name: as for `est.train.exponential_decay`.
      decay_steps: the step of the end, after which the rate stays.
      alpha: the fraction that is left.
    """

    def rate_at(step: Any) -> jax.Array:
        return learning_rate * ((1 - alpha) * _cosine(_fraction(step, decay_steps)) + alpha)

    return _apply_schedule("cosine_decay", global_step, rate_at)


def cosine_decay_restarts(
    learning_rate: float | jax.Array,
    global_step: Step,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
    name: str | None = None,
) -> Any:
    """`est.train.cosine_decay` that starts again and again (SGDR).

    >>> import estimator as est
    >>> rate = est.train.cosine_decay_restarts(0.5, None, 10)
    >>> print(f"{rate(5):.3f} {rate(10):.3f}")
    0.250 0.500

    Args:
      learning_rate, global_step, name: as for `est.train.exponential_decay`.
      first_decay_steps: the number of steps before the first restart.
      t_mul: by which each period is longer than the one before it. Below 1 the periods get shorter, and come to an end
        after `first_decay_steps / (1 - t_mul)` steps, where the rate stays at `alpha * learning_rate`.
      m_mul: by which its first rate is multiplied.
      alpha: the fraction that is left at the end of a period.

    Raises:
      ValueError: `t_mul` is not larger than 0.
    """
    if not t_mul > 0:
        raise ValueError(f"`est.train.cosine_decay_restarts` needs a t_mul larger than 0; got {t_mul!r}.")

    def rate_at(step: Any) -> jax.Array:
        done, ended = _float(step) / first_decay_steps, jnp.asarray(False)
        # Equal periods: the formula for a geometric series would divide by zero.
        if t_mul == 1.0:
            restarts = jnp.floor(done)
            done = done - restarts
        else:
            # The number of whole periods before this step: their lengths are a geometric series, solved for its number
            # of terms.
            left = 1 - done * (1 - t_mul)
            ended = left <= 0
            restarts = jnp.floor(jnp.log(jnp.where(ended, 1, left)) / math.log(t_mul))
            done = (done - (1 - t_mul**restarts) / (1 - t_mul)) / t_mul**restarts
        return learning_rate * ((1 - alpha) * m_mul**restarts * jnp.where(ended, 0, _cosine(done)) + alpha)

    return _apply_schedule("cosine_decay_restarts", global_step, rate_at)


def linear_cosine_decay(
    learning_rate: float | jax.Array,
    global_step: Step,
    decay_steps: float,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
    name: str | None = None,
) -> Any:
    """`learning_rate * ((alpha + linear) * cosine + beta)`, of a line from 1 to 0 and a cosine between 1 and 0.

    >>> import estimator as est
    >>> rate = est.train.linear_cosine_decay(0.5, None, 10, beta=0.0)
    >>> print(f"{rate(0):.3f} {rate(10):.3f}")
    0.500 0.000

    Args:
      learning_rate, global_step, name: as for `est.train.exponential_decay`.
      decay_steps: the step of the end, after which the rate stays.
      num_periods: of the cosine.
      alpha, beta: as in the formula.
    """

    def rate_at(step: Any) -> jax.Array:
        done = _fraction(step, decay_steps)
        # Twice, since `_cosine` falls over half a period.
        return learning_rate * ((alpha + 1 - done) * _cosine(2 * num_periods * done) + beta)

    return _apply_schedule("linear_cosine_decay", global_step, rate_at)


def _apply_schedule(caller: str, global_step: Any, rate_at: Callable[[Any], jax.Array]) -> Rate:
    if global_step is None:
        return rate_at
    # In optax's order, as in `cosine_decay(0.1, 1000, 0.01)`, decay_steps would be taken as the step without an error.
    if not isinstance(global_step, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"`est.train.{caller}` needs `est.global_step()` as global_step, or None, for a function of the step; got "
            f"{global_step!r}. Its arguments come in TensorFlow's order; optax has no argument for the step."
        )
    return rate_at(global_step)


def _float(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.result_type(float))


def _periods(step: Any, decay_steps: float, staircase: bool) -> jax.Array:
    periods = _float(step) / decay_steps
    return jnp.floor(periods) if staircase else periods


def _fraction(step: Any, decay_steps: float) -> jax.Array:
    return jnp.minimum(_float(step), decay_steps) / decay_steps


def _cosine(x: jax.Array) -> jax.Array:
    """A cosine from 1 at 0 to 0 at 1, and back."""
    return 0.5 * (1 + jnp.cos(math.pi * x))
