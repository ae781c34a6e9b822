"""A gradient of a few rows of a large table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from estimator.core._typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Values for some rows of an array, as TensorFlow's class of this name: the other rows are zeros.

    A row that is named several times has the sum of its values; `deduplicate` makes one of them. An index that is
    negative or too large is ignored; `est.embedding_lookup` uses such ones for padding.

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

    def deduplicate(self, reduction: str = "sum") -> IndexedSlices:
        """Slices in which each row comes once, in order, with the sum or the mean of its values.

        It was Caffe2's `net.DeduplicateGradientSlices(gradient, aggregator=...)`. The number of rows stays, so that it
        runs under `jax.jit` too. The rows left over are at the end: zeros, with an index beyond the array.

        "sum" leaves the whole array as it is. With "mean" a word that is frequent in a batch counts no more than one
        that occurs once. Between `compute_gradients` and `apply_gradients` of a `TowerOptimizer` each tower changes
        its own gradient, and the results of the towers are summed.

        >>> slices = IndexedSlices(jnp.array([[1.0], [2.0], [4.0]]), jnp.array([2, 0, 2]), dense_shape=(3, 1))
        >>> once = slices.deduplicate("mean")
        >>> print(once.indices, once.values.ravel())
        [0 2 3] [2.  2.5 0. ]

        Args:
          reduction: "sum" or "mean".

        Raises:
          ValueError: another reduction, or values, indices and dense_shape do not fit each other.
          TypeError: the mean of integers.
        """
        if reduction not in ("sum", "mean"):
            raise ValueError(f'`IndexedSlices.deduplicate` takes "sum" or "mean"; got {reduction!r}.')
        self.check("IndexedSlices.deduplicate")
        values, indices = jnp.asarray(self.values), jnp.asarray(self.indices)
        if reduction == "mean" and not jnp.issubdtype(values.dtype, jnp.inexact):
            raise TypeError(
                f'`IndexedSlices.deduplicate("mean")` cannot average {values.dtype} values. Use "sum", or convert them '
                "to floats."
            )
        values, indices = _reduce_by_row(values, indices, self.dense_shape[0], reduction)
        indices = jnp.where(_is_within(indices, self.dense_shape[0]), indices, self.dense_shape[0])
        order = jnp.argsort(indices)
        return IndexedSlices(values[order], indices[order], self.dense_shape)

    def check(self, caller: str) -> None:
        """Raises a ValueError that names `caller` unless the fields fit each other."""
        values, indices = jnp.shape(self.values), jnp.shape(self.indices)
        integers = jnp.issubdtype(jnp.result_type(self.indices), jnp.integer)
        if not integers or len(indices) != 1 or values != (*indices, *self.dense_shape[1:]):
            raise ValueError(
                f"`{caller}` got IndexedSlices with values of shape {values}, {jnp.result_type(self.indices)} indices "
                f"of shape {indices} and dense_shape {self.dense_shape}. The indices must be n integers, the values "
                "of shape (n, *dense_shape[1:]). To change a sparse gradient, change only its values: "
                "`dataclasses.replace(gradient, values=...)`."
            )


# A function of its own, which jax traces once for all tables of a shape; with 52 of them that saves 0.6 seconds.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _reduce_by_row(values: jax.Array, indices: jax.Array, beyond: int, reduction: str) -> tuple[jax.Array, jax.Array]:
    """The sums of the values of each row, or their means, and the rows, no two of them alike."""
    n = len(indices)
    if indices.dtype.itemsize < 4:  # "beyond" may not fit
        indices = indices.astype(jnp.int32)
    is_row = _is_within(indices, beyond)
    # `jnp.unique` sorts pairs, which takes XLA on CPU devices seven times as long as to sort numbers.
    ordered = jnp.sort(jnp.where(is_row, indices, beyond))
    is_first = jnp.append(True, ordered[1:] != ordered[:-1])[:n] & (ordered < beyond)
    rows = jnp.where(is_first, ordered, beyond + jnp.arange(n, dtype=ordered.dtype))
    places = jnp.where(is_row, jnp.searchsorted(ordered, indices), n)  # n is left out of sums
    values = jax.ops.segment_sum(values, places, n)
    if reduction == "mean":
        counts = jnp.maximum(jax.ops.segment_sum(jnp.ones_like(places), places, n), 1)
        values = values / counts.astype(values.dtype).reshape(-1, *(1,) * (values.ndim - 1))
    return values, rows


def sum_by_row(gradient: IndexedSlices) -> tuple[jax.Array, jax.Array]:
    """The sums of `deduplicate`, and their rows, in less time: those left over are anywhere among them."""
    return _reduce_by_row(gradient.values, gradient.indices, gradient.dense_shape[0], "sum")


def _is_within(indices: jax.Array, beyond: int) -> jax.Array:
    return (indices >= 0) & (indices < beyond)


def to_dense(gradient: Any) -> Any:
    """A gradient as the optimizers of dense variables take it."""
    return gradient.to_dense() if _is_sparse(gradient) else gradient


def map_gradient(
    of_array: Callable[[jax.Array], Any], gradient: PyTree, of_sparse: Callable[[IndexedSlices], Any] | None = None
) -> PyTree:
    """A gradient with a function applied to each of its arrays; of a sparse one, by default, to its values."""

    def values_only(x: IndexedSlices) -> IndexedSlices:
        return dataclasses.replace(x, values=of_array(x.values))

    return jax.tree.map(
        lambda x: (of_sparse or values_only)(x) if _is_sparse(x) else of_array(x), gradient, is_leaf=_is_sparse
    )


def select_sparse(gradients: Mapping[str, Any]) -> dict[str, IndexedSlices]:
    """The sparse ones among gradients by name."""
    return {name: gradient for name, gradient in gradients.items() if _is_sparse(gradient)}


def checked_struct(caller: str, gradient: Any) -> Any:
    """The shape and dtype of a sparse gradient as a whole, after a check of its fields; others as they are."""
    if not _is_sparse(gradient):
        return gradient
    gradient.check(caller)
    return jax.ShapeDtypeStruct(gradient.dense_shape, gradient.values.dtype)


def _is_sparse(x: object) -> TypeGuard[IndexedSlices]:
    return isinstance(x, IndexedSlices)
