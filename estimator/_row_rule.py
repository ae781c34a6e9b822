"""What an optax transformation does to the rows of an array, found by trying it out."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from estimator._frame import PyTree


class Rule(enum.Enum):
    """What becomes of a row; the values complete "since ..." in the log."""

    EXACT = "a row changes by its own gradient alone, and without one it stays as it is"
    MOMENTUM = "a row changes by its own gradient alone, and without one it moves on by its momentum"
    ROW_WISE = "a row may change without a gradient of its own"
    WHOLE = "it could not be shown that a row changes by its own gradient alone"


def map_tables(
    fn: Callable[..., Any], tables: Mapping[str, tuple[int, ...]], params: Any, tree: PyTree, *rest: PyTree
) -> PyTree:
    """`fn(table, leaf, ...)` for the leaves of variables or slots that have a table's shape; of others the last one."""

    def visit(path: Any, *leaves: Any) -> Any:
        table = _variable(path, params)
        if table in tables and jnp.shape(leaves[0]) == tables[table]:
            return fn(table, *leaves)
        return leaves[-1]

    return jax.tree_util.tree_map_with_path(visit, tree, *rest)


def _variable(path: Any, params: Any) -> Any:
    """The name of the variable that a leaf of an optax state belongs to, or None."""
    keys = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    return next((key for key in keys if key in params), None)


def find_rule(
    transformation: optax.GradientTransformationExtraArgs,
    sparse: tuple[str, ...],
    slots: PyTree,
    params: dict[str, PyTree],
    extra: dict[str, Any],
) -> Rule:
    """What becomes of the rows of the variables `sparse`, tried out on small arrays of the same names."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(slots):
        table = _variable(path, params)
        if table in sparse and jnp.shape(leaf) != params[table].shape and jnp.size(leaf) > 1:
            return Rule.WHOLE  # A slot that cannot be cut by rows, such as the sums of optax.adafactor.
    try:
        with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
            return _try_out(transformation, sparse, params, {key: jnp.ones(()) for key in extra})
    except Exception as e:  # What cannot take a part of the rows is not row-wise. Other errors will come again.
        logging.debug("An optax transformation does not take a part of the rows: %s", e)
        return Rule.WHOLE


_UNTOUCHED = 1  # of the four rows: the one without a gradient


def _try_out(
    transformation: optax.GradientTransformationExtraArgs,
    sparse: tuple[str, ...],
    params: dict[str, PyTree],
    extra: dict[str, Any],
) -> Rule:
    random = np.random.default_rng(0)

    def draw(scale: float = 1.0) -> PyTree:
        def table(x: Any) -> jax.Array:
            return jnp.float32(scale * random.normal(size=(4,) + (2,) * (x.ndim - 1)))

        def other(x: Any) -> jax.Array:  # Small, so that a norm is that of the tables.
            return jnp.float32(1e-3 * random.normal(size=[min(n, 2) for n in x.shape]))

        return {n: table(x) if n in sparse else jax.tree.map(other, x) for n, x in params.items()}

    small = draw()
    tables = {n: small[n].shape for n in sparse}

    def half(tree: PyTree) -> PyTree:
        return map_tables(lambda _, x: jnp.asarray(np.asarray(x)[::2]), tables, small, tree)

    def untouched(tree: PyTree) -> list[np.ndarray]:
        rows: list[np.ndarray] = []
        map_tables(lambda _, x: rows.append(np.asarray(x)[_UNTOUCHED]), tables, small, tree)
        return rows

    def changes(before: PyTree, after: PyTree) -> bool:
        return any((x != y).any() for x, y in zip(untouched(before), untouched(after), strict=True))

    def update(gradients: PyTree, state: PyTree, values: PyTree) -> tuple[PyTree, PyTree]:
        return transformation.update(gradients, state, values, **extra)

    zeros = map_tables(lambda _, x: jnp.zeros_like(x), tables, small, small)
    new = [transformation.init(small)]
    used: list[PyTree] = []
    for _ in range(2):
        used.append(update(draw(), (new + used)[-1], small)[1])
    for count in (10**3, 10**4, 10**6):
        new.append(_at_count(new[0], count))
        used.append(_at_count(used[1], count))

    exact = momentum = True
    for state, scale in itertools.product(new + used, (1.0, 1e12)):  # 1e12: clipped by whatever clips
        gradients = map_tables(lambda _, x: x.at[_UNTOUCHED].set(0), tables, small, draw(scale))
        steps, after = update(gradients, state, small)
        if not _equal(half((steps, after)), update(half(gradients), half(state), half(small))):
            return Rule.WHOLE
        moves = changes(zeros, steps)
        exact = exact and not moves and not changes(state, after)
        is_new = any(state is one for one in new)
        momentum = momentum and not changes(_without_traces(state), _without_traces(after))
        momentum = momentum and not (is_new and (moves or changes(state, after)))
    return Rule.EXACT if exact else Rule.MOMENTUM if momentum else Rule.ROW_WISE


def _equal(one: PyTree, other: PyTree) -> bool:
    def close(x: Any, y: Any) -> bool:
        return np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True)

    return jax.tree.all(jax.tree.map(close, one, other))


def _at_count(state: PyTree, count: int) -> PyTree:
    """The state with its counters set, to see what schedules do later."""

    def visit(x: Any) -> Any:
        is_counter = jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        return jnp.full_like(x, count) if is_counter else x

    return jax.tree.map(visit, state)


def _without_traces(state: PyTree) -> PyTree:
    def is_trace(node: Any) -> bool:
        return isinstance(node, optax.TraceState)

    return jax.tree.map(lambda node: None if is_trace(node) else node, state, is_leaf=is_trace)
