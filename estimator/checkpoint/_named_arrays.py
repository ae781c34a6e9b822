"""A state as named arrays: the names on disk, the shorter ones that users see, and TensorFlow's names of slots.

On disk: "variables/dense/w", "slots/adam/0/mu/dense/w", "global_step", "key". Users see "dense/w" and
"adam/0/mu/dense/w".
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, keystr, tree_leaves_with_path

from estimator.core._state import State
from estimator.steps._pure_steps import OPTIONAL_SLOTS

SLOT_PREFIX = "slots/"
PREFIXES = ("variables/", SLOT_PREFIX)
# A checkpoint may lack these (then they are zero) or have them unused: their features can be switched on and off.
OPTIONAL = {f"{SLOT_PREFIX}{name}/{field}" for name, kind in OPTIONAL_SLOTS.items() for field in kind._fields}


class ShapeDtype(Protocol):
    """The shape and dtype of an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def leaves_on_disk(state: State) -> dict[str, Any]:
    """The leaves of a state by their names on disk, in the order of `jax.tree.leaves`."""
    leaves: dict[str, Any] = {}
    for path, leaf in tree_leaves_with_path(state):
        name = keystr(path, simple=True, separator="/")
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
    return {name: _key_data(leaf) if is_key(leaf) else leaf for name, leaf in leaves_on_disk(state).items()}


def from_arrays(arrays: Mapping[str, Any], like: State) -> State:
    """The inverse of `to_arrays`: a state with the structure and the kinds of PRNG keys of `like`."""
    leaves = [_wrap_key_data(arrays[name], leaf) for name, leaf in leaves_on_disk(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def named_leaves(state: State) -> dict[str, Any]:
    """The leaves of a state by the names that users see, without PRNG keys and the arrays in `OPTIONAL`."""
    leaves = leaves_on_disk(state)
    named = {name: (key, leaves[key]) for name, key in by_user_name(leaves).items()}
    return {name: leaf for name, (key, leaf) in named.items() if key not in OPTIONAL and not is_key(leaf)}


def with_named_leaves(state: State, new: Mapping[str, Any]) -> State:
    """The state with other arrays for some of its `named_leaves`."""
    leaves = leaves_on_disk(state)
    leaves |= {key: new[name] for name, key in by_user_name(leaves).items() if name in new}
    return jax.tree.unflatten(jax.tree.structure(state), leaves.values())


def by_user_name(on_disk: Iterable[str]) -> dict[str, str]:
    """Names on disk by the names that users see."""
    # If a slot and a variable have the same name, it is the variable's, and the slot has its full name on disk.
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


def describe(array: ShapeDtype | None) -> str:
    return "" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"


def check_same(
    path: str, saved: Mapping[str, Any], model: Mapping[str, Any], partial: bool, keys: Collection[str]
) -> None:
    """Raises one error that names every difference between the checkpoint at a path and a model."""
    lines = []
    for key in sorted(model.keys() | saved.keys()):
        was, now = describe(saved.get(key)), describe(model.get(key))
        if key not in saved:
            lines.append(f"  missing: {short(key)}, {now} in the model")
        elif key not in model and not partial:
            lines.append(f"  unexpected: {short(key)}, {was} in the checkpoint")
        elif key in model and was != now:
            lines.append(f"  mismatched: {short(key)}, {was} in the checkpoint, {now} in the model")
            if key in keys:
                lines[-1] += (
                    ", a random key: set jax_default_prng_impl to what it was, such as 'rbg' for uint32[4] or "
                    f"'threefry2x32' for uint32[2]; it is {jax.config.jax_default_prng_impl!r}"  # type: ignore[attr-defined]
                )
    if lines:
        raise ValueError(
            f"The variables of checkpoint {path} are not those of the model:\n"
            + "\n".join(lines)
            + "\nMake the model_fn create the same variables and optimizers as when the checkpoint "
            "was saved, or use another model_dir to start from scratch (from its variables by `warm_start_from`)."
        )


def close_matches(name: str, names: Collection[str]) -> list[str]:
    """Returns a few names, those that are like one if there are any."""
    return difflib.get_close_matches(name, list(names), cutoff=0.5) or sorted(names)[:5]


def tensorflow_slot_names(state: State, old_name: Callable[[str], str]) -> dict[str, str]:
    """TensorFlow's names of a state's slots, by our names.

    The optimizer "Adam" has there, of the variable "dense/kernel", "dense/kernel/Adam" and "dense/kernel/Adam_1", in
    the order of its slots, and beside the variables "beta1_power". A second one, "Adam_1" here, has "beta1_power_1"
    there, while the slots of its variables are named as the first one's.

    Args:
      state: as it is here.
      old_name: returns the name that a variable has in the checkpoint.
    """
    user_names = {key: name for name, key in by_user_name(leaves_on_disk(state)).items()}
    names: dict[str, str] = {}
    count: Counter[tuple[str, str]] = Counter()
    for path, _ in tree_leaves_with_path(state.slots):
        optimizer = path[0].key
        kind, number = re.fullmatch(r"(.*?)((?:_\d+)?)", optimizer).groups()  # type: ignore[union-attr]
        # The path of a slot begins with fields and positions; from the first dict on it is the name of the variable.
        # Counters have no variable.
        begin = next((i for i, key in enumerate(path[1:], 1) if isinstance(key, DictKey)), None)
        if begin is not None and path[begin].key in state.variables:
            variable = keystr(path[begin:], simple=True, separator="/")
            position = count[optimizer, variable]
            count[optimizer, variable] += 1
            there = f"{old_name(variable)}/{kind}" + (f"_{position}" if position else "")
        elif begin is None and isinstance(path[-1], GetAttrKey):
            there = path[-1].name + number
        else:
            continue
        names[user_names[SLOT_PREFIX + keystr(path, simple=True, separator="/")]] = there
    return names


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, key)
    return jax.random.key_data(key)


def _wrap_key_data(array: Any, like: Any) -> Any:
    if not is_key(like):
        return array
    # `jax.random.key_impl` takes no `ShapeDtypeStruct`, but it takes the tracer of one.
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impls[0])
