"""Evaluation: one compiled step per batch, metrics merged on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from estimator._batch import guarded
from estimator._frame import PyTree
from estimator._input import Batches
from estimator._preemption import SIGTERM, Preempted
from estimator._reading import batches_with_hooks
from estimator._report import Report
from estimator._sparse import is_sparse
from estimator._transform import Model, State
from estimator.hooks import _run
from estimator.hooks._hook import Context, Hook
from estimator.metrics import Metric

_BATCHES_IN_FLIGHT = 2
_MOST_BATCHES_AT_ONCE, _MOST_BYTES_AT_ONCE = 16, 1 << 18  # read ahead together
_BATCHES_FETCHED = 20  # at once: to fetch each costs as much as a small batch


class EvalSteps:
    """The compiled steps: loss and metrics of a batch, without the predictions; and with what is reported.

    Both take `(variables, global_step, key_data, features, labels)`: jax takes typed keys on a slower path.
    """

    def __init__(self, model: Model) -> None:
        def reporting(
            variables: dict[str, PyTree], step: jax.Array, key_data: jax.Array, features: PyTree, labels: PyTree
        ) -> tuple[jax.Array, Any, dict[str, Report]]:
            state = State(variables, {}, step, jax.random.wrap_key_data(key_data))
            spec = model.eval_step(state, features, labels)
            return spec.loss, spec.eval_metric_ops, spec.reported

        def quiet(*args: Any) -> tuple[jax.Array, Any, dict[str, Report]]:
            return *reporting(*args)[:2], {}

        self.reporting = jax.jit(reporting)
        self.quiet = jax.jit(quiet)


class Merged:
    """The loss and the metrics of all batches so far. The newest batches may still be computed.

    States are merged on the host in float64: a float32 count stands still at 16,777,216 examples.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._rows: list[int] = []
        self._metrics: dict[str, Any] = {}
        self._waiting: list[tuple[jax.Array, Any]] = []

    def add(self, loss: jax.Array, metrics: dict[str, Any], rows: int) -> None:
        self._rows.append(rows)
        self._waiting.append((loss, metrics))
        if len(self._waiting) > _BATCHES_IN_FLIGHT:
            self._waiting[-1 - _BATCHES_IN_FLIGHT][0].block_until_ready()
        if len(self._waiting) == _BATCHES_FETCHED:
            self._fetch()

    def results(self, loss_over: str) -> dict[str, Any]:
        """By name, the metrics, and "loss": the mean over "batches", as in TensorFlow, or over "examples"."""
        self._fetch()
        if not self._losses:
            raise ValueError("A hook stopped the evaluation before its first batch: there is no result.")
        results = {name: _as_python(_result(self._metrics[name])) for name in sorted(self._metrics)}
        weights = self._rows if loss_over == "examples" else None
        return {**results, "loss": float(np.average(self._losses, weights=weights))}

    def _fetch(self) -> None:
        for loss, metrics in jax.device_get(self._waiting):
            self._losses.append(float(loss))
            if len(self._losses) > 1 and metrics.keys() != self._metrics.keys():
                raise ValueError(
                    f"The model_fn returned the metrics {sorted(metrics)} for a batch, but {sorted(self._metrics)} "
                    "for those before. Return the same ones for a batch of any size."
                )
            for name, metric in metrics.items():
                metric = _widened(metric)
                self._metrics[name] = self._metrics[name].merge(metric) if name in self._metrics else metric
        self._waiting = []


def evaluate_batches(
    steps: EvalSteps,
    state: State,
    batches: Batches,
    hooks: Sequence[Hook],
    context: Context,
    last_batch: int | None,
    loss_over: str = "batches",
) -> dict[str, Any]:
    """The metrics over all batches, or the first `last_batch` of them; there must be at least one."""
    merged = Merged()
    held = state.variables, state.global_step, jax.random.key_data(state.key)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batches.peek()) if hasattr(leaf, "nbytes"))
    at_once = max(1, min(_MOST_BATCHES_AT_ONCE, _MOST_BYTES_AT_ONCE // max(size, 1)))
    for features, labels, due in batches_with_hooks(batches, hooks, context, last_batch, at_once):
        asked = _run.before(due, context)
        step = steps.reporting if _run.asks(asked) else steps.quiet
        loss, metrics, reported = guarded(step, features, labels, *held, features, labels)
        context.count(1, features)
        merged.add(loss, metrics, jax.tree.leaves(features, is_leaf=is_sparse)[0].shape[0])
        _run.after(due, context, asked, loss, 1, reported)
    if context.stop_reason == SIGTERM:
        raise Preempted  # what there is so far is no result
    return {**merged.results(loss_over), "global_step": int(state.global_step)}


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
