"""Optimizers that change only the rows of a table that were looked up.

Where all that an optax transformation does to a row depends on that row alone, it can be given the touched rows and
their slots in place of the table and its slots. A step then costs what the lookups cost, whatever the table's size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from estimator.core._train_op import UpdatingOptimizer
from estimator.core._typing import PyTree
from estimator.optim._extra_args import call_update
from estimator.optim._row_wise_probe import Rule, find_rule, map_tables
from estimator.sparse._indexed_slices import IndexedSlices, dense


class _Lazy(optax.GradientTransformationExtraArgs):
    """Marks a transformation that is to see touched rows only."""


def lazy(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation, which of the tables with a sparse gradient changes the looked-up rows only.

    For variables with a dense gradient it does what it does anyway, and its state is the same. It is to Adam what
    `LazyAdam` was in TensorFlow: the averages of a row decay when the row is looked up, not in every step.

    Without it a sparse gradient is dealt with by what the optimizer is:

    - `optax.sgd`, `optax.adagrad` and others that leave a row without a gradient as it is see the looked-up rows
      only, with the very results that the dense gradient has;
    - `optax.sgd(momentum=...)` sees the looked-up rows only; the others do not move on by their momentum, as in
      TensorFlow;
    - any other is given the dense gradient, and the log says so.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     rows = est.embedding_lookup("words", features, (1000, 2), initializer=jax.nn.initializers.ones)
    ...     loss = est.losses.mean_squared_error(labels, rows.sum(1))
    ...     train_op = est.Optimizer(est.lazy(optax.adam(0.5))).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.array([3]), jnp.zeros(1))
    >>> for word in (3, 5):
    ...     state, _ = model.train_step(state, jnp.array([word]), jnp.zeros(1))
    >>> print(state.variables["words"][3].round(3), state.variables["words"][7])
    [0.5 0.5] [1. 1.]

    Args:
      transformation: of optax, row-wise: what becomes of a row of an array must depend on that row alone. Otherwise
        the training step raises a ValueError. `est.lazy` goes around the whole of an `optax.chain`.
    """
    if not isinstance(transformation, optax.GradientTransformation):
        raise TypeError(
            f"`est.lazy` takes an optax.GradientTransformation such as `optax.adam(1e-3)`; got {transformation!r}."
        )
    return _Lazy(*optax.with_extra_args_support(transformation))


def update_rows(
    optimizer: UpdatingOptimizer,
    gradients: dict[str, PyTree],
    slots: PyTree,
    params: dict[str, PyTree],
    extra: dict[str, Any],
) -> tuple[dict[str, PyTree], PyTree]:
    """The variables and slots after one update by dense and sparse gradients.

    Args:
      gradients, params: by variable name.
      extra: keyword arguments that the transformation's update may take.
    """
    transformation = optimizer.transformation

    def update(gradients: PyTree, slots: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        # optax itself mixes dtypes (adam's `decay**count`), so a user's strict promotion must not reach into it.
        with jax.numpy_dtype_promotion("standard"):
            steps, slots = call_update(transformation.update, gradients, slots, params, extra)
            return optax.apply_updates(params, steps), slots

    sparse = {name: g for name, g in gradients.items() if isinstance(g, IndexedSlices)}
    if not sparse:
        return update(gradients, slots, params)
    if not _takes_rows(optimizer, transformation, tuple(sparse), slots, params, extra):
        return update({name: dense(gradient) for name, gradient in gradients.items()}, slots, params)

    tables = {name: g.dense_shape for name, g in sparse.items()}
    indices, values = {}, {}
    for name, gradient in sparse.items():
        indices[name], values[name] = _sum_repeated(gradient)

    def get(table: str, array: jax.Array) -> jax.Array:
        return array.at[indices[table]].get(mode="clip", wrap_negative_indices=False)

    def put(table: str, array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.at[indices[table]].set(rows, mode="drop", wrap_negative_indices=False)

    old_rows, old_slots = (map_tables(get, tables, params, tree) for tree in (params, slots))
    rows, row_slots = update({**gradients, **values}, old_slots, old_rows)
    return map_tables(put, tables, params, params, rows), map_tables(put, tables, params, slots, row_slots)


def _sum_repeated(gradient: IndexedSlices) -> tuple[jax.Array, jax.Array]:
    """The touched rows, each once, and the sum of each one's values; at the end, indices beyond the table."""
    n, beyond = len(gradient.indices), gradient.dense_shape[0]
    indices, places = jnp.unique(gradient.indices, size=n, fill_value=beyond, return_inverse=True)
    return indices, jax.ops.segment_sum(gradient.values, places, n)


def _takes_rows(
    optimizer: UpdatingOptimizer,
    transformation: optax.GradientTransformation,
    sparse: tuple[str, ...],
    slots: PyTree,
    params: dict[str, PyTree],
    extra: dict[str, Any],
) -> bool:
    """Whether the transformation is to see touched rows only; found out once per optimizer."""
    known = (sparse, jax.tree.structure(params), jax.tree.structure(slots))
    is_new = known not in optimizer.row_rules
    if is_new:
        optimizer.row_rules[known] = find_rule(transformation, sparse, slots, params, extra)
    rule = optimizer.row_rules[known]
    is_lazy = isinstance(transformation, _Lazy)
    if is_lazy and rule is Rule.WHOLE:
        raise ValueError(
            f"`est.lazy` needs a row-wise transformation, but for that of the optimizer {optimizer.get_name()!r} "
            f"{rule.value}, as with `optax.clip_by_global_norm`. Leave `est.lazy` out to train {list(sparse)} by "
            "dense gradients, or change the gradients between `compute_gradients` and `apply_gradients`."
        )
    if is_new and not is_lazy and rule in (Rule.ROW_WISE, Rule.WHOLE):
        logging.info(
            "The optimizer %r gets the sparse gradients of %s as dense arrays, since %s; a step takes time by the "
            "size of the tables.%s",
            optimizer.get_name(),
            list(sparse),
            rule.value,
            " Write `est.lazy(...)` around its transformation to change looked-up rows only." * (rule is Rule.ROW_WISE),
        )
    return is_lazy or rule in (Rule.EXACT, Rule.MOMENTUM)
