"""Prediction: one compiled step per batch, results given out one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from estimator._frame import PyTree
from estimator._spec import check_no_hooks
from estimator._transform import Model, State


def make_predict_step(model: Model) -> Callable[[State, PyTree], PyTree]:
    """The compiled step: the predictions of a batch."""

    def step(state: State, features: PyTree) -> PyTree:
        spec = model.predict_step(state, features)
        check_no_hooks(spec)
        return spec.predictions

    return jax.jit(step)


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
        rows = {
            jax.tree_util.keystr(path): np.shape(leaf)[:1] for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        if len(set(rows.values())) != 1 or () in rows.values():
            raise ValueError(
                "Batch length of predictions should be same to give them out one by one; got "
                + ", ".join(f"{name or 'predictions'}: {n}" for name, n in rows.items())
                + ". Use yield_single_examples=False for whole batches."
            )
        ((count,),) = set(rows.values())
        for i in range(count):
            yield jax.tree.map(lambda leaf, i=i: leaf[i], batch)
