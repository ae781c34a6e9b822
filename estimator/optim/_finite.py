"""Whether arrays are finite, and updates that are made only where they are."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from estimator.core._typing import PyTree, Tree


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no array of a pytree holds an inf or a NaN, a bool scalar."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def select(condition: jax.Array, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x if x is y else jnp.where(condition, x, y), one, other)


def update_if(condition: jax.Array | None, update: Callable[[Tree], Tree], before: Tree, always: bool = False) -> Tree:
    """`update(before)`, in the dtypes of `before`; where the condition does not hold, `before` as it is.

    On CPU devices it is a branch: with a choice between old and new values, XLA computes them together, into copies of
    what it reads (twice the time of a small step in a loop). For others it is that choice, since a branch makes the
    host wait for the device.

    Args:
      condition: bool scalar; None: it holds.
      always: whether it always holds, though XLA does not see that; so that there is a branch on CPU devices, and
        nothing to choose elsewhere.
    """
    if condition is None:
        return update(before)

    def updated() -> Tree:
        return jax.tree.map(lambda x, y: y if x.dtype == y.dtype else y.astype(x.dtype), before, update(before))

    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(condition, updated, lambda: before),
        default=updated if always else lambda: select(condition, updated(), before),
    )
