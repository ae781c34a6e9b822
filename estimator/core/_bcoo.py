"""Sparse leaves of a batch, `jax.experimental.sparse.BCOO`, so that one program serves many numbers of entries.

A program is compiled for one number of stored entries. So they are padded to the next power of two before they go into
one, in jax's own way: indices out of bounds, which jax leaves out, and zeros as data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._typing import PyTree

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO, JAXSparse


def is_sparse(x: Any) -> TypeGuard[BCOO]:
    """Returns whether a node of a pytree is a sparse array, which is one leaf of a batch."""
    return isinstance(x, _load("BCOO"))


def is_jax_sparse(x: Any) -> TypeGuard[JAXSparse]:
    """Returns whether it is a sparse array in any of jax's formats."""
    return isinstance(x, _load("JAXSparse"))


def find_sparse() -> Callable[[Any], bool] | None:
    """Returns `is_sparse` for `is_leaf=`; None where nothing can be sparse, so that jax calls nothing for each node."""
    return is_sparse if _load("BCOO") else None


def has_sparse(tree: PyTree) -> bool:
    return any(map(is_sparse, jax.tree.leaves(tree, is_leaf=is_sparse)))


def pad_sparse(batch: PyTree) -> PyTree:
    """The batch with the stored entries of its sparse leaves padded to a power of two.

    Done with numpy, since jax would compile the padding for each number of entries.

    >>> from jax.experimental.sparse import BCOO
    >>> x = BCOO((np.ones(3, np.float32), np.array([[0, 0], [0, 1], [1, 1]])), shape=(2, 2))
    >>> pad_sparse({"x": x})
    {'x': BCOO(float32[2, 2], nse=4)}
    """
    return jax.tree.map(lambda x: _with_layout(x, _common_layout((x,))), batch, is_leaf=is_sparse)


def alike(batches: Sequence[PyTree]) -> Sequence[PyTree]:
    """Batches with their sparse leaves padded to the same power of two, so that they can be stacked.

    Batches without a sparse leaf, or of several structures, are returned unchanged.
    """
    if not has_sparse(batches[0]):
        return batches
    structures = [jax.tree.structure(batch, is_leaf=is_sparse) for batch in batches]
    if structures.count(structures[0]) < len(structures):
        return batches
    layouts = jax.tree.map(lambda *leaves: _common_layout(leaves), *batches, is_leaf=is_sparse)
    return [jax.tree.map(_with_layout, batch, layouts, is_leaf=is_sparse) for batch in batches]


def with_steps(stacked: PyTree) -> PyTree:
    """Batches whose arrays were stacked, with the number of steps as the first dimension of their sparse leaves too."""
    return _reshape(stacked, lambda x: (x.data.shape[0], *x.shape))


def per_step(batches: PyTree) -> PyTree:
    """The opposite: every sparse leaf has the shape it has in one step, which is what a `lax.scan` makes of it.

    Raises:
      ValueError: the steps are not a batch dimension of the sparse array.
    """

    def one(x: BCOO) -> tuple[int, ...]:
        if not x.n_batch:
            raise ValueError(
                f"`train_loop` got {x!r}, whose steps cannot be separated: the first dimension of stacked sparse "
                "batches must be a batch dimension. Write `bcoo.update_layout(n_batch=1, on_inefficient=None)`, or "
                "give a list of batches."
            )
        return x.shape[1:]

    return _reshape(batches, one)


def _reshape(tree: PyTree, shape: Callable[[BCOO], tuple[int, ...]]) -> PyTree:
    """The same arrays under another shape. Unchecked: within stacks the arrays have a dimension more than it says."""

    def reshape_leaf(x: Any) -> Any:
        if not is_sparse(x):
            return x
        arrays, layout = x.tree_flatten()
        return type(x).tree_unflatten({**layout, "shape": shape(x)}, arrays)

    return jax.tree.map(reshape_leaf, tree, is_leaf=is_sparse)


def _common_layout(leaves: tuple[Any, ...]) -> Any:
    """The traits that sparse arrays must share to be stacked: their numbers of entries, and their order."""
    if not all(map(is_sparse, leaves)):
        return None
    entries = max(x.nse for x in leaves)
    return {
        "nse": 1 << max(0, entries - 1).bit_length(),
        # Both are static, and so must be equal in a stack; what is promised must hold for all.
        "indices_sorted": all(x.indices_sorted for x in leaves),
        "unique_indices": all(x.unique_indices for x in leaves),
    }


def _with_layout(x: Any, wanted: dict[str, Any] | None) -> Any:
    if wanted is None:
        return x
    (data, indices), layout = x.tree_flatten()
    layout = {name: wanted.get(name, value) for name, value in layout.items()}
    if x.nse < wanted["nse"]:
        xp = jnp if isinstance(data, jax.core.Tracer) else np
        bounds = np.array(x.shape[x.n_batch : x.n_batch + x.n_sparse]).astype(indices.dtype)
        more = wanted["nse"] - x.nse
        zeros = np.zeros((*data.shape[: x.n_batch], more, *data.shape[x.n_batch + 1 :]), data.dtype)
        beyond = np.broadcast_to(bounds, (*indices.shape[:-2], more, x.n_sparse))
        # The padding comes last: its indices are beyond all others, so that sorted ones stay sorted.
        data = xp.concatenate([data, zeros], axis=x.n_batch)
        indices = xp.concatenate([indices, beyond], axis=-2)
    return type(x).tree_unflatten(layout, (data, indices))


def _load(name: str) -> Any:
    """A class of `jax.experimental.sparse`, or no class: until somebody imports that module (and scipy with it, which
    takes longer than all of this package), nothing can be an instance of it."""
    return getattr(sys.modules.get("jax.experimental.sparse"), name, ())


def constrain(batch: PyTree, sharding: Any) -> PyTree:
    """A batch with a sharding; sparse leaves, whose arrays have entries as their first dimension, are left alone."""
    return jax.tree.map(
        lambda x: x if is_sparse(x) else jax.lax.with_sharding_constraint(x, sharding), batch, is_leaf=is_sparse
    )
