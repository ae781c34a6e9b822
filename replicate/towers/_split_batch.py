"""Rows of a batch's leaves, dense or sparse, with static shapes.

How many entries of a sparse array a tower's rows hold is known only when the program runs. So every tower gets room for
all entries: entries of other rows become padding, which jax leaves out. That is exact however uneven the rows are, and
costs every tower the memory and the time of all entries; the dense part of its work covers only its own rows. An array
with a batch dimension (`bcoo.update_layout(n_batch=1, on_inefficient=None)`) has as much room for each row, and is cut
like a dense one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from estimator.replication import is_sparse, with_shape

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


def take_rows(x: Any, begin: int, size: int) -> Any:
    """Rows `begin` to `begin + size`."""
    if not is_sparse(x):
        return x[begin : begin + size]
    if size == x.shape[0]:
        return x
    if x.n_batch:
        rows = jax.tree.map(lambda array: array[begin : begin + size], _row_by_row(x))
        return with_shape(rows, (size, *x.shape[1:]))
    return _like(x, size, *_masked(x, jnp.asarray(begin, x.indices.dtype), size))


def split_rows(x: Any, towers: int) -> Any:
    """The rows of each tower, in arrays with the towers as their first dimension."""
    size = x.shape[0] // towers
    if not is_sparse(x):
        return x.reshape(towers, size, *x.shape[1:])
    if x.n_batch:
        cut = jax.tree.map(lambda array: array.reshape(towers, size, *array.shape[1:]), _row_by_row(x))
        return with_shape(cut, (size, *x.shape[1:]))
    begins = size * jnp.arange(towers, dtype=x.indices.dtype)
    return _like(x, size, *jax.vmap(lambda begin: _masked(x, begin, size))(begins))


def _masked(x: BCOO, begin: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Data and indices of all entries, those outside of the rows as padding."""
    row = x.indices[:, 0]
    row = jnp.where(row < 0, row + x.shape[0], row) - begin  # jax counts a negative index from the end
    mine = (row >= 0) & (row < size)
    bounds = jnp.array((size, *x.shape[1 : x.n_sparse]), x.indices.dtype)
    indices = jnp.where(mine[:, None], x.indices.at[:, 0].set(row), bounds)
    data = jnp.where(mine.reshape(-1, *(1,) * x.n_dense), x.data, 0)
    return data, indices


def _like(x: BCOO, size: int, data: jax.Array, indices: jax.Array) -> BCOO:
    layout = {"shape": (size, *x.shape[1:]), "indices_sorted": False, "unique_indices": x.unique_indices}
    return type(x).tree_unflatten(layout, (data, indices))


def _row_by_row(x: BCOO) -> BCOO:
    """With an item for each row in both arrays, where jax allows one for all."""
    return jax.tree.map(lambda array: jnp.broadcast_to(array, (x.shape[0], *array.shape[1:])), x)
