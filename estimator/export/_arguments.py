"""The arguments of an export as JSON, so that it can be written once more."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._typing import PyTree


def describe_features(tree: PyTree) -> Any:
    """The shapes and dtypes of features, and the containers around them; `read_features` is the inverse."""
    # A container says its kind: in JSON a list and a tuple are the same, and an array might be a dict.
    if isinstance(tree, dict):
        return {"dict": {key: describe_features(item) for key, item in tree.items()}}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [describe_features(item) for item in tree]}
    return tree if tree is None else {"array": [np.dtype(tree.dtype).name, *tree.shape]}


def read_features(description: Any) -> PyTree:
    """The features that `describe_features` has described, `jax.ShapeDtypeStruct`s."""
    match description:
        case None:
            return None
        case {"dict": dict(items)}:
            return {key: read_features(item) for key, item in items.items()}
        case {"list": [*items]}:
            return [read_features(item) for item in items]
        case {"tuple": [*items]}:
            return tuple(read_features(item) for item in items)
        case {"array": [str(dtype), *sizes]} if all(type(size) is int and size >= 0 for size in sizes):
            return jax.ShapeDtypeStruct(tuple(sizes), jnp.dtype(dtype))
    raise ValueError(f"the features need a container or an array, and have {description!r:.100}")
