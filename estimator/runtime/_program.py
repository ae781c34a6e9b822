"""Programs: functions that are jitted, donated, and compiled before their first call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from estimator.runtime._jax_settings import debugging, settings_of_this_thread
from estimator.runtime._shared_programs import compile_shared
from estimator.runtime._uninterrupted import compile_first

T = TypeVar("T")

# XLA takes up to 0.6 off the time to compile initial values, which are the same numbers, drawn as fast. (At level 0
# they would take four times as long, and differ in their last bits.)
_QUICKLY = {"xla_backend_optimization_level": 1}


class Program:
    """A pure function that is jitted, and compiled where Ctrl-C does no harm before its first call. Programs that are
    the same share what is compiled (`runtime/_shared_programs.py`).

    >>> import jax.numpy as jnp
    >>> program = Program(lambda x: 2 * x)
    >>> print(program.is_new(), program(jnp.ones(2)), program.is_new())
    True [2. 2.] False

    Args:
      run: the function.
      donate: the numbers of the arguments whose memory may be reused; True for the first one.
      jit: False for a function that runs several programs, each compiled by itself.
      split: makes several programs of what was traced, and returns what calls them; None if one is as good.
      once: whether it runs once for each compilation, which is to be quick then.
      **shardings: `in_shardings` and `out_shardings` of `jax.jit`. Without them, arrays stay where they are.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        donate: bool | Sequence[int] = False,
        jit: bool = True,
        split: Callable[[jax.stages.Traced], Callable[..., Any] | None] | None = None,
        once: bool = False,
        **shardings: Any,
    ) -> None:
        donated = (0,) if donate is True else donate or ()
        self._make = functools.partial(jax.jit, run, donate_argnums=donated, **shardings)
        self._run: Any = self._make() if jit else run
        self._once = once
        self._jit = jit
        self._split = split
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._newest: dict[Hashable, Callable[..., Any]] = {}

    @functools.cached_property
    def _alone(self) -> Any:
        """The function to compile by itself; as a part of another program it can have no options."""
        # Not before the first call: until then the user may still choose the devices.
        is_quick = self._once and jax.default_backend() == "cpu" and not _are_set_by_user(_QUICKLY)
        return self._make(compiler_options=_QUICKLY) if is_quick else self._run

    def is_new(self) -> bool:
        """Returns whether the next call compiles it, as far as is known."""
        return not self._newest

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
            traced = self._alone.trace(*args)
            if len(traced.jaxpr.jaxpr.invars) != len(jax.tree.leaves(args)):
                return self._run  # a tracer has escaped and is one more argument, which jax refuses in the call
            several = self._split(traced) if self._split else None
            self._compiled[kind] = several or compile_shared(traced, kind[0]) or self._run
            if self._compiled[kind] is self._run:
                compile_first(self._run, *args)
        self._newest[key] = self._compiled[kind]
        return self._newest[key]

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the program for arguments of these types; `jax.ShapeDtypeStruct`s are enough."""
        return self._alone.trace(*args)

    def export(self, platforms: Sequence[str] | None, *args: Any) -> jax.export.Exported:
        """Exports the program for arguments of these types, and for platforms such as "cpu"."""
        import jax.export

        return jax.export.export(self._run, platforms=platforms)(*args)


def _are_set_by_user(options: Iterable[str]) -> bool:
    return any(option in os.environ.get("XLA_FLAGS", "") for option in options)


def trace_once(step: Callable[..., T]) -> Callable[..., T]:
    """A step for programs of which it becomes a part. It is traced once for arguments of the same types, though a loop
    calls it to learn what it returns and once more in its body, and each program has a loop of its own."""
    return jax.jit(step, inline=True)


def keep_together(part: Callable[..., T], name: str) -> Callable[..., T]:
    """A part of a program that stays one equation in the trace of that, by which `Program(split=)` finds it."""
    part.__name__ = name
    return jax.jit(part)


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
