"""Merges the metrics of parts of the rows: batches, towers, micro-batches, or even rows and a remainder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from estimator.metrics._metric import Metric


def merge(parts: Sequence[Any]) -> Any:
    """Merges the metrics of several parts, in the order of the rows."""
    return functools.reduce(lambda merged, part: merged.merge(part), parts)


def merge_stacked(stacked: Any, parts: int) -> Any:
    """Merges the metrics of several parts, whose states are stacked: the parts are their first dimension."""
    return merge(unstack(stacked, parts))


def unstack(stacked: Any, parts: int) -> list[Any]:
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(parts)]


def merges_by_sum(metric: Any) -> bool:
    """Returns whether the states of a metric are merged by adding them up, in any order and at one go."""
    if not isinstance(metric, Metric) or type(metric).merge is not Metric.merge:
        return False
    # A sum of booleans is a boolean where states are merged, but an integer across towers.
    leaves = jax.tree.leaves(metric)
    return not any(isinstance(leaf, bool) or getattr(leaf, "dtype", None) == np.bool_ for leaf in leaves)
