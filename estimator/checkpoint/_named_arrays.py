"""A state as named arrays: the names on disk, and the shorter ones that users see.

On disk: "variables/dense/w", "slots/adam/0/mu/dense/w", "global_step", "key". Users see "dense/w" and
"adam/0/mu/dense/w".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._state import State
from estimator.optim._non_finite import SLOTS, NonFinite

SLOT_PREFIX = "slots/"
PREFIXES = ("variables/", SLOT_PREFIX)
# A checkpoint may lack these (they are zero then) or have them in excess: on_nan can be switched on and off.
COUNTERS = {f"{SLOT_PREFIX}{SLOTS}/{field}" for field in NonFinite._fields}


def leaves_on_disk(state: State) -> dict[str, Any]:
    """The leaves of a state by their names on disk, in the order of `jax.tree.leaves`."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(
                f"Two variables have the name {name!r} in a checkpoint: one has this name itself, the "
                "other is part of a variable that is a tree. Rename one of them."
            )
        leaves[name] = leaf
    return leaves


def to_arrays(state: State) -> dict[str, Any]:
    """The leaves by their names on disk, typed PRNG keys as the integers that orbax and numpy can save.

    The leaves are arrays or `jax.ShapeDtypeStruct`s.
    """
    return {name: _key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves_on_disk(state).items()}


def from_arrays(arrays: Mapping[str, Any], like: State) -> State:
    """The inverse of `to_arrays`: a state with the structure and the kinds of PRNG keys of `like`."""
    leaves = [_wrap_key_data(arrays[name], leaf) for name, leaf in leaves_on_disk(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def named_leaves(state: State) -> dict[str, Any]:
    """The leaves of a state by the names that users see, without PRNG keys and the counters of `on_nan`."""
    leaves = leaves_on_disk(state)
    named = {name: (key, leaves[key]) for name, key in by_user_name(leaves).items()}
    return {name: leaf for name, (key, leaf) in named.items() if key not in COUNTERS and not _is_key(leaf)}


def with_named_leaves(state: State, new: Mapping[str, Any]) -> State:
    """The state with other arrays for some of its `named_leaves`."""
    leaves = leaves_on_disk(state)
    leaves |= {key: new[name] for name, key in by_user_name(leaves).items() if name in new}
    return jax.tree.unflatten(jax.tree.structure(state), leaves.values())


def by_user_name(on_disk: Iterable[str]) -> dict[str, str]:
    """Names on disk by the names that users see."""
    by_name = {"global_step": "global_step"}
    for prefix in PREFIXES:
        for key in on_disk:
            if key.startswith(prefix):
                name = short(key)
                by_name[key if name in by_name else name] = key
    return by_name


def short(key: str) -> str:
    """A name on disk without "variables/" or "slots/"."""
    for prefix in PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, key)
    return jax.random.key_data(key)


def _wrap_key_data(array: Any, like: Any) -> Any:
    if not _is_key(like):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impls[0])
