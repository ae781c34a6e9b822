"""A gradient of a few rows of a large table."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Values for some rows of an array, as TensorFlow's class of this name: the other rows are zeros.

    A row that is named several times has the sum of its values. An index that is no row, negative or too large,
    counts for nothing; `est.embedding_lookup` leaves such ones for its padding.

    To change a gradient of this kind, change its values: `dataclasses.replace(g, values=0.5 * g.values)`. It is a
    pytree, but a function mapped over its leaves would change the indices as well.

    >>> slices = IndexedSlices(jnp.ones((3, 2)), jnp.array([0, 2, 2]), dense_shape=(4, 2))
    >>> print(slices.to_dense())
    [[1. 1.]
     [0. 0.]
     [2. 2.]
     [0. 0.]]

    Attributes:
      values: shape `(n, *dense_shape[1:])`.
      indices: integers of shape `(n,)`, the rows that the values belong to.
      dense_shape: of the whole array.
    """

    values: jax.Array
    indices: jax.Array
    dense_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def to_dense(self) -> jax.Array:
        """The whole array, shape `dense_shape`.

        Raises:
          ValueError: values, indices and dense_shape do not fit each other.
        """
        self.check("IndexedSlices.to_dense")
        zeros = jnp.zeros(self.dense_shape, self.values.dtype)
        return zeros.at[self.indices].add(self.values, mode="drop", wrap_negative_indices=False)

    def check(self, caller: str) -> None:
        """Raises a ValueError that names `caller` unless the fields fit each other."""
        values, indices = jnp.shape(self.values), jnp.shape(self.indices)
        integers = jnp.issubdtype(jnp.result_type(self.indices), jnp.integer)
        if not integers or len(indices) != 1 or values != (*indices, *self.dense_shape[1:]):
            raise ValueError(
                f"`{caller}` got IndexedSlices with values of shape {values}, {jnp.result_type(self.indices)} indices "
                f"of shape {indices} and dense_shape {self.dense_shape}. The indices must be n integers, the values "
                "of shape (n, *dense_shape[1:]). To change a sparse gradient, change its values alone: "
                "`dataclasses.replace(gradient, values=...)`."
            )


def is_slices(x: Any) -> bool:
    """Whether a node of a pytree is a sparse gradient."""
    return isinstance(x, IndexedSlices)


def joined(stacked: IndexedSlices) -> IndexedSlices:
    """The slices of several parts of a batch, arrays of shape `[parts, n, ...]`, one after the other: their sum."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)


def dense(gradient: Any) -> Any:
    """A gradient as the optimizers of dense variables take it."""
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
