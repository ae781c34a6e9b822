"""The transformations of jax that are active, since stateful calls of a model_fn depend on them.

A key that is drawn in the body of a loop is the same in every iteration, since jax traces the body once; a variable
that is created in a branch does not exist outside of it. jax does not say which transformation a trace belongs to, but
the transformation calls the function that it traces, and so is on Python's stack.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence

import jax

# Those that call a function once and run what it does many times.
_REPEATING: dict[str, Callable[..., object]] = {
    "jax.lax.scan": jax.lax.scan,
    "jax.lax.map": jax.lax.map,
    "jax.lax.fori_loop": jax.lax.fori_loop,
    "jax.lax.while_loop": jax.lax.while_loop,
    "jax.vmap": jax.vmap,
}

# Those that stage a function as a whole: outside, only what it returns is known. `jax.jit` does so too, but it is
# compiled code and not on the stack.
_STAGING: dict[str, Callable[..., object]] = {
    **{name: function for name, function in _REPEATING.items() if name != "jax.vmap"},
    "jax.lax.cond": jax.lax.cond,
    "jax.lax.switch": jax.lax.switch,
    "jax.checkpoint": jax.checkpoint,
    "jax.custom_jvp": jax.custom_jvp.__call__,
    "jax.custom_vjp": jax.custom_vjp.__call__,
}

# Those that let values out which do not depend on their arguments. `jax.grad` and others are built on them.
_DIFFERENTIATING: dict[str, Callable[..., object]] = {
    "jax.vjp": jax.vjp,
    "jax.jvp": jax.jvp,
    "jax.linearize": jax.linearize,
}


def _by_code(functions: dict[str, Callable[..., object]]) -> dict[types.CodeType, str]:
    """The names, by the code of the functions and of the inner functions that they define, any of which may call."""
    own = {inspect.unwrap(function).__code__: name for name, function in functions.items()}
    defined = {c: name for code, name in own.items() for c in code.co_consts if isinstance(c, types.CodeType)}
    return defined | own


_NAMES = _by_code({**_REPEATING, **_STAGING, **_DIFFERENTIATING})


def on_stack() -> tuple[str, ...]:
    """The names of the transformations that are calling, the innermost first."""
    names = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _NAMES:
            names.append(_NAMES[frame.f_code])
        frame = frame.f_back
    return tuple(names)


def find_repeating(names: Sequence[str]) -> str | None:
    """Finds the outermost of those that run what they call many times."""
    return next((name for name in reversed(names) if name in _REPEATING), None)


def stages(names: Sequence[str]) -> bool:
    """Returns whether one of them stages the function as a whole. No names at all mean `jax.jit`, which does."""
    return not names or any(name in _STAGING for name in names)


def differentiates(names: Sequence[str]) -> bool:
    """Returns whether all only differentiate, so that what does not depend on their arguments is known outside."""
    return bool(names) and all(name in _DIFFERENTIATING for name in names)
