"""What several towers return becomes what one would have returned."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from estimator import EstimatorSpec, TrainOp, VariableAggregation
from estimator.core._record import Rows, merge_reports
from estimator.metrics import Metric
from estimator.sparse._indexed_slices import is_slices
from estimator.steps._gradients import Outcome, written
from replicate.cross_tower_ops import CrossTowerOps
from replicate.towers._collectives import cross_tower_concatenate
from replicate.towers._map import num_towers, tower_index

PyTree = Any

_SEVERAL = {"tower": "towers", "micro-batch": "micro-batches"}  # the parts of a batch, for messages


def check_rows(spec: EstimatorSpec, rows: int, part: str = "tower") -> None:
    """Raises a ValueError unless all that is to be concatenated has the rows of its tower, or its other `part`.

    Exactly those: an array of fixed size, such as a bias, would otherwise be repeated without a word.
    """
    for field in ("predictions", "export_outputs"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(spec, field)):
            if leaf.shape[:1] != (rows,):
                raise ValueError(
                    f"{field}{jax.tree_util.keystr(path)} must have the batch as its first dimension to be put "
                    f"together from several {_SEVERAL[part]}; it has shape {leaf.shape} in a {part} of {rows} "
                    "examples. Report a value of the whole batch by eval_metric_ops."
                )
    for name, report in spec.reported.items():
        wanted = None if not isinstance(report, Rows) else rows if report.limit is None else min(rows, report.limit)
        if wanted is not None and report.value.shape[:1] != (wanted,):
            raise ValueError(
                f"What `est.record({name!r}, ...)` reports must be a scalar, or have the batch as its first dimension, "
                f"to be put together from several {_SEVERAL[part]}; it has shape {report.value.shape} in a {part} of "
                f"{rows} examples. Record its elements one by one, or show it by `est.summary.histogram`."
            )


def concatenate_rows(stacked: PyTree) -> PyTree:
    """Arrays of shape `[towers, rows, ...]`, tower after tower: the order of the input."""
    return jax.tree.map(
        lambda x: x.reshape(x.shape[1:] if len(x) == 1 else (x.shape[0] * x.shape[1], *x.shape[2:])),
        stacked,
    )


def join(parts: list[PyTree]) -> PyTree:
    """Parts of a batch one after the other."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def join_metrics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One metric for each name from two parts of a batch.

    Raises:
      ValueError: the parts have other metrics, as only a model_fn that looks at the number of rows can make them.
    """
    first, second = parts
    if first.keys() != second.keys():
        raise ValueError(
            f"The model_fn returned the metrics {sorted(first)} for the rows that divide by the towers, but "
            f"{sorted(second)} for those left over. Return the same ones for any number of rows and towers."
        )
    return {name: metric.merge(second[name]) for name, metric in first.items()}


def merges_by_sum(metric: Any) -> bool:
    """Whether the towers' states may ride in the one sum of everything else."""
    if not isinstance(metric, Metric) or type(metric).merge is not Metric.merge:
        return False
    # A sum of booleans is a boolean where states are merged, but an integer across towers.
    return all(jnp.result_type(leaf) != jnp.bool_ for leaf in jax.tree.leaves(metric))


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
    own = (spec.predictions, others, spec.export_outputs, spec.reported)
    train_op = spec.train_op
    if train_op is not None:
        train_op = TrainOp(
            tuple(u if u.loss is None else dataclasses.replace(u, loss=u.loss * scale) for u in train_op.updates)
        )
    loss = None if spec.loss is None else spec.loss * scale
    same = spec.unchecked(
        predictions=None, loss=loss, train_op=train_op, eval_metric_ops=by_sum, export_outputs=None, reported={}
    )
    return same, own


def together(same: EstimatorSpec, own: PyTree) -> EstimatorSpec:
    predictions, metrics, exports, reported = own
    metrics = {**same.eval_metric_ops, **metrics}
    return dataclasses.replace(
        same, predictions=predictions, eval_metric_ops=metrics, export_outputs=exports, reported=reported
    )


def without_gradients(spec: EstimatorSpec) -> tuple[EstimatorSpec, list[dict[str, PyTree]]]:
    """The spec less the gradients of its train_op, and those, by name in the order of their variables."""
    updates = spec.train_op.updates
    train_op = TrainOp(tuple(dataclasses.replace(update, gradients={}) for update in updates))
    gradients = [{n: u.gradients[n] for n in u.var_list if n in u.gradients} for u in updates]
    return dataclasses.replace(spec, train_op=train_op), gradients


