"""An optax transformation from a rule for one array, with slots by TensorFlow's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from estimator.core._typing import PyTree
from estimator.optim._sparse_update import RowWise

Rule = Callable[..., tuple[jax.Array, ...]]
State = TypeVar("State", bound=tuple[Any, ...])


def fill_slot(params: optax.Params, value: float = 0.0) -> PyTree:
    """Makes a slot for each variable, filled with a number."""
    return jax.tree.map(lambda x: jnp.full_like(x, value), params)


def complement(decay: float) -> float:
    """`1 - decay` in float32, as in TensorFlow: of 0.999 it is 0.00100005, as in Adam's bias correction."""
    return float(np.float32(1) - np.float32(decay))


def row_wise(rule: Rule, state_of: type[Any], **fill: float) -> RowWise:
    """The transformation of a rule, as `apply_rule` takes it, that treats each row by itself.

    Args:
      state_of: a NamedTuple, all of whose fields are slots.
      fill: the numbers that slots begin with, by name; others begin with zero.
    """
    slots = state_of._fields

    def init(params: optax.Params) -> Any:
        return state_of(*(fill_slot(params, fill.get(slot, 0.0)) for slot in slots))

    def update(gradients: optax.Updates, state: Any, params: optax.Params) -> tuple[optax.Updates, Any]:
        return apply_rule(rule, gradients, params, state, *slots)

    return RowWise(init, update)


def apply_rule(
    rule: Rule,
    gradients: optax.Updates,
    params: optax.Params,
    state: State,
    *slots: str,
    scalars: Mapping[str, jax.Array] | None = None,
) -> tuple[optax.Updates, State]:
    """The updates, and the next state.

    Args:
      rule: of a gradient, the value of its variable and its slots: returns the new value and the new slots.
      state: a NamedTuple.
      slots: its fields that hold a value per variable.
      scalars: its other fields, as they are after the step.
    """

    def at_leaf(gradient: jax.Array, value: jax.Array, *before: jax.Array) -> tuple[jax.Array, ...]:
        new, *after = rule(gradient, value, *before)
        # Rules return the new value, as TensorFlow's formulas do; optax adds a difference. A slot keeps its dtype,
        # which the float32 learning rate would change: the carry of a compiled loop needs one dtype.
        return new - value, *(x.astype(old.dtype) for x, old in zip(after, before, strict=True))

    results = jax.tree.map(at_leaf, gradients, params, *(getattr(state, slot) for slot in slots))
    updates, *trees = (
        jax.tree.map(lambda _, result, i=i: result[i], gradients, results) for i in range(1 + len(slots))
    )
    return updates, state._replace(**dict(zip(slots, trees, strict=True)), **(scalars or {}))  # type: ignore[attr-defined]
