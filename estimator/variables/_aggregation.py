"""`VariableAggregation`: merges the values that towers assign to a variable."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from estimator.core._typing import PyTree


class VariableAggregation(enum.StrEnum):
    """The ways to make one value of those that several towers `assign` to a variable."""

    MEAN = "mean"
    SUM = "sum"
    ONLY_FIRST_TOWER = "only_first_tower"

    def addend(self, name: str, value: PyTree, index: jax.Array, parts: int, kind: str = "towers") -> PyTree:
        """The contribution of one part of a batch to the sum over parts, which is the variable's new value.

        Args:
          name, value: of the variable, as the part assigned it.
          index: which of the parts it is.
          kind: of parts, for the message.

        Raises:
          ValueError: integers were to be averaged, or it is a PRNG key.
        """
        if parts == 1:
            return value
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"The {kind} assign to the variable {name!r}, which holds a PRNG key. Keys cannot be put together: "
                "take one by `est.make_rng()` in each step, or keep `jax.random.key_data(key)`."
            )
        if self == VariableAggregation.SUM:
            return value
        if self == VariableAggregation.ONLY_FIRST_TOWER:
            # A sum in which the other towers have zeros: each aggregation is a sum, so that they are packed together.
            return jax.tree.map(lambda x: jnp.where(index == 0, x, jnp.zeros_like(x)), value)
        for leaf in jax.tree.leaves(value):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(
                    f"The {kind} assign to the variable {name!r}, whose {leaf.dtype} values cannot be averaged. Create "
                    "it with `aggregation=est.VariableAggregation.SUM` or `ONLY_FIRST_TOWER`, or use `est.assign_add`."
                )
        return jax.tree.map(lambda x: x / parts, value)
