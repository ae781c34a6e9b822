"""Decoupled weight decay, as `tf.contrib.opt.DecoupledWeightDecayExtension` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator.optim._sparse_update import TakesSparseGradients
from estimator.sparse._indexed_slices import IndexedSlices


def with_weight_decay(transformation: optax.GradientTransformation, weight_decay: float) -> TakesSparseGradients:
    """The transformation, which also subtracts `weight_decay` times the variable; the learning rate has no part in it.

    A table with a sparse gradient decays only in the looked-up rows.
    """

    update_inner = transformation.update

    def update(
        gradients: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        sparse_gradients: Mapping[str, IndexedSlices] | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        steps, state = update_inner(gradients, state, params)
        rows = {table: _mark_rows(gradient) for table, gradient in (sparse_gradients or {}).items()}

        def decay(path: jax.tree_util.KeyPath, step: jax.Array, value: jax.Array) -> jax.Array:
            # The first key on the path is the variable's name.
            table = getattr(path[0], "key", None) if path else None
            return step - weight_decay * (value * rows[table] if table in rows else value)

        return jax.tree_util.tree_map_with_path(decay, steps, params), state

    return TakesSparseGradients(transformation.init, update)


def _mark_rows(gradient: IndexedSlices) -> jax.Array:
    """Marks by 1 the rows that a sparse gradient names, others by 0, in the shape `[rows, 1, ...]`."""
    rows = jnp.zeros(gradient.dense_shape[0], gradient.values.dtype)
    # Padding among looked-up ids has a negative index, which does not count from the end.
    rows = rows.at[gradient.indices].set(1, mode="drop", wrap_negative_indices=False)
    return rows.reshape(-1, *(1,) * (len(gradient.dense_shape) - 1))
