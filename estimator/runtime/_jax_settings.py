"""Settings of jax's context managers, which hold in one thread: carries them over to another, or leaves them out."""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_END: Any = object()

_SETTINGS = (
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
)
_GUARDS = ("transfer_guard_host_to_device", "transfer_guard_device_to_device", "transfer_guard_device_to_host")
_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
_TRACED_FOR: Callable[[Any], tuple[object, ...]] = operator.attrgetter(
    *[f"jax_{name}" for name in _SETTINGS], *_DEBUGGING
)
_GUARDS_OF: Callable[[Any], tuple[object, ...]] = operator.attrgetter(*[f"jax_{name}" for name in _GUARDS])


def settings_of_this_thread() -> tuple[object, ...]:
    """The settings that change what jax traces; equal ones give equal programs."""
    return _TRACED_FOR(jax.config)  # in one call, since this runs in each step


def debugging() -> bool:
    """Returns whether jax is to run operation by operation, or to find the one that makes a NaN: not within a loop."""
    return any(getattr(jax.config, name) for name in _DEBUGGING)


def with_settings_of_this_thread(call: Callable[..., T]) -> Callable[..., T]:
    """Makes a function that calls `call` in any thread under the settings and context variables of this one."""
    settings = {name: getattr(jax.config, f"jax_{name}") for name in (*_SETTINGS, *_GUARDS)}
    context = contextvars.copy_context()

    def under_settings(*args: object) -> T:
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            return call(*args)

    return lambda *args: context.run(under_settings, *args)


@contextlib.contextmanager
def without_mesh_and_guard() -> Iterator[None]:
    """Sets no mesh within the block, and allows transfers: placements say where arrays are, and batches come from the
    host."""
    # Where there are none, nothing is set: to set them takes a third of the time of a small batch, and jax traces again
    # where a mesh is set, even if there is none in it.
    is_guarded = any(value not in (None, "allow") for value in _GUARDS_OF(jax.config))
    is_set = not jax.sharding.get_abstract_mesh().empty
    with (
        jax.transfer_guard("allow") if is_guarded else contextlib.nullcontext(),
        jax.set_mesh(None) if is_set else contextlib.nullcontext(),
    ):
        yield


def each_without_mesh_and_guard(items: Generator[T, None, None]) -> Iterator[T]:
    """Yields the items, each made `without_mesh_and_guard`, which the caller does not see."""
    try:
        while True:
            with without_mesh_and_guard():
                item = next(items, _END)
            if item is _END:
                return
            yield item
    finally:
        with without_mesh_and_guard():
            items.close()
