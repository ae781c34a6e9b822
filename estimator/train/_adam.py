"""Adam, and what is like it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator.core._typing import PyTree
from estimator.optim._given_rate import LearningRate, with_learning_rate
from estimator.optim._optimizer import Optimizer
from estimator.optim._sparse_update import RowWise
from estimator.train._rule import apply_rule, complement, fill_slot
from estimator.train._weight_decay import with_weight_decay


class AdamOptimizer(Optimizer):
    """Adam, with TensorFlow's numbers: epsilon is added before the bias correction, not after it as in `optax.adam`.

    `m` and `v` estimate the mean of the gradient and of its square;
    `var -= learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)` in step t. With a sparse
    gradient all rows move, by their `m`, and a step takes time by the size of the table, as in TensorFlow.
    Slots: "m", "v".

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features - labels) ** 2)
    ...     rate = est.train.exponential_decay(0.5, est.global_step(), 10, 0.9)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.train.AdamOptimizer(rate).minimize(loss))
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones(2), jnp.zeros(2))
    >>> state, spec = model.train_step(state, jnp.ones(2), jnp.zeros(2))
    >>> print(state.variables["w"].round(3), est.learning_rates(state))
    0.5 {'Adam': 0.5}

    Args:
      learning_rate: a number; or a scalar that the model_fn has computed, as the functions of `est.train` do of
        `est.global_step()`, in towers too; or a function of the global step. `est.learning_rates` and the log have it.
        It is the program's: a number that was changed counts from the next start on, as in TensorFlow.
      beta1, beta2: decays of `m` and `v`.
      epsilon: keeps the quotient finite.
      use_locking: without effect: XLA orders what it compiles.
      name: of its entries in `State.slots`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        make = functools.partial(_adam, beta1=beta1, beta2=beta2, epsilon=epsilon)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class LazyAdamOptimizer(Optimizer):
    """`est.train.AdamOptimizer`, which changes only the looked-up rows of a table with a sparse gradient, and their
    `m` and `v`, as `tf.contrib.opt.LazyAdamOptimizer`.

    >>> import estimator as est
    >>> optimizer = est.train.LazyAdamOptimizer(1e-3)

    Args:
      learning_rate, beta1, beta2, epsilon, use_locking, name: as for `est.train.AdamOptimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        def make(rate: jax.Array) -> RowWise:
            # Row-wise, `m` and `v` of rows that were not looked up stay as they are: this is the only difference from
            # Adam.
            return RowWise(*_adam(rate, beta1, beta2, epsilon))

        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class AdamWOptimizer(Optimizer):
    """`est.train.AdamOptimizer` with decoupled weight decay, as `tf.contrib.opt.AdamWOptimizer`.

    >>> import estimator as est
    >>> optimizer = est.train.AdamWOptimizer(1e-4, learning_rate=1e-3)

    Args:
      weight_decay: `var -= weight_decay * var` in each step, whatever the learning rate (`optax.adamw` multiplies the
        two). With a sparse gradient the looked-up rows decay.
      learning_rate, beta1, beta2, epsilon, use_locking, name: as for `est.train.AdamOptimizer`.
    """

    def __init__(
        self,
        weight_decay: float,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "AdamW",
    ) -> None:
        def make(rate: jax.Array) -> optax.GradientTransformation:
            return with_weight_decay(_adam(rate, beta1, beta2, epsilon), weight_decay)

        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class AdaMaxOptimizer(Optimizer):
    """Adam by the largest gradient, as `tf.contrib.opt.AdaMaxOptimizer`: `v = max(beta2 * v, abs(gradient))`.

    With a sparse gradient only the looked-up rows change. Slots: "m", "v".

    >>> import estimator as est
    >>> optimizer = est.train.AdaMaxOptimizer(1e-3, beta1=0.8)

    Args:
      learning_rate, beta1, beta2, epsilon, use_locking, name: as for `est.train.AdamOptimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "AdaMax",
    ) -> None:
        make = functools.partial(_adamax, beta1=beta1, beta2=beta2, epsilon=epsilon)
        super().__init__(with_learning_rate(type(self).__name__, make, learning_rate), name)


class AdamState(NamedTuple):
    """Slots of `AdamOptimizer`; the powers of its decays in the next step, as in TensorFlow's checkpoints."""

    m: PyTree
    v: PyTree
    beta1_power: jax.Array
    beta2_power: jax.Array


class AdaMaxState(NamedTuple):
    """Slots of `AdaMaxOptimizer`, and the power of its decay in the next step."""

    m: PyTree
    v: PyTree
    beta1_power: jax.Array


def _adam(rate: jax.Array, beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    def init(params: optax.Params) -> AdamState:
        # The powers for the first step: TensorFlow starts and saves them in this way.
        return AdamState(fill_slot(params), fill_slot(params), jnp.float32(beta1), jnp.float32(beta2))

    def update(gradients: optax.Updates, state: AdamState, params: optax.Params) -> tuple[optax.Updates, AdamState]:
        # As in TensorFlow, one factor corrects both `m` and `v`, so that epsilon is added to the uncorrected root.
        step = rate * jnp.sqrt(1 - state.beta2_power) / (1 - state.beta1_power)

        def rule(gradient: jax.Array, value: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            # As TensorFlow's kernel computes it; `beta1 * m + (1 - beta1) * gradient` rounds in another way.
            m = m + (gradient - m) * complement(beta1)
            v = v + (gradient * gradient - v) * complement(beta2)
            return value - step * m / (jnp.sqrt(v) + epsilon), m, v

        powers = {"beta1_power": state.beta1_power * beta1, "beta2_power": state.beta2_power * beta2}
        return apply_rule(rule, gradients, params, state, "m", "v", scalars=powers)

    # Not row-wise: in TensorFlow's Adam `m` and `v` of all rows decay, even if a sparse gradient has only a few rows.
    return optax.GradientTransformation(init, update)


def _adamax(rate: jax.Array, beta1: float, beta2: float, epsilon: float) -> RowWise:
    def init(params: optax.Params) -> AdaMaxState:
        return AdaMaxState(fill_slot(params), fill_slot(params), jnp.float32(beta1))

    def update(gradients: optax.Updates, state: AdaMaxState, params: optax.Params) -> tuple[optax.Updates, AdaMaxState]:
        step = rate / (1 - state.beta1_power)

        def rule(gradient: jax.Array, value: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            m = m + (gradient - m) * complement(beta1)
            v = jnp.maximum(beta2 * v, jnp.abs(gradient))
            return value - step * m / (v + epsilon), m, v

        powers = {"beta1_power": state.beta1_power * beta1}
        return apply_rule(rule, gradients, params, state, "m", "v", scalars=powers)

    # Row-wise, as in TensorFlow, where a sparse gradient updates `m` and `v` of the looked-up rows only.
    return RowWise(init, update)
