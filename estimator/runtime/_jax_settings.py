"""Carries what jax's context managers set, which holds in one thread only, over to another thread."""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_SETTINGS = (
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
)
_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
_TRACED_FOR: Callable[[Any], tuple[object, ...]] = operator.attrgetter(
    *[f"jax_{name}" for name in _SETTINGS], *_DEBUGGING
)


def settings_of_this_thread() -> tuple[object, ...]:
    """The settings that change what jax traces; equal ones give equal programs."""
    return _TRACED_FOR(jax.config)  # in one call, since this runs in each step


def debugging() -> bool:
    """Says whether jax is to run operation by operation, or to find the one that makes a NaN: not within a loop."""
    return any(getattr(jax.config, name) for name in _DEBUGGING)


def with_settings_of_this_thread(call: Callable[..., T]) -> Callable[..., T]:
    """Makes a function that calls `call` in any thread under the settings and context variables of this one."""
    settings = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}
    context = contextvars.copy_context()

    def under_settings(*args: object) -> T:
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            return call(*args)

    return lambda *args: context.run(under_settings, *args)
