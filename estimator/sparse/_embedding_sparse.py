"""Several rows of a table for each example, combined into one: TensorFlow's `embedding_lookup_sparse`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._bcoo import is_jax_sparse, is_sparse
from estimator.sparse._embedding import check_table_name, named_lookup
from estimator.variables._partitioning import Partition

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO

COMBINERS = ("mean", "sqrtn", "sum")


def embedding_lookup_sparse(
    name: str,
    ids: jax.typing.ArrayLike | BCOO,
    weights: jax.typing.ArrayLike | BCOO | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    initializer: Callable[..., jax.Array] | jax.Array | None = None,
    partition: Partition = None,
    *,
    combiner: str = "mean",
    max_norm: float | None = None,
) -> jax.Array:
    """Rows of a variable, combined for each example: shape `(batch, *shape[1:])`, with a sparse gradient.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> table = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    >>> def model_fn(features, labels, mode):
    ...     args = features["ids"], features["weights"]
    ...     rows = est.embedding_lookup_sparse("words", *args, initializer=table, combiner="sum")
    ...     return est.EstimatorSpec(mode, predictions=rows)
    >>> ids = jnp.array([[0, 2], [1, -1], [-1, -1]])
    >>> features = {"ids": ids, "weights": jnp.array([[3.0, 0.5], [2.0, 0.0], [0.0, 0.0]])}
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), features, mode="infer")
    >>> print(model.predict_step(state, features).predictions)
    [[ 53. 106.]
     [ 20.  40.]
     [  0.   0.]]

    It is `tf.nn.embedding_lookup_sparse` with the table's name instead of its values; the gradient of the table is as
    for `est.embedding_lookup`, and the weights have one too. A row without ids is zeros, as in TensorFlow's
    `safe_embedding_lookup_sparse`. Weights are taken as they are: if they sum to zero in a row, "mean" divides by zero
    there, as in TensorFlow.

    Args:
      name: of the table, as for `est.embedding_lookup`.
      ids: integers of shape `(batch, ..., k)`, filled up by negative ones; they are combined over the last dimension.
        Or a `jax.experimental.sparse.BCOO` of shape `(batch, k)` whose stored entries are the ids, as the values of a
        `SparseTensor`: make it of values and indices, since `BCOO.fromdense` leaves out the id 0.
      weights: numbers, one for each id, in an array of the shape of the ids, or in a BCOO with the same indices: an
        entry with another index has the weight NaN. If None, all weights are 1.
      shape, dtype, initializer, partition: of the table, as for `est.embedding_lookup`.
      combiner: "sum", the weighted sum; "mean", the same divided by the sum of the weights; or "sqrtn", divided by the
        square root of the sum of their squares. TensorFlow's default is "mean", too.
      max_norm: rows of a larger l2 norm are scaled down to it before they are combined; if None, they stay.

    Raises:
      TypeError: the ids are not integers, the name is not a string, or only one of ids and weights is sparse.
      ValueError: the weights have another shape, the ids have less than two dimensions, the BCOO is of another layout,
        or the combiner or `max_norm` is not one of those above; or as for `est.embedding_lookup`.
    """
    caller = "est.embedding_lookup_sparse"
    check_table_name(caller, name)
    call = f"`{caller}({name!r})`"
    check_combiner(caller, "combiner", combiner)
    check_max_norm(caller, max_norm)
    entries = _sparse_entries(call, ids, weights) if is_jax_sparse(ids) else _padded_entries(call, ids, weights)
    rows = named_lookup(caller, name, entries.ids, shape, dtype, initializer, partition)
    return combine_rows(
        clip_rows(rows, entries.ids.ndim, max_norm), entries.ids, entries.weights, combiner, entries.add
    )


def check_combiner(caller: str, name: str, combiner: Any) -> None:
    if combiner not in COMBINERS:
        raise ValueError(f"`{caller}`: {name} must be one of {COMBINERS}; got {combiner!r}.")


def check_max_norm(caller: str, max_norm: Any) -> None:
    number = isinstance(max_norm, int | float | np.number) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and max_norm > 0):
        raise ValueError(f"`{caller}`: max_norm must be a number above 0, or None; got {max_norm!r}.")


def clip_rows(rows: jax.Array, ndim: int, max_norm: float | None) -> jax.Array:
    """Scales rows, which have the dimensions from `ndim` on, down to the l2 norm `max_norm`."""
    if max_norm is None:
        return rows
    squares = jnp.sum(rows * rows, axis=tuple(range(ndim, rows.ndim)), keepdims=True)
    squares = jnp.where(squares == 0, 1, squares)  # the root of zero has no gradient
    return rows * (max_norm / jnp.maximum(jnp.sqrt(squares), max_norm)).astype(rows.dtype)


def over_last(x: jax.Array, dimension: int) -> jax.Array:
    return x.sum(axis=dimension)


def combine_rows(
    rows: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None,
    combiner: str,
    add: Callable[[jax.Array, int], jax.Array] = over_last,
) -> jax.Array:
    """The weighted sum or mean of the rows of each example.

    Args:
      rows: shape `(*ids.shape, ...)`, zeros where an id is negative.
      ids: shape `(..., k)`.
      weights: of the same shape.
      combiner: one of `COMBINERS`.
      add: sums arrays over a dimension, which is the last one of the ids.
    """
    last = ids.ndim - 1
    known = ids >= 0
    if weights is not None:
        # The weight of padding may be anything, also NaN.
        weights = jnp.where(known, weights.astype(rows.dtype), 0)
        rows = rows * weights.reshape(*ids.shape, *(1,) * (rows.ndim - ids.ndim))
    total = add(rows, last)
    if combiner == "sum":
        return total
    counts = add(known.astype(rows.dtype), last)
    if weights is None:
        scale = counts
    else:
        scale = add(weights if combiner == "mean" else weights * weights, last)
    # An example without ids gets zeros, as in TensorFlow's `safe_embedding_lookup_sparse`.
    scale = jnp.where(counts == 0, 1, scale)
    # With "sqrtn", the root of the sum of squared weights, a sum of independent rows has the variance of one row.
    scale = scale if combiner == "mean" else jnp.sqrt(scale)
    return total / scale.reshape(*scale.shape, *(1,) * (total.ndim - scale.ndim))


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Ids, -1 where there is none, the weights of all of them, and the sum over the weights of an example."""

    ids: jax.Array
    weights: jax.Array | None
    add: Callable[[jax.Array, int], jax.Array] = over_last


