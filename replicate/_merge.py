"""What several towers return becomes what one would have returned."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from estimator.metrics import Metric

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
    if len(parts) == 1:
        return parts[0]
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
