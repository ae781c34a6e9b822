"""Rows of a batch's leaves, dense or sparse, with static shapes.

How many entries of a sparse array a tower's rows hold is known only when the program runs. So every tower gets room for
all entries: entries of other rows become padding, which jax leaves out. That is exact however uneven the rows are, and
costs every tower the memory and the time of all entries; the dense part of its work covers only its own rows. An array
with a batch dimension (`bcoo.update_layout(n_batch=1, on_inefficient=None)`) has as much room for each row, and is cut
like a dense one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from estimator.replication import is_sparse
from estimator.typing import PyTree

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


def rows_of_tower(rows: int, towers: int, parts: int = 1, each_process: bool = False) -> int:
    """Returns the number of rows that each tower trains on, in `parts` micro-batches; raises if they do not divide."""
    if rows % (towers * parts) == 0:
        return rows // towers
    problem = f"Batch size {rows} needs to be divisible by the number of towers, which is {towers}"
    if parts > 1 and rows % towers == 0:
        raise ValueError(
            f"{problem}, times `accumulate_steps`, which is {parts}. Choose a batch size that is a multiple of "
            f"{towers * parts}, or another `accumulate_steps`."
        )
    raise ValueError(
        f"{problem}{' in each process' if each_process else ''}. Drop the remainder in input_fn "
        "(`drop_remainder=True`), or choose another batch size."
    )


def take_rows(batch: PyTree, begin: int, size: int) -> PyTree:
    """Rows `begin` to `begin + size`."""

    def take(x: Any) -> Any:
        if not is_sparse(x):
            return x[begin : begin + size]
        if size == x.shape[0]:
            return x
        if x.n_batch:
            return _of_rows(x, size, [array[begin : begin + size] for array in _row_by_row(x)])
        # All entries, most of them as padding: the number of entries in these rows is not known while the program is
        # compiled.
        return _of_rows(x, size, _mask_rows(x, jnp.asarray(begin, x.indices.dtype), size), indices_sorted=False)

    return jax.tree.map(take, batch, is_leaf=is_sparse)


def split_rows(batch: PyTree, parts: int, stacked: bool = False) -> PyTree:
    """The rows of each of equal parts, in arrays with the parts as their first dimension.

    Args:
      stacked: whether the arrays are of several batches, which are their first dimension; then it is their second.
    """
    if stacked:
        leaves, structure = jax.tree.flatten(batch)
        of_parts = [structure]  # then theirs: sparse leaves say how many rows they have

        def split_each(leaves: list[jax.Array]) -> list[jax.Array]:
            leaves, of_parts[0] = jax.tree.flatten(split_rows(jax.tree.unflatten(structure, leaves), parts))
            return leaves

        split_leaves = jax.vmap(split_each, out_axes=1)(leaves)
        return jax.tree.unflatten(of_parts[0], split_leaves)

    def split(x: Any) -> Any:
        size = rows_of_tower(x.shape[0], parts)
        if not is_sparse(x):
            return x.reshape(parts, size, *x.shape[1:])
        if x.n_batch:
            return _of_rows(x, size, [array.reshape(parts, size, *array.shape[1:]) for array in _row_by_row(x)])
        begins = size * jnp.arange(parts, dtype=x.indices.dtype)
        return _of_rows(x, size, jax.vmap(lambda begin: _mask_rows(x, begin, size))(begins), indices_sorted=False)

    return jax.tree.map(split, batch, is_leaf=is_sparse)


def _mask_rows(x: BCOO, begin: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Masks the entries outside of the rows as padding; returns data and indices of all."""
    row = x.indices[:, 0]
    row = jnp.where(row < 0, row + x.shape[0], row) - begin  # jax counts a negative index from the end
    mine = (row >= 0) & (row < size)
    bounds = jnp.array((size, *x.shape[1 : x.n_sparse]), x.indices.dtype)
    indices = jnp.where(mine[:, None], x.indices.at[:, 0].set(row), bounds)
    data = jnp.where(mine.reshape(-1, *(1,) * x.n_dense), x.data, 0)
    return data, indices


def _row_by_row(x: BCOO) -> list[jax.Array]:
    """Data and indices with an item for each row, where jax allows one for all."""
    return [jnp.broadcast_to(array, (x.shape[0], *array.shape[1:])) for array in (x.data, x.indices)]


def _of_rows(x: BCOO, size: int, arrays: Sequence[jax.Array], **layout: bool) -> BCOO:
    """As many rows, from data and indices. Unchecked: stacks of several parts have a dimension more."""
    _, like = x.tree_flatten()
    return type(x).tree_unflatten({**like, "shape": (size, *x.shape[1:]), **layout}, arrays)
