"""Learning rates that are given apart from the optax transformation: numbers, schedules, values of a model_fn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from estimator.core._rng import global_step
from estimator.optim._extra_args import call_update

LearningRate = float | jax.Array | Callable[[jax.Array], Any]


class GivenRateState(NamedTuple):
    """The optax state of an optimizer whose learning rate is given apart from it.

    Attributes:
      hyperparams: {"learning_rate": the one of the last step}, where `_learning_rate.py` finds it.
      hyperparams_states: {"learning_rate": ()}, as of a schedule: each step takes the rate that the program gives.
      inner: the state of the transformation.
    """

    hyperparams: dict[str, jax.Array]
    hyperparams_states: dict[str, tuple[()]]
    inner: optax.OptState


class GivenRate(optax.GradientTransformationExtraArgs):
    """A transformation that is made in each step, from the learning rate of that step."""

    make: Callable[[Any], optax.GradientTransformation]
    learning_rate: LearningRate


def with_learning_rate(caller: str, make: Any, given: LearningRate) -> GivenRate:
    """The transformation `make(rate)`, with the rate of each step."""
    if not callable(make):
        raise TypeError(
            f"`{caller}` got a learning_rate, and needs a function of it such as `optax.adam`; got {make!r}."
        )
    if not callable(given) and not _is_scalar(given):
        raise TypeError(
            f"`{caller}` needs a number as learning_rate, a scalar that the model_fn has computed, or a function of "
            f"the global step; got {given!r}."
        )

    def now() -> jax.Array:
        # In one dtype whatever a schedule returns, since a loop of steps carries the rate in its state.
        rate = given(global_step()) if callable(given) else given
        return jnp.asarray(rate, jnp.result_type(float))

    def init(params: optax.Params) -> GivenRateState:
        rate = now()
        return GivenRateState({"learning_rate": rate}, {"learning_rate": ()}, make(rate).init(params))

    def update(
        gradients: optax.Updates,
        state: GivenRateState,
        params: optax.Params | None = None,
        learning_rate: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, GivenRateState]:
        # If the model_fn has computed the rate, `given` is a tracer of that run, which may have ended in a tower.
        rate = now() if learning_rate is None else learning_rate
        steps, inner = call_update(make(rate), gradients, state.inner, params, extra)
        return steps, state._replace(hyperparams={"learning_rate": rate}, inner=inner)

    transformation = GivenRate(init, update)
    transformation.make, transformation.learning_rate = make, given
    return transformation


def to_carry(learning_rate: LearningRate | None) -> jax.Array | None:
    """Leaf that a train_op carries to where the update is made: a value that the run of a model_fn has computed, and 1.

    Two numbers, so that the sum over the towers' still says which value it is. Others are known there too: None.
    """
    if not isinstance(learning_rate, jax.core.Tracer):
        return None
    dtype = jnp.result_type(float)
    return jnp.stack([jax.lax.stop_gradient(learning_rate).astype(dtype).reshape(()), jnp.ones((), dtype)])


def read_carried(pair: jax.Array | None) -> dict[str, jax.Array]:
    """The learning rate, as an argument of `GivenRate`'s update; none if it is known there."""
    return {} if pair is None else {"learning_rate": pair[0] / pair[1]}


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, jax.Array | np.ndarray | np.generic) and value.size == 1
    )
