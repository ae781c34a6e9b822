"""Programs of steps: jitted, donated, compiled before their first call, with loops that make one of several steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.runtime._jax_settings import debugging, settings_of_this_thread
from estimator.runtime._shared_programs import compile_shared
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
    """A pure function that is jitted, and compiled where Ctrl-C does no harm before its first call. Programs that are
    the same share what is compiled (`runtime/_shared_programs.py`).

    >>> program = Program(lambda x: 2 * x)
    >>> print(program.is_new(), program(jnp.ones(2)), program.is_new())
    True [2. 2.] False

    Args:
      run: the function.
      donate: whether the memory of its first argument may be reused.
      jit: False for a function that runs several programs, each compiled by itself.
      numbers_apart: whether numbers that it only hands out, whatever its arguments are, stay out of the program.
    """

    def __init__(
        self, run: Callable[..., Any], donate: bool = False, jit: bool = True, numbers_apart: bool = False
    ) -> None:
        self._run: Any = jax.jit(run, donate_argnums=0 if donate else ()) if jit else run
        self._jit = jit
        self._numbers_apart = numbers_apart
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._newest: dict[Hashable, Callable[..., Any]] = {}
        self._called_with: set[int] = set()

    def is_new(self, rows: int = 0) -> bool:
        """Says whether the next call compiles it, as far as is known."""
        return rows not in self._called_with

    def __call__(self, *args: Any, rows: int = 0) -> Any:
        """Calls the function.

        Args:
          rows: of the batch among the arguments; another number of them is another program.
        """
        key = rows, settings_of_this_thread()
        program = self._newest.get(key)
        if program is not None:
            try:
                return program(*args)
            except (TypeError, ValueError):
                # Before it runs, a compiled program refuses arguments that are not like those it was compiled for.
                if self._compiled.get((_signature(args), key[1])) is program:
                    raise
        return self._program_for(args, key)(*args)

    def _program_for(self, args: tuple[Any, ...], key: tuple[int, Hashable]) -> Callable[..., Any]:
        # If the caller traces this program in its own, it is compiled as a part of that one.
        if not self._jit or debugging() or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return self._run
        kind = _signature(args), key[1]
        if kind not in self._compiled:
            traced = self._run.trace(*args)
            if len(traced.jaxpr.jaxpr.invars) != len(jax.tree.leaves(args)):
                return self._run  # a tracer has escaped and is one more argument, which jax refuses in the call
            apart = _with_numbers_apart(traced) if self._numbers_apart else None
            self._compiled[kind] = apart or compile_shared(traced, kind[0]) or self._run
            if self._compiled[kind] is self._run:
                compile_first(self._run, *args)
        self._newest[key] = self._compiled[kind]
        self._called_with.add(key[0])
        return self._newest[key]

    def trace(self, *args: Any) -> jax.stages.Traced:
        """The program for such arguments; `jax.ShapeDtypeStruct`s will do."""
        return self._run.trace(*args)


def _signature(args: tuple[Any, ...]) -> Hashable:
    """Equal for arguments that one compiled program takes."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((jax.typeof(x), _place(x)) for x in leaves)


def abstract_argument(x: jax.Array) -> jax.ShapeDtypeStruct:
    """An array without its values, for which jax lowers the program that it lowers for the array."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=_place(x), weak_type=kind.weak_type)


def _place(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        return jax.core.Tracer
    return getattr(x, "format", x.sharding) if getattr(x, "committed", False) else None


def _with_numbers_apart(traced: jax.stages.Traced) -> Callable[..., Any] | None:
    """The program with the numbers among its results as arguments, so that others give the same program: such as the
    learning rate in a new State. None if it has no such numbers."""
    from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun  # imports Pallas

    numbers: dict[int, Any] = {}
    for i, x in enumerate(traced.jaxpr.jaxpr.outvars):
        kind: Any = x.aval
        if isinstance(x, Literal) and jnp.issubdtype(kind.dtype, jnp.floating):
            # A number of Python is of a weak type.
            numbers[i] = float(x.val) if kind.weak_type else np.asarray(x.val, kind.dtype)
    if not numbers:
        return None
    places = range(len(traced.jaxpr.jaxpr.outvars))
    rest, used = dce_jaxpr(traced.jaxpr.jaxpr, [i not in numbers for i in places])
    run = jaxpr_as_fun(ClosedJaxpr(rest, traced.jaxpr.consts))
    structure = traced.out_tree

    def together(arrays: list[Any], numbers: dict[int, Any]) -> Any:
        results = iter(run(*arrays))
        return jax.tree.unflatten(structure, [numbers[i] if i in numbers else next(results) for i in places])

    def select(args: tuple[Any, ...]) -> list[Any]:
        return [leaf for leaf, is_used in zip(jax.tree.leaves(args), used, strict=True) if is_used]

    shared = Program(together)
    return lambda *args: shared(select(args), numbers)


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