def _padded_entries(call: str, ids: Any, weights: Any) -> _Entries:
    ids = jnp.asarray(ids)
    _check_integers(call, ids)
    if ids.ndim < 2:
        raise ValueError(
            f"{call} combines the ids of each example, shape (batch, k); got {ids.shape}. For one id per example write "
            "`est.embedding_lookup`, or `ids[:, None]`."
        )
    if weights is None:
        return _Entries(ids, None)
    if is_jax_sparse(weights):
        raise TypeError(f"{call} got {weights!r} as weights of an array of ids. Give `weights.todense()`.")
    weights = jnp.asarray(weights)
    if weights.shape != ids.shape:
        raise ValueError(f"{call} needs a weight for each id; got weights of shape {weights.shape} for {ids.shape}.")
    return _Entries(ids, weights)


def _sparse_entries(call: str, ids: Any, weights: Any) -> _Entries:
    if not is_sparse(ids) or ids.ndim != 2 or ids.n_dense or ids.n_batch > 1:
        raise ValueError(
            f"{call} takes ids of shape (batch, k), in an array or in a BCOO with at most one batch dimension and no "
            f"dense one; got {ids!r}."
        )
    _check_integers(call, ids)
    within = _within(ids)
    data = jnp.where(within, ids.data, -1)
    values = None
    if weights is not None:
        if not is_sparse(weights):
            raise TypeError(f"{call} got ids in a BCOO and weights in {type(weights).__name__}. Give a BCOO of both.")
        if weights.shape != ids.shape or weights.indices.shape != ids.indices.shape or weights.n_dense:
            raise ValueError(
                f"{call} needs a weight for each id, in a BCOO with the same indices; got weights {weights!r} for ids "
                f"{ids!r}. Write `BCOO((weights, ids.indices), shape=ids.shape)`."
            )
        same = (weights.indices == ids.indices).all(axis=-1)
        values = jnp.asarray(weights.data)
        values = values if jnp.issubdtype(values.dtype, jnp.inexact) else values.astype(jnp.float32)
        values = jnp.where(same, values, jnp.nan)
    if ids.n_batch:
        return _Entries(data, values)
    examples = jnp.where(within, _from_start(ids.indices[:, 0], ids.shape[0]), ids.shape[0])  # `shape[0]`: left out
    return _Entries(data, values, functools.partial(_by_example, examples, ids.shape[0]))


def _by_example(examples: jax.Array, batch: int, x: jax.Array, dimension: int) -> jax.Array:
    del dimension  # there is one
    return jax.ops.segment_sum(x, examples, batch)


def _within(x: BCOO) -> jax.Array:
    """A mask of the entries that are not padding, whose indices are out of bounds."""
    sizes = jnp.array(x.shape[x.n_batch :], x.indices.dtype)
    index = _from_start(x.indices, sizes)
    return ((index >= 0) & (index < sizes)).all(axis=-1)


def _from_start(index: jax.Array, size: Any) -> jax.Array:
    return jnp.where(index < 0, index + size, index)  # jax counts a negative index from the end


def _check_integers(call: str, ids: Any) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{call} needs integer ids; got {ids.dtype}{list(ids.shape)}.")
