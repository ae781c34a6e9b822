"""Rows of large tables, whose gradients are only as large as what was looked up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._frame import Frame, current_frame, current_trace
from estimator.core._typing import PyTree, Variables
from estimator.sparse._indexed_slices import IndexedSlices
from estimator.variables._initial_value import as_dtype, as_shape, check_declared
from estimator.variables._lookups import Lookups
from estimator.variables._partitioning import Partition
from estimator.variables._variables import get_variable, list_names, read


def embedding_lookup(
    name: str,
    ids: jax.typing.ArrayLike,
    shape: tuple[int, ...] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    initializer: Callable[..., jax.Array] | jax.Array | None = None,
    partition: Partition = None,
) -> jax.Array:
    """Rows of a variable, shape `ids.shape + shape[1:]`, with a sparse gradient.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     rows = est.embedding_lookup("words", features, (1000, 2), initializer=jax.nn.initializers.ones)
    ...     loss = est.losses.mean_squared_error(labels, rows.sum((1, 2)))
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> model = est.transform(model_fn)
    >>> ids, y = jnp.array([[3, 5], [3, -1]]), jnp.array([4.0, 0.0])
    >>> state = model.init(jax.random.key(0), ids, y)
    >>> state, spec = model.train_step(state, ids, y)
    >>> print(state.variables["words"][3], state.variables["words"][5])
    [0.8 0.8] [1. 1.]

    The gradient is an `est.IndexedSlices` of one row per id, whatever the size of the table, and the optimizer
    changes only the rows that were looked up, where that is right: see `est.lazy`. This holds only while the table is
    read only by lookups. Where the same run also gets it by `get_variable` or `read_variable` (a softmax tied to the
    embedding), or looks it up within a function that jax traces apart (`jax.jit`, `jax.vmap`, `jax.lax.scan`,
    `jax.checkpoint`), or a `custom_getter` of a scope gets it, the gradient is right, but dense.

    Args:
      name: prefixed by the scopes around the call. Several lookups in one run share the table.
      ids: integers of any shape. A negative one is padding: its row is zeros and has no gradient. One beyond the
        table has a row of NaN and no gradient, so that the NaN check of training finds it.
      shape, dtype, initializer, partition: of the table, as for `get_variable`, which creates it at the first lookup.
        At later ones they may be left out.

    Raises:
      TypeError: the ids are not integers, or the name is not a string, such as the table itself.
      ValueError: there is no such table and no shape is given, it has another shape or dtype, or it is not a floating
        array of at least two dimensions.
    """
    return named_lookup("est.embedding_lookup", name, ids, shape, dtype, initializer, partition)


def named_lookup(
    caller: str,
    name: str,
    ids: jax.typing.ArrayLike,
    shape: tuple[int, ...] | None,
    dtype: jax.typing.DTypeLike | None,
    initializer: Callable[..., jax.Array] | jax.Array | None,
    partition: Partition,
) -> jax.Array:
    """`embedding_lookup`, called by the function that errors name."""
    frame = current_frame(caller)
    check_table_name(caller, name)
    call = f"`{caller}({name!r})`"
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{call} needs integer ids; got {ids.dtype}{list(ids.shape)}.")
    full, reads = "/".join((*frame.scope, str(name))), frame.notes.get(Lookups)
    if full in frame.declared.trainable:
        if not callable(shape):
            check_declared(call, as_shape(call, shape), as_dtype(call, dtype), frame.variables[full], "the first call")
    elif shape is None and initializer is None:
        raise ValueError(
            f"{call} names no variable of this run, which has got {list_names(frame.declared.trainable)} so far. "
            "Give the shape of the table, (rows, width), to create it."
        )
    else:
        table = get_variable(name, shape, dtype, initializer, partition=partition)
        if frame.scope_defaults.custom_getter is None:
            reads.read_whole.discard(full)  # The user has not seen the whole table.
        else:
            reads.by_getter[full] = table
    _check_table(call, reads.by_getter.get(full, frame.variables[full]))
    if frame.tracing.trace != current_trace():  # Ids of a function that is traced by itself are not known outside.
        reads.read_whole.add(full)
    return _look_up(frame, full, ids)


def check_table_name(caller: str, name: Any) -> None:
    if isinstance(name, str) and name:
        return
    given = f"an array of shape {jnp.shape(name)}" if hasattr(name, "shape") else repr(name)
    raise TypeError(
        f"`{caller}` takes the name of a table, as `est.get_variable` has it, and not its value; got {given}. Write "
        f"`{caller}('name', ids, shape=(rows, width))`, which creates the table at the first lookup and needs no "
        "`est.get_variable`."
    )


def _look_up(frame: Frame, full: str, ids: jax.Array) -> jax.Array:
    reads = frame.notes.get(Lookups)
    table: jax.Array = read(frame, full) if full in reads.read_whole else frame.variables[full]
    table = reads.by_getter.get(full, table)
    length = len(table)
    flat = ids.reshape(-1).astype(ids.dtype if ids.dtype.itemsize >= 4 else jnp.int32)
    # The length of the table does not enter here: tables of any lengths with the same ids have the same indices, so
    # that XLA gathers them over the towers once.
    indices = jnp.where((flat >= 0) & (flat <= jnp.iinfo(jnp.int32).max), flat.astype(jnp.int32), -1)
    rows = table.at[indices].get(mode="clip", wrap_negative_indices=False)
    if full not in reads.read_whole:
        lookups = reads.rows.setdefault(full, [])
        lookups.append(indices)
        if reads.needs_taps:
            raise TapsNeeded
        if len(lookups) <= len(taps := reads.taps.get(full, ())):
            rows = rows + taps[len(lookups) - 1]
    column = flat.reshape(-1, *(1,) * (table.ndim - 1))
    rows = jnp.where(column < 0, 0.0, jnp.where(column < length, rows, jnp.nan))
    return rows.reshape(*ids.shape, *table.shape[1:])


# The gradient of a table. The table itself is not differentiated, since its gradient would be as large as the table:
# zeros, the taps, are added to the rows of each lookup and differentiated. Their shapes are known after a run without
# taps.


class TapsNeeded(BaseException):
    """Leaves a run at its first lookup; no `Exception`, so that a model_fn which catches those does not stop it."""


def put_taps(frame: Frame, taps: dict[str, list[jax.Array]], needs_taps: bool) -> None:
    """Has the lookups of a run add these to their rows, or the first one leave it by `TapsNeeded`."""
    reads = frame.notes.get(Lookups)
    reads.taps, reads.needs_taps = taps, needs_taps


def make_taps(frame: Frame) -> dict[str, list[jax.Array]]:
    """Zeros to add to the rows of each lookup that a run has made, by table.

    Tables that the model_fn has read as a whole have none; their gradient is dense.
    """
    taps = {}
    for name, rows in rows_by_table(frame).items():
        if name not in frame.notes.get(Lookups).read_whole:
            table = frame.variables[name]
            taps[name] = [jnp.zeros((ids.size, *table.shape[1:]), table.dtype) for ids in rows]
    return taps


def rows_by_table(frame: Frame) -> dict[str, list[jax.Array]]:
    """The rows of each lookup that a run has made, by table."""
    return frame.notes.get(Lookups).rows


def join_gradients(
    of_taps: Mapping[str, Sequence[jax.Array]],
    rows: Mapping[str, Sequence[jax.Array]],
    tables: Mapping[str, jax.Array],
    is_reached: Mapping[str, Sequence[bool]] | None = None,
) -> dict[str, IndexedSlices]:
    """The gradients of tables from the gradients of their taps; several lookups one after the other.

    Args:
      is_reached: by table, the taps that count; by default all. A table without one is left out.
    """
    joined = {}
    for name, parts in of_taps.items():
        counts = [True] * len(parts) if is_reached is None else is_reached[name]
        if any(counts):
            values, indices = (list(itertools.compress(each, counts)) for each in (parts, rows[name]))
            joined[name] = IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), tables[name].shape)
    return joined


def zero_gradients(frame: Frame, names: Iterable[str]) -> Variables:
    """Zeros of the kind that the gradients of a training step have."""
    sparse = join_gradients(make_taps(frame), rows_by_table(frame), frame.variables)
    return {n: sparse.get(n) or jax.tree.map(jnp.zeros_like, frame.variables[n]) for n in names}


def _check_table(call: str, table: PyTree) -> None:
    if not isinstance(table, jax.Array) or table.ndim < 2 or not jnp.issubdtype(table.dtype, jnp.inexact):
        typed = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", table)
        raise ValueError(
            f"{call} needs a floating table of at least two dimensions, (rows, width); the variable is {typed}. "
            "For one number per row write (rows, 1)."
        )
