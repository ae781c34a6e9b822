"""What an optax transformation does to the rows of an array, found by trying it out."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from estimator.core._typing import PyTree
from estimator.optim._extra_args import call_update


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
    transformation: optax.GradientTransformation,
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
            return _try_out(transformation, sparse, params, {"value": jnp.ones(())} if "value" in extra else {})
    except Exception as e:  # What cannot take a part of the rows is not row-wise. Other errors will come again.
        logging.debug("An optax transformation does not take a part of the rows: %s", e)
        return Rule.WHOLE


_UNTOUCHED = 1  # of the four rows: the one without a gradient
_COUNTS = (10**3, 10**4, 10**6)


def _try_out(
    transformation: optax.GradientTransformation,
    sparse: tuple[str, ...],
    params: dict[str, PyTree],
    extra: dict[str, Any],
) -> Rule:
    random = np.random.default_rng(0)

    def draw(scale: float = 1.0) -> PyTree:
        def table(x: Any) -> Any:
            return np.float32(scale * random.normal(size=(4,) + (2,) * (x.ndim - 1)))

        def other(x: Any) -> Any:  # Small, so that a norm is that of the tables.
            return np.float32(1e-3 * random.normal(size=[min(n, 2) for n in x.shape]))

        return {n: table(x) if n in sparse else jax.tree.map(other, x) for n, x in params.items()}

    tables = {n: x.shape for n, x in draw().items() if n in sparse}

    def half(tree: PyTree) -> PyTree:
        return map_tables(lambda _, x: x[::2], tables, params, tree)

    def untouched(tree: PyTree) -> list[jax.Array]:
        rows: list[jax.Array] = []
        map_tables(lambda _, x: rows.append(x[_UNTOUCHED]), tables, params, tree)
        return rows

    def update(gradients: PyTree, state: PyTree, values: PyTree) -> tuple[PyTree, PyTree]:
        return call_update(transformation.update, gradients, state, values, extra)

    @jax.jit
    def try_out(values: PyTree, history: list[PyTree], gradients: list[PyTree]) -> Any:
        def one(state: PyTree, gradients: PyTree) -> list[jax.Array]:
            gradients = map_tables(lambda _, x: x.at[_UNTOUCHED].set(0), tables, params, gradients)
            steps, after = update(gradients, state, values)
            alone = update(half(gradients), half(state), half(values))
            still = [jnp.zeros_like(x) for x in untouched(steps)]
            return [
                _equal(half((steps, after)), alone, 1e-5),
                _equal(untouched(steps), still) & _equal(untouched(state), untouched(after)),
                _equal(untouched(_without_traces(state)), untouched(_without_traces(after))),
            ]

        new = used = transformation.init(values)
        states = [(new, True)]
        for earlier in history:
            _, used = update(earlier, used, values)
            states.append((used, False))
        states += [(_at_count(state, n), is_new) for n in _COUNTS for state, is_new in ((new, True), (used, False))]
        every_pair = jax.vmap(jax.vmap(one, (None, 0)), (0, None), axis_size=len(states))
        found = every_pair(_stacked([state for state, _ in states]), _stacked(gradients))
        return [*found, jnp.array([is_new for _, is_new in states])]

    # Gradients of 1e12 are clipped by whatever clips.
    alone, left, left_but_traces, new = map(np.asarray, try_out(draw(), [draw(), draw()], [draw(), draw(1e12)]))
    if not alone.all():
        return Rule.WHOLE
    if left.all():
        return Rule.EXACT
    return Rule.MOMENTUM if left_but_traces.all() and left[new].all() else Rule.ROW_WISE


def _stacked(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _equal(one: PyTree, other: PyTree, tolerance: float = 0.0) -> jax.Array:
    close = jax.tree.map(lambda x, y: jnp.allclose(x, y, rtol=tolerance, atol=0, equal_nan=True), one, other)
    return jnp.array(jax.tree.leaves(close)).all()


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
