"""What several towers return becomes what one would have returned."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from estimator import EstimatorSpec, IndexedSlices, TrainOp, VariableAggregation
from estimator._gradients import Outcome, written
from estimator.metrics import Metric
from replicate._towers import cross_tower_concatenate, cross_tower_sum, num_towers, tower_index

PyTree = Any


def concatenate_rows(stacked: PyTree, rows: int, field: str) -> PyTree:
    """Arrays of shape `[towers, rows, ...]`, tower after tower: the order of the input.

    Args:
      rows: the number of examples in each tower.
      field: what the pytree is, for the message.

    Raises:
      ValueError: an array has no batch dimension.
    """

    def concatenate(path: Any, leaf: jax.Array) -> jax.Array:
        shape = leaf.shape[1:]
        if not shape or shape[0] % rows:
            raise ValueError(
                f"{field}{jax.tree_util.keystr(path)} must have the batch as its first dimension to be put together "
                f"from several towers; it has shape {shape} in a tower of {rows} examples. "
                "Report a value of the whole batch by eval_metric_ops."
            )
        return leaf.reshape(leaf.shape[0] * shape[0], *shape[1:])

    return jax.tree_util.tree_map_with_path(concatenate, stacked)


def join(parts: list[PyTree]) -> PyTree:
    """Parts of a batch one after the other."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def merges_by_sum(metric: Any) -> bool:
    """Whether the towers' states may ride in the one sum of everything else."""
    return isinstance(metric, Metric) and type(metric).merge is Metric.merge


def merge_metrics(stacked: dict[str, Any], towers: int) -> dict[str, Any]:
    """One metric for each name from states with the towers as their first dimension."""
    return {
        name: functools.reduce(
            lambda merged, other: merged.merge(other),
            [jax.tree.map(lambda x, i=i: x[i], metric) for i in range(towers)],
        )
        for name, metric in stacked.items()
    }


def apart(spec: EstimatorSpec, scale: float) -> tuple[EstimatorSpec, PyTree]:
    """The part of a tower's spec that is to be summed, and the part with a value per tower."""
    metrics = spec.eval_metric_ops
    by_sum = {name: metric for name, metric in metrics.items() if merges_by_sum(metric)}
    others = {name: metric for name, metric in metrics.items() if name not in by_sum}
    own = (spec.predictions, others, spec.export_outputs)
    train_op = spec.train_op
    if train_op is not None:
        train_op = TrainOp(
            tuple(u if u.loss is None else dataclasses.replace(u, loss=u.loss * scale) for u in train_op.updates)
        )
    loss = None if spec.loss is None else spec.loss * scale
    same = spec.tree_unflatten(spec.tree_flatten_with_keys()[1], (None, loss, train_op, by_sum, None))
    return same, own


def together(same: EstimatorSpec, own: PyTree) -> EstimatorSpec:
    predictions, metrics, exports = own
    metrics = {**same.eval_metric_ops, **metrics}
    return dataclasses.replace(same, predictions=predictions, eval_metric_ops=metrics, export_outputs=exports)


def merged(own: PyTree, towers: int, rows: int) -> PyTree:
    predictions, metrics, exports = own
    return (
        concatenate_rows(predictions, rows, "predictions"),
        merge_metrics(metrics, towers),
        concatenate_rows(exports, rows, "export_outputs"),
    )


def summed(
    same: EstimatorSpec,
    outcome: Outcome,
    variables: dict[str, PyTree],
    aggregation: dict[str, VariableAggregation],
) -> tuple[EstimatorSpec, dict[str, PyTree]]:
    """What all towers agree on after one sum: gradients, losses, and the variables the model_fn wrote."""
    assigned = {name: _share(name, value, aggregation[name]) for name, value in outcome.assigned.items()}
    same, assigned, added = _total((same, assigned, outcome.added))
    # A sum of booleans is an integer.
    assigned = jax.tree.map(lambda x, like: x.astype(like.dtype), assigned, outcome.assigned)
    return same, written(Outcome(outcome.spec, assigned, added), variables)


def _total(tree: PyTree) -> PyTree:
    """The sum over towers; of a sparse gradient, the slices of all towers, which stand for it."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_sparse)
    sums = cross_tower_sum([None if _is_sparse(leaf) else leaf for leaf in leaves])
    slices = cross_tower_concatenate([leaf if _is_sparse(leaf) else None for leaf in leaves])
    return jax.tree.unflatten(structure, [s if s is not None else t for s, t in zip(slices, sums, strict=True)])


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, IndexedSlices)


def _share(name: str, value: PyTree, aggregation: VariableAggregation) -> PyTree:
    """This tower's share of the value that all towers' sum is to give."""
    towers = num_towers()
    if towers == 1 or aggregation == VariableAggregation.SUM:
        return value
    if aggregation == VariableAggregation.ONLY_FIRST_TOWER:
        return jax.tree.map(lambda x: jnp.where(tower_index() == 0, x, jnp.zeros_like(x)), value)
    for leaf in jax.tree.leaves(value):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"The towers assign to the variable {name!r}, whose {leaf.dtype} values cannot be averaged. Create it "
                "with `aggregation=est.VariableAggregation.SUM` or `ONLY_FIRST_TOWER`, or use `est.assign_add`."
            )
    return jax.tree.map(lambda x: x / towers, value)