def with_gradients(spec: EstimatorSpec, gradients: list[dict[str, PyTree]]) -> EstimatorSpec:
    updates = zip(spec.train_op.updates, gradients, strict=True)
    train_op = TrainOp(tuple(dataclasses.replace(update, gradients=own) for update, own in updates))
    return dataclasses.replace(spec, train_op=train_op)


def merged(own: PyTree, towers: int) -> PyTree:
    predictions, metrics, exports, reported = own
    parts = [jax.tree.map(lambda x, i=i: x[i], reported) for i in range(towers)]
    return (
        concatenate_rows(predictions),
        merge_metrics(metrics, towers),
        concatenate_rows(exports),
        merge_reports(parts, [1] * towers),
    )


def summed(
    same: EstimatorSpec,
    outcome: Outcome,
    variables: dict[str, PyTree],
    aggregation: dict[str, VariableAggregation],
    ops: CrossTowerOps,
) -> tuple[EstimatorSpec, dict[str, PyTree]]:
    """What all towers agree on after one sum: gradients, losses, and the variables the model_fn wrote."""
    assigned = {
        name: share(name, value, aggregation[name], tower_index(), num_towers())
        for name, value in outcome.assigned.items()
    }
    same, gradients = without_gradients(same)
    gradients, (same, assigned, added) = total(gradients, (same, assigned, outcome.added), ops)
    same = with_gradients(same, gradients)
    # A sum of booleans is an integer.
    written_to = outcome.assigned, outcome.added
    assigned, added = jax.tree.map(lambda x, like: x.astype(like.dtype), (assigned, added), written_to)
    return same, written(Outcome(outcome.spec, assigned, added), variables)


def total(gradients: list[dict[str, PyTree]], others: PyTree, ops: CrossTowerOps) -> tuple[Any, PyTree]:
    """The sums over towers; of a sparse gradient, the slices of all towers, which stand for it.

    Args:
      gradients: by variable name, for each update.
      others: what else is summed, exactly.
      ops: takes the sums.

    Raises:
      ValueError: a gradient is sparse, which `ops` does not take.
    """
    if num_towers() == 1:
        return gradients, others
    for name, gradient in (item for own in gradients for item in own.items()):
        if is_slices(gradient) and not ops.takes_slices:
            raise ValueError(
                f"`{type(ops).__name__}` cannot sum the gradient of the variable {name!r}, an `est.IndexedSlices` as "
                "`est.embedding_lookup` makes them. Use other `cross_tower_ops`, such as `AllReduce()`."
            )
    in_order = [list(own.values()) for own in gradients]  # which jax would sort by name
    leaves, structure = jax.tree.flatten((in_order, others), is_leaf=is_slices)
    count = 0 if ops.exact is ops else len(jax.tree.leaves(in_order, is_leaf=is_slices))
    for some, positions in ((ops, range(count)), (ops.exact, range(count, len(leaves)))):
        dense = [i for i in positions if not is_slices(leaves[i])]
        sums = some.sum_in_towers([leaves[i] for i in dense]) if dense else []
        for i, leaf in zip(dense, sums, strict=True):
            leaves[i] = leaf
    leaves = [cross_tower_concatenate(leaf) if is_slices(leaf) else leaf for leaf in leaves]
    in_order, others = jax.tree.unflatten(structure, leaves)
    return [dict(zip(own, mine, strict=True)) for own, mine in zip(gradients, in_order, strict=True)], others


def share(
    name: str,
    value: PyTree,
    aggregation: VariableAggregation,
    index: jax.Array,
    parts: int,
    part: str = "tower",
) -> PyTree:
    """What the `index`-th of several parts gives to the sum over all parts, which is to be the new value."""
    if parts == 1 or aggregation == VariableAggregation.SUM:
        return value
    if aggregation == VariableAggregation.ONLY_FIRST_TOWER:
        return jax.tree.map(lambda x: jnp.where(index == 0, x, jnp.zeros_like(x)), value)
    for leaf in jax.tree.leaves(value):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"The {_SEVERAL[part]} assign to the variable {name!r}, whose {leaf.dtype} values cannot be averaged. "
                "Create it with `aggregation=est.VariableAggregation.SUM` or `ONLY_FIRST_TOWER`, or use "
                "`est.assign_add`."
            )
    return jax.tree.map(lambda x: x / parts, value)
