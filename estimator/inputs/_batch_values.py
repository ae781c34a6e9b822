"""Copies of the values of a batch when the input yields it, in dtypes that the devices have.

An input may write the next batch into the same memory while this one still waits to be stacked, or while a program
reads it. jax does not always copy: on CPU devices `jnp.asarray`, `jax.device_put` and the arguments of a compiled
function may be views of the memory. So numpy copies it here, into a stack where a program takes several batches: a step
of a small MLP takes 45 us of CPU, 52 if batches are stacked later.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.tree_util import tree_flatten, tree_unflatten

from estimator.core._batch import check_batch, check_keys, named_leaves
from estimator.core._bcoo import alike, with_steps
from estimator.core._typing import Features, Labels, PyTree

# What jax makes of 64-bit numbers without x64.
_NARROWER = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
    )
}


class Stack:
    """Memory for consecutive batches: copying the batches of one program stacks them at the same time."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._arrays: dict[int, np.ndarray] = {}  # by the number of a leaf, [batches, ...]
        self._batch = -1

    def next(self) -> None:
        """Moves to the memory of the next batch."""
        self._batch += 1

    def empty(self, leaf: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Memory for the leaf with this number; separate memory if it differs from the leaf of the first batch."""
        if self._batch == 0:
            self._arrays[leaf] = np.empty((self._batches, *shape), dtype)
        array = self._arrays.get(leaf)
        if array is None or self._batch >= self._batches or (array.shape[1:], array.dtype) != (shape, dtype):
            return np.empty(shape, dtype)
        return array[self._batch, ...]


def stack_of(leaves: Sequence[Any]) -> np.ndarray | None:
    """The array whose slices these leaves of consecutive batches are, all of them in order; None if there is none."""
    stack = leaves[0].base if type(leaves[0]) is np.ndarray else None
    if type(stack) is not np.ndarray or len(stack) != len(leaves):
        return None
    return stack if all(type(leaf) is np.ndarray and leaf.base is stack for leaf in leaves) else None


def copy_batch(
    features: Features, labels: Labels = None, devices: Set[jax.Device] | None = None, stack: Stack | None = None
) -> tuple[PyTree, PyTree]:
    """Copies features and labels, so that they keep these values whatever happens to their memory later.

    Arrays of numpy, and of other libraries that numpy can read, are copied; without x64 to 32 bits, as jax does. Arrays
    of jax are immutable and not copied, nor are leaves that are not arrays.

    >>> x = np.arange(3)
    >>> features, _ = copy_batch({"x": x})
    >>> x[:] = 7
    >>> features
    {'x': array([0, 1, 2], dtype=int32)}

    Args:
      features, labels: pytrees.
      devices: the devices of the programs that read the batch; arrays of jax on other devices become numpy arrays,
        which any program takes. If None, all arrays of jax stay where they are.
      stack: the memory to copy to; if None, separate memory for each array.
    """
    leaves, structure = _flatten((features, labels))
    values: list[Any] = []
    if stack is not None:
        stack.next()
    try:
        for leaf in leaves:
            values.append(_copy_leaf(leaf, devices, stack, len(values)))
    except ValueError as error:
        raise ValueError(f"{list(named_leaves(features, labels))[len(values)]} {error}") from error
    return tree_unflatten(structure, values)


def default_devices() -> Set[jax.Device]:
    """The devices of uncommitted arrays."""
    # Of an array only where it has to be: to put one there takes a twentieth of an evaluation of small batches.
    is_set = jax.config.jax_default_device is not None  # type: ignore[attr-defined]
    return jax.device_put(np.zeros(())).devices() if is_set else {jax.local_devices()[0]}


def _flatten(pair: tuple[PyTree, PyTree]) -> tuple[list[Any], Any]:
    try:
        return tree_flatten(pair)
    except ValueError:
        check_keys("a batch", pair)
        raise


def _copy_leaf(leaf: Any, devices: Set[jax.Device] | None, stack: Stack | None, number: int) -> Any:
    if type(leaf) is np.ndarray:
        # jax does not take arrays of the other byte order, which some file formats have.
        if not leaf.dtype.isnative:
            leaf = leaf.astype(leaf.dtype.newbyteorder("="))
        narrower = _NARROWER.get(leaf.dtype)
        if narrower is not None and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            leaf = _narrow(leaf, narrower)
            if stack is None:
                return leaf
        if stack is None:
            return leaf.copy()
        copy = stack.empty(number, leaf.shape, leaf.dtype)
        copy[...] = leaf
        return copy
    if isinstance(leaf, jax.Array):
        # Arrays of jax are immutable and need no copy.
        return leaf if devices is None else bring_near(leaf, devices)
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError("is a masked array, which jax has not. Give `x.filled(value)`, and the mask as a feature.")
    if isinstance(leaf, np.generic):
        return leaf
    if hasattr(leaf, "__array__"):
        return _copy_leaf(np.asarray(leaf), devices, stack, number)
    if hasattr(leaf, "__dlpack__"):
        return _copy_leaf(np.from_dlpack(leaf), devices, stack, number)
    return leaf


def bring_near(leaf: Any, devices: Set[jax.Device]) -> Any:
    """The leaf; if it is an array of jax that a program on these devices cannot take, as an array of numpy."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and not _is_near(leaf, devices) else leaf


def _is_near(array: jax.Array, devices: Set[jax.Device]) -> bool:
    """Returns whether a program on these devices can take the array."""
    if isinstance(array, jax.core.Tracer) or not array.committed:
        return True
    if not array.is_fully_addressable:
        return True
    of_types = isinstance(array.sharding, NamedSharding) and AxisType.Explicit in array.sharding.mesh.axis_types
    return array.sharding.device_set == devices and not of_types  # the types of another mesh have other axes


def _narrow(array: np.ndarray, narrower: np.dtype[Any]) -> np.ndarray:
    if narrower.kind in "fc":
        try:
            with np.errstate(over="raise"):
                return array.astype(narrower)
        except FloatingPointError:
            # Only a number that was finite before is out of range; infinities of the input are allowed.
            with np.errstate(over="ignore"):
                outside = np.isfinite(array) & ~np.isfinite(array.astype(narrower))
    else:
        narrowed = array.astype(narrower)
        outside = narrowed != array
        if not np.count_nonzero(outside):  # for a small array, a third of the time of `min` and `max`
            return narrowed
    raise ValueError(
        f"holds {array[outside].flat[0]}, which does not fit {narrower}, what jax makes of {array.dtype} without x64. "
        "Call `jax.config.update('jax_enable_x64', True)` before all else, or bring the values into the range of "
        f"{narrower}: ids by `ids % size_of_the_table`, floats by a scale."
    )


def stack_batches(batches: Any) -> tuple[PyTree, PyTree]:
    """Stacks a list of batches for `train_loop` to features and labels `[steps, batch, ...]`; a pair of these stays."""
    if isinstance(batches, list):
        if not batches:
            raise ValueError("`train_loop` needs at least one batch; got an empty list.")
        pairs = [batch if isinstance(batch, tuple) else (batch, None) for batch in batches]
        for pair in pairs:
            check_batch(*pair)
        pairs = [copy_batch(*pair) for pair in pairs]
        return with_steps(jax.tree.map(lambda *leaves: jnp.stack(leaves), *alike(pairs)))
    if not isinstance(batches, tuple) or len(batches) != 2:
        raise TypeError(
            "`train_loop` takes a list of (features, labels), or one pair (features, labels) of arrays of shape "
            f"[steps, batch, ...]; got {type(batches).__name__}."
        )
    return batches
