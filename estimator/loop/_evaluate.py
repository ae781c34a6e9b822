"""Evaluation: a compiled step for a batch, or for several small ones; metrics merged on the host."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from estimator.core._batch import BatchGuard, describe_nan, rows_of
from estimator.core._bcoo import has_sparse
from estimator.core._estimator_spec import loss_of
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._state import State
from estimator.core._typing import Features, Labels, PyTree
from estimator.inputs._input_fn import Batches
from estimator.loop import _hook_calls
from estimator.loop._context import RunContext
from estimator.loop._flops import steps_that_fit
from estimator.loop._programs import InFlight, Pair, stacked_batches
from estimator.loop._read_ahead import chunks_with_hooks
from estimator.loop._synchronized_input import Uneven
from estimator.metrics._merge import merge, merge_stacked, merges_by_sum
from estimator.metrics._metric import Metric
from estimator.multihost._global_arrays import gather_rows
from estimator.multihost._preemption import SIGNALS, raise_stop
from estimator.runtime._jax_settings import debugging
from estimator.runtime._program import Program
from estimator.steps._step_loops import Carry, carry_of, loop_over_all, state_of
from estimator.steps._transform import Model

_PROGRAMS_FETCHED = 20  # at once: to fetch each costs as much as a small batch
_MOST_BATCHES_AT_ONCE, _MOST_BYTES_AT_ONCE = 16, 1 << 18
_MOST_BYTES_AT_ONCE_OF_SEVERAL = 1 << 26  # processes, which agree on every chunk


Outcome = tuple[jax.Array, Mapping[str, Any], dict[str, Report]]


class EvalSteps:
    """The compiled steps, which compute no predictions; all take `(carry, key_data, features, labels)`. The carry
    has slots where the model_fn reads them.

    | program          | of                 | returns                                               |
    |------------------|--------------------|-------------------------------------------------------|
    | `step`           | a batch            | loss, metrics, nothing                                |
    | `step_reporting` | a batch            | loss, metrics, what the model_fn reports              |
    | `loop`           | stacked batches    | losses and metrics, stacked                           |
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._fits: dict[int, int] = {}  # by the bytes of a batch
        self._key: tuple[jax.Array, jax.Array] | None = None  # the newest, and its numbers
        self.step = Program(functools.partial(_step, model, False))
        self.step_reporting = Program(functools.partial(_step, model, True))
        self.loop = Program(functools.partial(_loop, model))

    def arguments(self, state: State) -> tuple[Carry, jax.Array]:
        """The arguments of a state."""
        known = self._key  # another thread, which evaluates too, may change it meanwhile
        if known is None or known[0] is not state.key:
            known = self._key = state.key, jax.random.key_data(state.key)  # costs as much as two batches
        return carry_of(state), known[1]

    def on_devices(self, pair: Pair | Uneven) -> tuple[tuple[PyTree, PyTree], int]:
        """A batch of all processes, and how many rows it has, given the rows of this one."""
        given = pair.pair if isinstance(pair, Uneven) else pair
        placement = self._model.info(*given, ModeKeys.EVAL).placement
        if isinstance(pair, Uneven):
            return placement.in_all_processes(gather_rows(*pair)), sum(pair.rows)
        if not placement.spans_processes:
            return pair, rows_of(*pair)
        return placement.from_processes(pair), rows_of(*pair) * jax.process_count()

    def at_once(self, carry: Carry, key_data: jax.Array, features: Features, labels: Labels) -> int:
        """The number of batches like this one that are read ahead together, and go into one program."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((features, labels)) if hasattr(leaf, "nbytes"))
        info = self._model.info(features, labels, ModeKeys.EVAL)
        is_shared = info.placement.spans_processes
        most_bytes = _MOST_BYTES_AT_ONCE_OF_SEVERAL if is_shared else _MOST_BYTES_AT_ONCE
        most = max(1, min(_MOST_BATCHES_AT_ONCE, most_bytes // max(size, 1)))
        if is_shared:
            return most  # only read ahead together: each may have rows of its own, and so a program of its own
        if most == 1 or not info.is_one_program or has_sparse((features, labels)) or debugging():
            return 1
        if size not in self._fits:
            self._fits[size] = steps_that_fit(self.step.trace(carry, key_data, features, labels), info.platform)
        return min(most, self._fits[size])


def _step(
    model: Model, reports: bool, carry: Carry, key_data: jax.Array, features: Features, labels: Labels
) -> Outcome:
    spec = model.inner_read(ModeKeys.EVAL, state_of(carry, key_data), features, labels)
    return loss_of(spec), spec.eval_metric_ops, spec.reported if reports else {}


def _loop(
    model: Model, carry: Carry, key_data: jax.Array, features: Features, labels: Labels
) -> tuple[jax.Array, Mapping[str, Any]]:
    def step(nothing: tuple[()], *batch: PyTree) -> tuple[tuple[()], tuple[jax.Array, Mapping[str, Any]]]:
        loss, metrics, _ = _step(model, False, carry, key_data, *batch)
        return nothing, (loss, metrics)

    return loop_over_all(step, (), (features, labels))[1]


class Accumulator:
    """The loss and the metrics of all batches so far. The newest batches may still be computed.

    States are merged on the host in float64: a float32 count stops growing at 16,777,216 examples.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._rows: list[int] = []
        self._metrics: dict[str, Any] = {}
        self._waiting: list[tuple[jax.Array, Any]] = []  # of a batch, or stacked, of several
        self._in_flight = InFlight()

    def add(self, loss: jax.Array, metrics: dict[str, Any], rows: Sequence[int]) -> None:
        """Adds loss and metrics of a batch, or stacked ones of several batches, whose sizes are `rows`."""
        self._rows.extend(rows)
        self._waiting.append((loss, metrics))
        self._in_flight.add(loss)
        if len(self._waiting) == _PROGRAMS_FETCHED:
            self._fetch()

    def results(self, loss_over: str) -> dict[str, Any]:
        """The metrics by name, and "loss": the mean over "batches", as in TensorFlow, or over "examples"."""
        self._fetch()
        if not self._losses:
            raise ValueError("A hook stopped the evaluation before its first batch: there is no result.")
        results = {name: _as_python(_result(self._metrics[name])) for name in sorted(self._metrics)}
        weights = self._rows if loss_over == "examples" else None
        return {**results, "loss": float(np.average(self._losses, weights=weights))}

    def _fetch(self) -> None:
        for loss, metrics in jax.device_get(self._waiting):
            if self._losses and metrics.keys() != self._metrics.keys():
                raise ValueError(
                    f"The model_fn returned the metrics {sorted(metrics)} for a batch, but {sorted(self._metrics)} "
                    "for those before. Return the same ones for a batch of any size."
                )
            self._losses.extend(np.atleast_1d(loss).tolist())
            for name, metric in metrics.items():
                metric = _widen(metric)
                if np.ndim(loss):
                    metric = _merge_batches(metric, len(loss))
                self._metrics[name] = merge([self._metrics[name], metric]) if name in self._metrics else metric
        self._waiting = []


