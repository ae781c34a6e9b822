"""What a batch is: pytrees of arrays that agree in their first dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from estimator._frame import PyTree

T = TypeVar("T")


def check_batch(features: PyTree, labels: PyTree = None) -> int:
    """The number of examples in a batch.

    Raises:
      TypeError: a leaf is not a numeric array.
      ValueError: there is no array, or a leaf has no batch dimension, another batch size than the rest, or no rows.
    """
    sizes: dict[str, int] = {}
    for name, tree in (("features", features), ("labels", labels)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            sizes[name + jax.tree_util.keystr(path)] = _rows(name + jax.tree_util.keystr(path), leaf)
    if not sizes:
        raise ValueError(f"A batch must hold at least one array; got features={features!r} and labels={labels!r}.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {rows}" for name, rows in sizes.items())
        raise ValueError(f"All arrays of a batch must have the same batch size (first dimension); got {listed}.")
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError(f"Got an empty batch: {', '.join(sizes)} have 0 rows. Let input_fn leave it out.")
    return rows


def guarded(step: Callable[..., T], features: PyTree, labels: PyTree, *args: Any) -> T:
    """`step(*args)`; says in our words what jax does not take in the batch among the arguments."""
    try:
        return step(*args)
    except TypeError:
        check_batch(features, labels)
        raise


def _rows(name: str, leaf: Any) -> int:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(
            f"features and labels must be arrays or pytrees of arrays; got {name} = {leaf!r} "
            f"of type {type(leaf).__name__}. Convert it, for example by np.asarray."
        )
    if not isinstance(leaf, jax.Array) and np.dtype(leaf.dtype).kind in "OSUMm":
        raise TypeError(
            f"features and labels must be arrays of numbers; got {name} of dtype {leaf.dtype}. "
            "Turn strings into integers (a vocabulary, or hashing) in input_fn."
        )
    if not leaf.shape:
        raise ValueError(
            f"Every array of a batch needs a batch dimension; {name} is a scalar. "
            "Give values that are the same for all examples by params."
        )
    return leaf.shape[0]
