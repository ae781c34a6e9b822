"""The dependence of the values of a jaxpr on the rows of tables, from its inputs to its outputs.

Two things are followed: whether a row depends on only the same row of one table, and the value of a row that has no
gradient. Of an operation that is not listed here the first is taken to be false, so that the answer is never too good.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


class Kind(enum.Enum):
    SHARED = "it depends on no table"
    ALIKE = "it depends on no table, and is the same in every row"
    ROWS = "it has a table's rows, each of which depends on the same row of the table alone"
    MIXED = "it depends on a table in another way"


class Input(NamedTuple):
    """The row of an input, by the number of the input."""

    number: int


class Value(NamedTuple):
    """Knowledge about a value.

    Attributes:
      kind: how it depends on tables.
      table: the one whose rows it has.
      still: its entries where a row has no gradient: a numpy scalar, the `Input` that they are equal to, or None.
    """

    kind: Kind
    table: str | None = None
    still: np.generic | Input | None = None

    def without_rows(self) -> Value:
        """The value after an operation that takes the rows apart."""
        return MIXED if self.kind in (Kind.ROWS, Kind.MIXED) else SHARED


MIXED, SHARED = Value(Kind.MIXED), Value(Kind.SHARED)

# Operations on each entry by itself, as numpy has them for constants.
_BY_ENTRY: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.logical_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": np.divide,
    "eq": np.equal,
    "exp": np.exp,
    "ge": np.greater_equal,
    "gt": np.greater,
    "imag": np.imag,
    "integer_pow": lambda x, y: x**y,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "pow": np.power,
    "real": np.real,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda case, *values: values[int(case)],
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
}
# A zero at one of these places makes the result zero, since a number that is not finite is an error anyway.
_ABSORBING = {"mul": (0, 1), "and": (0, 1), "div": (0,)}
# Such a number at such a place leaves the other argument as it is.
_NEUTRAL = {
    "add": ((0, 0), (1, 0)),
    "add_any": ((0, 0), (1, 0)),
    "sub": ((1, 0),),
    "mul": ((0, 1), (1, 1)),
    "div": ((1, 1),),
}

# Reductions, with the value that adds nothing to one: where rows without a gradient have it, the others are enough.
_REDUCTIONS = {"reduce_and": True, "reduce_or": False, "reduce_max": None, "reduce_min": None, "reduce_sum": 0}

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def follow(closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
    """The outputs of a jaxpr, by its inputs."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, map(_constant, closed.consts), strict=True))
    known |= zip(jaxpr.invars, inputs, strict=True)

    def value_of(atom: Any) -> Value:
        return _constant(atom.val) if hasattr(atom, "val") else known[atom]  # a literal

    for equation in jaxpr.eqns:
        known |= zip(equation.outvars, _follow_one(equation, list(map(value_of, equation.invars))), strict=True)
    return list(map(value_of, jaxpr.outvars))


def unknown(shape: Sequence[int]) -> Value:
    """An array that has to do with no table."""
    return Value(Kind.ALIKE) if math.prod(shape) == 1 else SHARED  # a single entry is the same in every row


def _constant(value: Any) -> Value:
    if jnp.size(value) != 1 or isinstance(value, jax.core.Tracer):
        return unknown(jnp.shape(value))
    return Value(Kind.ALIKE, still=np.asarray(value).reshape(-1)[0])


def _follow_one(equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        return follow(params.get("jaxpr") or params["call_jaxpr"], inputs)
    if name == "cond":
        which, *operands = inputs
        branches = [follow(branch, operands) for branch in params["branches"]]
        return [_select([which, *values]) for values in zip(*branches, strict=True)]
    results: list[Any] = [out.aval for out in equation.outvars]
    if name == "select_n":
        value = _select(inputs)
    elif name in _BY_ENTRY:
        value = _join(inputs)._replace(still=_value_at_rest(equation, [x.still for x in inputs]))
    elif name in _REDUCTIONS:
        value = _reduce(name, params["axes"], inputs[0])
    elif name in ("broadcast_in_dim", "reshape", "squeeze"):
        value = _reshape(equation, inputs[0])
    else:
        value = MIXED if any(x.kind in (Kind.ROWS, Kind.MIXED) for x in inputs) else SHARED
    return [unknown(result.shape) if value.kind is Kind.SHARED else value for result in results]


def _join(inputs: Sequence[Value]) -> Value:
    """The kind of what is computed entry by entry."""
    kinds, tables = {x.kind for x in inputs}, {x.table for x in inputs if x.table}
    if Kind.MIXED in kinds or len(tables) > 1 or (tables and Kind.SHARED in kinds):
        return MIXED  # the entries of a shared array differ from row to row
    if tables:
        return Value(Kind.ROWS, tables.pop())
    return SHARED if Kind.SHARED in kinds else Value(Kind.ALIKE)


def _select(inputs: Sequence[Value]) -> Value:
    """One of several values: by the first, which is a constant, or which is not known."""
    which, *cases = inputs
    stills = [case.still for case in cases]
    still = stills[int(which.still)] if isinstance(which.still, np.generic) else stills[0]
    is_sure = isinstance(which.still, np.generic) or all(_equal(other, still) for other in stills)
    return _join(inputs)._replace(still=still if is_sure else None)


def _value_at_rest(equation: JaxprEqn, stills: Sequence[Any]) -> Any:
    """The entries of a result in a row without a gradient, by the arguments' entries in that row."""
    name = equation.primitive.name
    source, result = (np.dtype(v.aval.dtype) for v in (equation.invars[0], equation.outvars[0]))  # type: ignore[attr-defined]
    if all(isinstance(x, np.generic) for x in stills):
        exponents = (equation.params["y"],) if name == "integer_pow" else ()
        with np.errstate(all="ignore"):
            return np.asarray(_BY_ENTRY[name](*stills, *exponents)).astype(result)[()]
    if name in ("copy", "convert_element_type") and source == result:
        return stills[0]
    if any(_is_number(stills[i], 0) for i in _ABSORBING.get(name, ())):
        return result.type(0)
    return next((stills[1 - i] for i, number in _NEUTRAL.get(name, ()) if _is_number(stills[i], number)), None)


def _reduce(name: str, axes: Sequence[int], value: Value) -> Value:
    if 0 not in axes:
        # A maximum of equal entries is the entry; so is a sum of zeros.
        same = isinstance(value.still, np.generic) and (name != "reduce_sum" or value.still == 0)
        return value if same else value._replace(still=None)
    if value.kind is Kind.ROWS and _is_number(value.still, _REDUCTIONS[name]):
        return SHARED
    return value.without_rows()


def _reshape(equation: JaxprEqn, value: Value) -> Value:
    """A value in another shape, which has the rows if the first axis is the same."""
    before, after = (v.aval.shape for v in (equation.invars[0], equation.outvars[0]))  # type: ignore[attr-defined]
    is_broadcast = equation.primitive.name == "broadcast_in_dim"
    places = equation.params["broadcast_dimensions"] if is_broadcast else (0,)
    if before[:1] == after[:1] and places[:1] == (0,):
        return value
    if is_broadcast and value.kind is Kind.SHARED and (0 not in places or before[places.index(0)] == 1):
        return Value(Kind.ALIKE)  # the first axis is new, or had one entry
    return value if value.kind is Kind.ALIKE and is_broadcast else value.without_rows()


def _is_number(still: Any, number: float | None) -> bool:
    return isinstance(still, np.generic) and bool(still == number)


def _equal(one: Any, other: Any) -> bool:
    return one is not None and type(one) is type(other) and bool(one == other)
