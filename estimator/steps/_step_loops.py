"""Steps within programs: what they carry, and loops that make one program of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from estimator.core._placement import Read
from estimator.core._state import State
from estimator.core._typing import PyTree, Tree
from estimator.runtime._program import Program
from estimator.steps._model_info import ModelInfo

C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")


class Carry(NamedTuple):
    """The part of a State that steps pass on from one to the next on the devices: all but its key, which never changes.

    Programs take the key beside it as plain numbers: jax takes typed keys on a slower path (some 8 us per call).
    """

    variables: dict[str, PyTree]
    slots: dict[str, PyTree]
    global_step: jax.Array


def carry_of(state: State) -> Carry:
    return Carry(state.variables, state.slots, state.global_step)


def state_of(carry: Carry, key_data: jax.Array) -> State:
    return State(*carry, jax.random.wrap_key_data(key_data))


def compile_read(info: ModelInfo, step: Read[Tree]) -> Read[Tree]:
    """The compiled `step(state, features, labels)`, which leaves the state as it is."""
    # No shardings are given: the state may be from TRAIN, with slots, or from this mode, without.
    return info.placement.split_read(step) or Program(step)


def loop_over_all(step: Callable[..., tuple[C, T]], carry: C, batches: tuple[PyTree, ...]) -> tuple[C, T]:
    """Makes a step, `(carry, features, labels) -> (carry, outputs)`, with each of the stacked batches. The outputs are
    stacked as well."""
    return jax.lax.scan(lambda carry, batch: step(carry, *batch), carry, batches)


def loop_over_some(
    step: Callable[..., tuple[C, T, R]], carry: C, batches: tuple[PyTree, ...], start: jax.Array | int, stop: jax.Array
) -> tuple[C, T, R]:
    """Makes a step with each of the stacked batches from `start` to `stop`.

    Where to stop is an argument of the program: XLA would take a loop of one step apart.

    Args:
      step: `(carry, features, labels) -> (carry, outputs, reported)`.

    Returns:
      The carry, the outputs of all steps in arrays with room for all batches, and what the last step reported.
    """
    _, of_one, reported = jax.eval_shape(step, carry, *jax.tree.map(lambda x: x[0], batches))

    def body(i: jax.Array, before: tuple[C, T, R]) -> tuple[C, T, R]:
        carry, outputs, reported = step(before[0], *jax.tree.map(lambda x: x[i], batches))
        return carry, jax.tree.map(lambda x, y: x.at[i].set(y), before[1], outputs), reported

    # A loop needs all that it carries before its first step.
    room = jax.tree.leaves(batches)[0].shape[0]
    outputs = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), of_one)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), reported)
    return jax.lax.fori_loop(start, stop, body, (carry, outputs, nothing))
