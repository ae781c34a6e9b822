"""Optax transformations that may be given the looked-up rows of a table instead of the table."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from estimator.core._typing import PyTree, Variables
from estimator.optim._extra_args import call_update, extra_args
from estimator.optim._given_rate import GivenRate
from estimator.optim._row_dependence import Input, Kind, Value, follow, unknown

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


class RowRule(enum.Enum):
    """Fate of a row; the values complete "since ..." in messages."""

    OWN_GRADIENT = "a row changes by its own gradient and momentum alone"
    ANY_STEP = "a row may change without a gradient of its own"
    WHOLE_TABLE = "it could not be shown that a row changes by its own gradient alone"


class _CallsLossAgain(Exception):
    """The update asks for the loss at other values, which all rows of a table have a part in."""


def row_rule(
    transformation: optax.GradientTransformation,
    tables: Collection[str],
    slots: optax.OptState,
    params: Variables,
    exact: bool = True,
) -> RowRule:
    """Finds the rule for the rows of the variables `tables`.

    It is read off the jaxpr of an update, so that a transformation of a user is known as one of optax is. If it is not
    to be `exact`, ANY_STEP may be found where WHOLE_TABLE is right, in half the time.
    """
    if any(jnp.ndim(params[table]) == 0 for table in tables):
        return RowRule.WHOLE_TABLE
    if isinstance(transformation, GivenRate):
        make, slots = transformation.make, slots.inner
    else:
        make = functools.partial(_return, transformation)
    arguments = jax.eval_shape(lambda *arguments: arguments, params, slots, params)  # gradients are like variables
    paths = jax.tree_util.tree_leaves_with_path(arguments)
    owners = [_owner(path, leaf, tables, params) for path, leaf in paths]
    if "" in owners:
        return RowRule.WHOLE_TABLE  # a slot that cannot be cut by rows, such as the sums of optax.adafactor
    try:
        update = _trace(make, arguments)
    except _CallsLossAgain:
        return RowRule.WHOLE_TABLE
    momentum: list[bool] = jax.tree.leaves(tuple(map(_is_momentum, arguments)))
    n = len(jax.tree.leaves(params))

    def outputs(moving: bool) -> list[Value]:
        """Knowledge after the update if rows without a gradient have a momentum, or have none."""
        inputs = []
        for i, (owner, (_, leaf)) in enumerate(zip(owners, paths, strict=True)):
            still: Any = Input(i)
            if i < n or (momentum[i] and not moving):
                still = np.dtype(leaf.dtype).type(0)
            inputs.append(Value(Kind.ROWS, owner, still) if owner else unknown(leaf.shape))
        return follow(update, [*inputs, unknown(())])  # the learning rate

    # The updates of the variables, then the slots, in the order of the arguments.
    rest, moved = outputs(moving=False), outputs(moving=True)
    owners = owners[: len(rest)]
    if not all(value.kind is Kind.ALIKE or _fits(value, owner) for value, owner in zip(moved, owners, strict=True)):
        return RowRule.WHOLE_TABLE
    stays = [
        isinstance(rest[i].still, np.generic) and rest[i].still == 0
        if i < n or momentum[i]
        else rest[i].still == moved[i].still == Input(i)
        for i, owner in enumerate(owners)
        if owner
    ]
    rule = RowRule.OWN_GRADIENT if all(stays) else RowRule.ANY_STEP
    if (exact or rule is RowRule.OWN_GRADIENT) and _knows_height(make, update, arguments[0], tables):
        return RowRule.WHOLE_TABLE
    return rule


def _knows_height(
    make: Callable[[jax.Array], optax.GradientTransformation],
    update: ClosedJaxpr,
    params: Variables,
    tables: Collection[str],
) -> bool:
    """Returns whether the number of rows is in an update: a mean over the table, say, divides by it."""
    more_rows: Variables = {name: _with_more_rows(x) if name in tables else x for name, x in params.items()}
    more_slots = jax.eval_shape(lambda params, rate: make(rate).init(params), more_rows, jnp.zeros(()))
    return list(_constants(update)) != list(_constants(_trace(make, (more_rows, more_slots, more_rows))))


def _fits(value: Value, owner: str | None) -> bool:
    return value.kind is not Kind.MIXED and value.table == owner


def _return(transformation: optax.GradientTransformation, rate: jax.Array) -> optax.GradientTransformation:
    return transformation


def _trace(make: Callable[[jax.Array], optax.GradientTransformation], arguments: PyTree) -> ClosedJaxpr:
    """The jaxpr of an update: a function of gradients, slots, variables, and a learning rate that is given apart."""

    def call_again(params: optax.Params) -> NoReturn:
        raise _CallsLossAgain

    def update(gradients: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> PyTree:
        extra = extra_args(jnp.zeros(()), params, call_again)
        with jax.numpy_dtype_promotion("standard"):
            return call_update(make(rate), gradients, slots, params, extra)

    return jax.make_jaxpr(update)(*arguments, jnp.zeros(()))


def _owner(path: jax.tree_util.KeyPath, leaf: Any, tables: Collection[str], params: Variables) -> str | None:
    """The table whose rows an array has; None if of no table, "" if of one in another form."""
    name = variable_of(path, params)
    if name is None or name not in tables:
        return None
    if leaf.shape == jnp.shape(params[name]):
        return name
    return None if leaf.size == 1 else ""


def _with_more_rows(table: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return table.update(shape=(2 * table.shape[0] + 1, *table.shape[1:]))


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The operations of a jaxpr, and the numbers in it."""
    if hasattr(jaxpr, "consts"):
        yield from (np.asarray(x).tobytes() for x in jaxpr.consts if not isinstance(x, jax.core.Tracer))
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        yield from (repr(atom.val) for atom in equation.invars if hasattr(atom, "val"))
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from _constants(inner)


def _is_momentum(tree: PyTree) -> PyTree:
    def visit(node: PyTree) -> PyTree:
        return jax.tree.map(lambda _: isinstance(node, optax.TraceState), node)

    return jax.tree.map(visit, tree, is_leaf=lambda node: isinstance(node, optax.TraceState))


def variable_of(path: jax.tree_util.KeyPath, params: Variables) -> str | None:
    """The name of the variable that a leaf of an optax state belongs to."""
    keys = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    return next((key for key in keys if key in params), None)
