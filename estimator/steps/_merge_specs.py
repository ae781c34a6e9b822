"""One spec from the specs of several parts of a batch: towers, micro-batches, or the even rows and the remainder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._record import Report, merge_reports
from estimator.core._typing import PyTree
from estimator.metrics._merge import merge, merge_stacked, unstack


class PerPart(NamedTuple):
    """The fields of a spec that are merged from the values of all parts, not by a sum.

    Attributes:
      predictions, export_outputs: rows, to be concatenated.
      metrics: the `eval_metric_ops` that merge in another way than by a sum, by name.
      reported: by name.
    """

    predictions: PyTree = None
    metrics: Mapping[str, Any] = {}
    export_outputs: PyTree = None
    reported: dict[str, Report] = {}

    def merge(self, parts: int, are_towers: bool = True) -> PerPart:
        """The fields of the whole batch, from arrays with the parts as their first dimension.

        Args:
          are_towers: whether the parts are towers, not the micro-batches of one.
        """
        return PerPart(
            _concatenate(self.predictions),
            {name: merge_stacked(metric, parts) for name, metric in self.metrics.items()},
            _concatenate(self.export_outputs),
            # Stacked parts have equally many rows, so each counts the same.
            merge_reports(unstack(self.reported, parts), [1] * parts, are_towers),
        )

    def join(self, summed: EstimatorSpec) -> EstimatorSpec:
        """The spec of the whole batch, with the fields that were merged by a sum: the opposite of `RunResult.split`."""
        return dataclasses.replace(
            summed,
            predictions=self.predictions,
            eval_metric_ops={**summed.eval_metric_ops, **self.metrics},
            export_outputs=self.export_outputs,
            reported=self.reported,
        )


def _concatenate(stacked: PyTree) -> PyTree:
    """Arrays of shape `[parts, rows, ...]`, part after part: the order of the input."""
    # A single part may hold arrays without rows, which are refused only where there are several parts.
    return jax.tree.map(
        lambda x: x.reshape(x.shape[1:] if len(x) == 1 else (x.shape[0] * x.shape[1], *x.shape[2:])),
        stacked,
    )


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
        # A plain mean of means would give rows of the smaller part a larger weight.
        weights = [size / sum(sizes) if mean_loss else 1.0 for size in sizes]
        loss = first.loss * weights[0] + second.loss * weights[1]
    predictions, export_outputs = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves),
        (first.predictions, first.export_outputs),
        (second.predictions, second.export_outputs),
    )
    return dataclasses.replace(
        first,
        loss=loss,
        predictions=predictions,
        export_outputs=export_outputs,
        eval_metric_ops={n: merge([x, second.eval_metric_ops[n]]) for n, x in first.eval_metric_ops.items()},
        reported=merge_reports([first.reported, second.reported], sizes),
    )