def evaluate_batches(
    steps: EvalSteps,
    state: State,
    batches: Batches,
    first: tuple[PyTree, PyTree],
    hooks: Sequence[Hook],
    context: RunContext,
    last_batch: int | None,
    loss_over: str = "batches",
) -> dict[str, Any]:
    """The metrics over all batches, or the first `last_batch` of them; there must be at least one."""
    total = Accumulator()
    held = steps.arguments(state)
    guard = BatchGuard(*first)
    at_once = context.agreed(lambda: guard(1, first, steps.at_once, *held, *first))
    for pairs, due in chunks_with_hooks(batches, hooks, context, last_batch, at_once):
        requests = _hook_calls.before(due, context)
        # One program for all of these batches, unless hooks are due at the last one, or the input has ended early: each
        # number of batches would need a compilation.
        together = len(pairs) == at_once > 1 and not due and context.group.count == 1
        stacked = stacked_batches(pairs, at_once) if together else None
        if stacked is not None:
            rows = rows_of(*pairs[0])
            step = functools.partial(steps.loop, rows=rows)
            losses, metrics = guard(context.batches + 1, pairs[0], step, *held, *stacked)
            total.add(losses, metrics, [rows] * len(pairs))
            context.count(len(pairs), rows)
            continue
        reports = _hook_calls.requests_values(requests, context)
        for i, pair in enumerate(pairs):
            batch, rows = steps.on_devices(pair)
            program = steps.step_reporting if reports and i == len(pairs) - 1 else steps.step
            step = functools.partial(program, rows=rows)
            loss, metrics, reported = guard(context.batches + 1, batch, step, *held, *batch)
            context.count(1, rows)
            total.add(loss, metrics, [rows])
        _hook_calls.after(due, context, requests, loss, 1, reported)
    if context.stop_reason in SIGNALS:
        raise_stop(context.stop_reason)  # a part of the batches makes no result
    results = total.results(loss_over)
    if np.isnan(results["loss"]):
        found = describe_nan(*first)
        advice = f"In the first batch, {found}" if found else guard.about_nan()
        logging.warning("NaN loss in the evaluation at step %d. %s.", context.global_step, advice)
    return {**results, "global_step": context.global_step}


def _merge_batches(stacked: Any, count: int) -> Any:
    # One sum over the stack merges all batches. Another `merge` is called for each.
    if merges_by_sum(stacked):
        return jax.tree.map(lambda x: x.sum(0, x.dtype), stacked)
    return merge_stacked(stacked, count)


def _widen(metric: Any) -> Any:
    if not isinstance(metric, Metric):
        return metric  # a user's own: its `merge` may not expect other dtypes
    return jax.tree.map(lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x, metric)


def _result(metric: Any) -> Any:
    return metric.result() if hasattr(metric, "result") else metric.compute()


def _as_python(value: Any) -> Any:
    def convert(leaf: np.ndarray) -> Any:
        array = np.asarray(leaf)
        return array.item() if array.ndim == 0 else array

    return jax.tree.map(convert, value)
