"""Evaluation: one compiled step per batch, metrics merged on the host."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from estimator._batch import guarded
from estimator._frame import PyTree
from estimator._spec import check_no_hooks
from estimator._transform import Model, State
from estimator.metrics import Metric

_BATCHES_IN_FLIGHT = 2


def make_eval_step(model: Model) -> Callable[[State, PyTree, PyTree], tuple[jax.Array, Any]]:
    """The compiled step: loss and metrics of a batch, without the predictions."""

    def step(state: State, features: PyTree, labels: PyTree) -> tuple[jax.Array, Any]:
        spec = model.eval_step(state, features, labels)
        check_no_hooks(spec)
        return spec.loss, spec.eval_metric_ops

    return jax.jit(step)


def evaluate_batches(
    step: Callable[[State, PyTree, PyTree], tuple[jax.Array, Any]],
    state: State,
    batches: Iterable[tuple[PyTree, PyTree]],
) -> dict[str, Any]:
    """The metrics over all batches, and "loss", the mean of the batches' losses as in TensorFlow.

    There must be at least one batch. States are merged on the host in float64: a float32 count stands still at
    16,777,216 examples.
    """
    losses: list[float] = []
    merged: dict[str, Any] = {}
    in_flight: collections.deque[tuple[jax.Array, Any]] = collections.deque()

    def finish_one() -> None:
        loss, metrics = jax.device_get(in_flight.popleft())
        losses.append(float(loss))
        if len(losses) > 1 and metrics.keys() != merged.keys():
            raise ValueError(
                f"The model_fn returned the metrics {sorted(metrics)} for a batch, but {sorted(merged)} for those "
                "before. Return the same ones for a batch of any size."
            )
        for name, metric in metrics.items():
            metric = _widened(metric)
            merged[name] = merged[name].merge(metric) if name in merged else metric

    for features, labels in batches:
        in_flight.append(guarded(step, features, labels, state, features, labels))
        if len(in_flight) > _BATCHES_IN_FLIGHT:
            finish_one()
    while in_flight:
        finish_one()
    results = {name: _as_python(_result(merged[name])) for name in sorted(merged)}
    return {**results, "loss": float(np.mean(losses)), "global_step": int(state.global_step)}


def _widened(metric: Any) -> Any:
    if not isinstance(metric, Metric):
        return metric  # a user's own: its `merge` may not expect other dtypes
    return jax.tree.map(lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x, metric)


def _result(metric: Any) -> Any:
    return metric.result() if hasattr(metric, "result") else metric.compute()


def _as_python(value: Any) -> Any:
    def convert(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.item() if array.ndim == 0 else array

    return jax.tree.map(convert, value)
