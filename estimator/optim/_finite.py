"""Checks that arrays are finite, and updates that are made only where they are."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from estimator.core._typing import PyTree, Tree

_LARGE = 1024  # elements


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether all arrays of a pytree are finite, a bool scalar."""
    return jnp.stack([_is_finite(x) for x in jax.tree.leaves(tree)]).all()


def _is_finite(x: jax.Array) -> jax.Array:
    """Returns whether an array holds no inf and no NaN.

    On CPU devices a large one is multiplied by a vector of zeros: an inf or a NaN times zero is NaN, all else adds up
    to zero. XLA has a fast kernel for this product (2,048 floats in 0.1 us, 131,072 in 5 us), and a slow one for "is
    each element finite" (0.8 us and 85 us).
    """

    def by_element() -> jax.Array:
        return jnp.isfinite(x).all()

    if x.size < _LARGE or x.dtype not in (jnp.float32, jnp.float64):
        return by_element()
    # Along the longest dimension: so the fewest numbers are left to be compared with zero.
    axis = max(range(x.ndim), key=lambda i: x.shape[i])

    def by_product() -> jax.Array:
        return (jnp.tensordot(x, jnp.zeros(x.shape[axis], x.dtype), (axis, 0)) == 0).all()

    return jax.lax.platform_dependent(cpu=by_product, default=by_element)


def select(condition: jax.Array, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x if x is y else jnp.where(condition, x, y), one, other)


def in_dtypes_of(like: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: y if y.dtype == x.dtype else y.astype(x.dtype), like, tree)


def update_if(condition: jax.Array | None, update: Callable[[Tree], Tree], before: Tree, always: bool = False) -> Tree:
    """`update(before)`, in the dtypes of `before`; where the condition does not hold, `before` as it is.

    On CPU devices it is a branch: with a choice between old and new values, XLA computes them together, into copies of
    what it reads (twice the time of a small step in a loop). For others it is that choice, since a branch makes the
    host wait for the device.

    Args:
      condition: bool scalar; if None, it holds.
      always: whether it always holds, though XLA does not see that; so that there is a branch on CPU devices, and
        nothing to choose elsewhere.
    """

    # optax may compute in other dtypes, but both branches of a `cond` must return the same ones, and a loop of steps
    # carries the same ones.
    def cast_update() -> Tree:
        return in_dtypes_of(before, update(before))

    if condition is None:
        return cast_update()
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(condition, cast_update, lambda: before),
        default=cast_update if always else lambda: select(condition, cast_update(), before),
    )
