"""Programs of steps: jitted, donated, compiled before their first call, with loops that make one of several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.runtime._uninterrupted import compile_first

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


class Program:
    """A pure function that is jitted, and compiled where Ctrl-C does no harm before its first call.

    >>> program = Program(lambda x: 2 * x)
    >>> print(program.is_new(), program(jnp.ones(2)), program.is_new())
    True [2. 2.] False

    Args:
      run: the function.
      donate: whether the memory of its first argument may be reused.
      jit: False for a function that runs several programs, each compiled by itself.
    """

    def __init__(self, run: Callable[..., Any], donate: bool = False, jit: bool = True) -> None:
        self._run: Any = jax.jit(run, donate_argnums=0 if donate else ()) if jit else run
        self._compiled_for: set[int] = set()

    def is_new(self, rows: int = 0) -> bool:
        """Says whether the next call compiles it, as far as is known."""
        return rows not in self._compiled_for

    def __call__(self, *args: Any, rows: int = 0) -> Any:
        """Calls the function.

        Args:
          rows: of the batch among the arguments; another number of them is another program.
        """
        # If the caller traces this program in its own, it is compiled as a part of that one.
        if rows not in self._compiled_for and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            compile_first(self._run, *args)
            self._compiled_for.add(rows)
        return self._run(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """The program for such arguments; `jax.ShapeDtypeStruct`s will do."""
        return self._run.trace(*args)


def loop_over_all(step: Callable[..., tuple[C, T]], carry: C, batches: tuple[PyTree, ...]) -> tuple[C, T]:
    """Makes a step, `(carry, features, labels) -> (carry, outputs)`, with each of the stacked batches. The outputs are
    stacked as well."""
    return jax.lax.scan(lambda carry, batch: step(carry, *batch), carry, batches)


def loop_over_some(
    step: Callable[..., tuple[C, T, R]],
    carry: C,
    batches: tuple[PyTree, ...],
    start: jax.Array | int,
    stop: jax.Array,
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
