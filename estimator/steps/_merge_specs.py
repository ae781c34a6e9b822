"""One spec from the specs of several parts of a batch: towers, micro-batches, or the even rows and the remainder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._record import Report, Rows, merge_reports
from estimator.core._typing import PyTree
from estimator.core._variables import VariableAggregation
from estimator.metrics import Metric

_PLURAL = {"tower": "towers", "micro-batch": "micro-batches"}  # the kinds of parts, for messages


class PerPart(NamedTuple):
    """The fields of a spec that are merged from the values of all parts, not by a sum.

    Attributes:
      predictions, export_outputs: rows, to be concatenated.
      metrics: the `eval_metric_ops` that merge in another way than by a sum, by name.
      reported: by name.
    """

    predictions: PyTree
    metrics: dict[str, Any]
    export_outputs: PyTree
    reported: dict[str, Report]


def check_rows(spec: EstimatorSpec, rows: int, part: str = "tower") -> None:
    """Raises a ValueError unless all that is to be concatenated has the rows of its tower, or its other `part`.

    Exactly those: an array of fixed size, such as a bias, would otherwise be repeated without a word.
    """
    for field in ("predictions", "export_outputs"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(spec, field)):
            if leaf.shape[:1] != (rows,):
                raise ValueError(
                    f"{field}{jax.tree_util.keystr(path)} must have the batch as its first dimension to be put "
                    f"together from several {_PLURAL[part]}; it has shape {leaf.shape} in a {part} of {rows} "
                    "examples. Report a value of the whole batch by eval_metric_ops."
                )
    for name, report in spec.reported.items():
        if not isinstance(report, Rows):
            continue
        if report.value.shape[:1] != (rows if report.limit is None else min(rows, report.limit),):
            raise ValueError(
                f"What `est.record({name!r}, ...)` reports must be a scalar, or have the batch as its first dimension, "
                f"to be put together from several {_PLURAL[part]}; it has shape {report.value.shape} in a {part} of "
                f"{rows} examples. Record its elements one by one, or show it by `est.summary.histogram`."
            )


def merges_by_sum(metric: Any) -> bool:
    """Whether the states of a metric are merged by adding them up."""
    if not isinstance(metric, Metric) or type(metric).merge is not Metric.merge:
        return False
    # A sum of booleans is a boolean where states are merged, but an integer across towers.
    return all(jnp.result_type(leaf) != jnp.bool_ for leaf in jax.tree.leaves(metric))


def split_spec(spec: EstimatorSpec, scale: float) -> tuple[EstimatorSpec, PerPart]:
    """The fields of a part's spec that are merged by a sum over parts, and the others.

    Args:
      scale: the part's share of the merged loss, so that the sum is the merged loss.
    """
    metrics = spec.eval_metric_ops
    by_sum = {name: metric for name, metric in metrics.items() if merges_by_sum(metric)}
    others = {name: metric for name, metric in metrics.items() if name not in by_sum}
    train_op = spec.train_op
    if train_op is not None:
        scaled = (u if u.loss is None else dataclasses.replace(u, loss=u.loss * scale) for u in train_op.updates)
        train_op = dataclasses.replace(train_op, updates=tuple(scaled))
    summed = spec.unchecked(
        predictions=None,
        loss=None if spec.loss is None else spec.loss * scale,
        train_op=train_op,
        eval_metric_ops=by_sum,
        export_outputs=None,
        reported={},
    )
    return summed, PerPart(spec.predictions, others, spec.export_outputs, spec.reported)


def join_spec(summed: EstimatorSpec, merged: PerPart) -> EstimatorSpec:
    """The spec of the whole batch: the opposite of `split_spec`."""
    return dataclasses.replace(
        summed,
        predictions=merged.predictions,
        eval_metric_ops={**summed.eval_metric_ops, **merged.metrics},
        export_outputs=merged.export_outputs,
        reported=merged.reported,
    )


def merge_parts(stacked: PerPart, parts: int) -> PerPart:
    """The fields of the whole batch, from arrays with the parts as their first dimension."""
    return PerPart(
        concatenate_rows(stacked.predictions),
        merge_metrics(stacked.metrics, parts),
        concatenate_rows(stacked.export_outputs),
        merge_stacked_reports(stacked.reported, parts),
    )


def concatenate_rows(stacked: PyTree) -> PyTree:
    """Arrays of shape `[parts, rows, ...]`, part after part: the order of the input."""
    return jax.tree.map(
        lambda x: x.reshape(x.shape[1:] if len(x) == 1 else (x.shape[0] * x.shape[1], *x.shape[2:])),
        stacked,
    )


def merge_metrics(stacked: dict[str, Any], parts: int) -> dict[str, Any]:
    """One metric for each name, from states with the parts as their first dimension."""
    return {
        name: functools.reduce(
            lambda merged, other: merged.merge(other),
            [jax.tree.map(lambda x, i=i: x[i], metric) for i in range(parts)],
        )
        for name, metric in stacked.items()
    }


def merge_stacked_reports(stacked: dict[str, Report], parts: int) -> dict[str, Report]:
    """One report for each name, from reports with equal parts as their first dimension."""
    return merge_reports([jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(parts)], [1] * parts)


def concatenate_specs(specs: Sequence[EstimatorSpec], sizes: Sequence[int], mean_loss: bool) -> EstimatorSpec:
    """The spec of all rows, from the specs of one or two parts of `sizes` rows.

    Args:
      mean_loss: whether the merged loss is the mean over rows, not the sum.

    Raises:
      ValueError: the parts have other metrics, as only a model_fn that looks at the number of rows can make them.
    """
    if len(specs) == 1:
        return specs[0]
    first, second = specs
    if first.eval_metric_ops.keys() != second.eval_metric_ops.keys():
        raise ValueError(
            f"The model_fn returned the metrics {sorted(first.eval_metric_ops)} for the rows that divide by the "
            f"towers, but {sorted(second.eval_metric_ops)} for those left over. Return the same ones for any number of "
            "rows and towers."
        )
    loss = None
    if first.loss is not None and second.loss is not None:
        weights = [size / sum(sizes) if mean_loss else 1.0 for size in sizes]
        loss = first.loss * weights[0] + second.loss * weights[1]
    predictions, export_outputs = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves),
        (first.predictions, first.export_outputs),
        (second.predictions, second.export_outputs),
    )
    metrics = {name: metric.merge(second.eval_metric_ops[name]) for name, metric in first.eval_metric_ops.items()}
    return dataclasses.replace(
        first,
        loss=loss,
        predictions=predictions,
        export_outputs=export_outputs,
        eval_metric_ops=metrics,
        reported=merge_reports([first.reported, second.reported], sizes),
    )


def addend(
    name: str,
    value: PyTree,
    aggregation: VariableAggregation,
    index: jax.Array,
    parts: int,
    part: str = "tower",
) -> PyTree:
    """What the `index`-th of several parts gives to the sum over parts that is a variable's new value.

    Args:
      name, value: of the variable, as the part assigned it.
      aggregation: how the values of the parts become one.
      part: the kind of parts, for the message.

    Raises:
      ValueError: integers were to be averaged.
    """
    if parts == 1 or aggregation == VariableAggregation.SUM:
        return value
    if aggregation == VariableAggregation.ONLY_FIRST_TOWER:
        return jax.tree.map(lambda x: jnp.where(index == 0, x, jnp.zeros_like(x)), value)
    for leaf in jax.tree.leaves(value):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"The {_PLURAL[part]} assign to the variable {name!r}, whose {leaf.dtype} values cannot be averaged. "
                "Create it with `aggregation=est.VariableAggregation.SUM` or `ONLY_FIRST_TOWER`, or use "
                "`est.assign_add`."
            )
    return jax.tree.map(lambda x: x / parts, value)
