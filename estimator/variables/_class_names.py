"""Strings among predictions: a program computes the positions of names, `predict` looks the names up."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from estimator.core._typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassNames:
    """Integers on devices, strings on the host.

    >>> import jax.numpy as jnp
    >>> print(np.asarray(ClassNames(jnp.array([[1], [0]]), ("cat", "dog"))))
    [['dog']
     ['cat']]

    Attributes:
      ids: positions in the names, of any shape.
      names: the strings; if None, the ids, written as strings.
    """

    ids: Any
    names: tuple[str, ...] | None = dataclasses.field(metadata={"static": True})

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is one
        ids = np.asarray(self.ids)
        strings = ids.astype(str) if self.names is None else np.array(self.names)[ids]
        return strings if dtype is None else strings.astype(dtype)


def with_strings(tree: PyTree) -> PyTree:
    """The tree with arrays of strings in it, for arrays that are on the host."""
    return jax.tree.map(lambda x: np.asarray(x) if are_names(x) else x, tree, is_leaf=are_names)


def are_names(x: Any) -> bool:
    """Returns whether a value stands for an array of strings."""
    return isinstance(x, ClassNames)
