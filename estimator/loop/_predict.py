"""Prediction: one compiled step per batch, whose results are yielded one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten, tree_leaves_with_path, tree_unflatten

from estimator.core._batch import BatchGuard, rows_of
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._state import State
from estimator.core._typing import Features, PyTree
from estimator.inputs._input_fn import Batches
from estimator.loop import _hook_calls
from estimator.loop._context import RunContext
from estimator.loop._read_ahead import chunks_with_hooks
from estimator.runtime._program import Program
from estimator.steps._step_loops import Carry, carry_of, state_of
from estimator.steps._transform import Model
from estimator.variables._class_names import with_strings


class PredictSteps:
    """The compiled steps: the predictions of a batch, without and with what the model_fn reports."""

    def __init__(self, model: Model) -> None:
        self.step = Program(functools.partial(_step, model, False))
        self.step_reporting = Program(functools.partial(_step, model, True))


def _step(
    model: Model, reports: bool, carry: Carry, key_data: jax.Array, features: Features
) -> tuple[PyTree, dict[str, Report]]:
    spec = model.inner_read(ModeKeys.PREDICT, state_of(carry, key_data), features)
    return spec.predictions, spec.reported if reports else {}


def predict_batches(
    steps: PredictSteps,
    state: State,
    batches: Batches,
    first: PyTree,
    keys: tuple[str, ...] | None,
    hooks: Sequence[Hook],
    context: RunContext,
) -> Iterator[PyTree]:
    """Yields the predictions of each batch as numpy arrays; `first` are the features of the first batch."""
    guard = BatchGuard(first, None)
    held = carry_of(state), jax.random.key_data(state.key)
    for ((features, _),), due in chunks_with_hooks(batches, hooks, context, None):
        requests = _hook_calls.before(due, context)
        program = steps.step_reporting if _hook_calls.requests_values(requests, context) else steps.step
        rows = rows_of(features)
        step = functools.partial(program, rows=rows)
        predictions, reported = guard(context.batches + 1, (features, None), step, *held, features)
        context.count(1, rows)
        _hook_calls.after(due, context, requests, None, 1, reported)
        selected = with_strings(jax.device_get(select(predictions, keys)))
        context.phase = "output"
        # While the caller holds the iterator, a signal raises at once. One that came before the phase "output" has only
        # set this flag.
        if context.preempted:
            return
        yield selected


def checked_keys(predict_keys: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """`predict_keys` as a tuple, a single string being one key."""
    if predict_keys is None:
        return None
    keys = (predict_keys,) if isinstance(predict_keys, str) else tuple(predict_keys)
    if not keys:
        raise ValueError("predict_keys must name at least one prediction; leave it out for all.")
    return keys


def select(predictions: PyTree, keys: tuple[str, ...] | None) -> PyTree:
    """The predictions called `keys`; all of them where it is None."""
    if keys is None:
        return predictions
    if not isinstance(predictions, dict):
        raise ValueError(
            "predict_keys argument is not valid in case of non-dict predictions; "
            f"got predict_keys={list(keys)} and predictions of type {type(predictions).__name__}."
        )
    unknown = [key for key in keys if key not in predictions]
    if unknown:
        raise ValueError(f"predict_keys names {unknown}, but the predictions are {sorted(predictions)}.")
    return {key: predictions[key] for key in keys}


def single_examples(predictions: Iterable[PyTree]) -> Iterator[PyTree]:
    """The rows of batches of numpy arrays, one after the other.

    Raises:
      ValueError: the arrays of a batch differ in their number of rows.
    """
    for batch in predictions:
        leaves, structure = tree_flatten(batch)
        sizes = {np.shape(leaf)[:1] for leaf in leaves}
        if len(sizes) != 1 or () in sizes:
            rows = {keystr(path): np.shape(leaf)[:1] for path, leaf in tree_leaves_with_path(batch)}
            raise ValueError(
                "Batch length of predictions should be same to give them out one by one; got "
                + ", ".join(f"{name or 'predictions'}: {n}" for name, n in rows.items())
                + ". Use yield_single_examples=False for whole batches."
            )
        for row in zip(*leaves, strict=True):
            yield tree_unflatten(structure, row)
