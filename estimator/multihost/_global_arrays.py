"""Arrays on the devices of several processes, each of which holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import tree_map

from estimator.core._typing import PyTree


def put(tree: PyTree, shardings: Any) -> PyTree:
    """Places arrays that all processes have; `shardings` is a prefix of the tree, of which None leaves an array.

    Where a sharding spans processes, process 0 decides what the values are, to the last bit.
    """
    shardings = jax.tree.broadcast(shardings, tree, is_leaf=lambda x: x is None)
    if all(s is None or s.is_fully_addressable for s in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return tree_map(_spread, copy_from_chief(tree), shardings)


def copy_from_chief(tree: PyTree) -> PyTree:
    """Copies arrays that are whole in each process from process 0, as numpy arrays; keys stay keys."""
    from jax.experimental import multihost_utils

    keys = [jax.random.key_impl(x) if _is_key(x) else None for x in jax.tree.leaves(tree)]
    leaves = [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in jax.tree.leaves(tree)]
    # As the bytes of one array: a single collective, which keeps each bit. The first byte is for a tree without arrays.
    packed = np.concatenate([np.zeros(1, np.uint8), *(x.reshape(-1).view(np.uint8) for x in leaves)])
    packed = np.asarray(multihost_utils.broadcast_one_to_all(packed))
    values, start = [], 1
    for leaf, impl in zip(leaves, keys, strict=True):
        value = packed[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        values.append(value if impl is None else jax.random.wrap_key_data(jnp.asarray(value), impl=impl))
        start += leaf.nbytes
    return jax.tree.unflatten(jax.tree.structure(tree), values)


def equalize_copies(tree: PyTree) -> PyTree:
    """Returns the same arrays; those that every device has whole are copied from process 0."""
    leaves, structure = jax.tree.flatten(tree)
    mine = [i for i, x in enumerate(leaves) if x.is_fully_replicated and not x.is_fully_addressable]
    if mine:
        shardings = [leaves[i].sharding for i in mine]
        for i, array in zip(mine, put([_local(leaves[i]) for i in mine], shardings), strict=True):
            leaves[i] = array
    return jax.tree.unflatten(structure, leaves)


def gather_on_chief(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers whole arrays in process 0; other processes get nothing. All of them call it."""
    from jax.experimental import multihost_utils

    # One after the other, since each process holds the array that is gathered.
    whole: dict[str, Any] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            is_copied = array.is_fully_replicated
            array = _local(array) if is_copied else multihost_utils.process_allgather(array, tiled=True)
        if jax.process_index() == 0:
            whole[name] = np.asarray(array)
    return whole


def is_within_reach(array: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
    """Returns whether `place` needs no other process."""
    if like.sharding is None or array.is_fully_addressable == like.sharding.is_fully_addressable:
        return True
    return array.is_fully_replicated and not array.is_fully_addressable


def place(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Gives an array another sharding; also from the devices of all processes to devices of this process."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if array.is_fully_addressable or not sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.device_put(_local(array), sharding)


def gather_rows(tree: PyTree, rows: list[int]) -> PyTree:
    """Gathers batches of several processes as one, process after process, whole in each of them.

    Args:
      tree: numpy arrays of shape `(rows of this process, ...)`, alike in all processes but for the rows.
      rows: how many each process has.
    """
    from jax.experimental import multihost_utils

    most = max(rows)  # shorter ones are padded: a collective needs one shape in all processes

    def pad_rows(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return np.concatenate([x, np.zeros((most - len(x), *x.shape[1:]), x.dtype)])

    stacked = multihost_utils.process_allgather(tree_map(pad_rows, tree))
    return tree_map(lambda x: np.concatenate([part[:n] for part, n in zip(x, rows, strict=True)]), stacked)


def _spread(value: Any, sharding: Sharding | None) -> Any:
    if sharding is None:
        return value
    if _is_key(value):
        return jax.random.wrap_key_data(_spread(jax.random.key_data(value), sharding), impl=jax.random.key_impl(value))
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _local(array: jax.Array) -> jax.Array:
    """The part of an array on a device of this process."""
    if _is_key(array):
        data = jax.random.key_data(array).addressable_data(0)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return array.addressable_data(0)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
