"""The first batch of several towers, computed in one tower as well, and a warning where the numbers differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._replica import Replica
from estimator.core._typing import PyTree
from estimator.runtime._program import Program
from estimator.steps._model_info import ModelInfo
from estimator.steps._step_loops import compile_read

_MOST_SHOWN = 8  # differences, in one warning


def compare_with_one_tower(
    forward: Callable[..., EstimatorSpec], info: ModelInfo, mode: str, batch: tuple[Any, ...]
) -> None:
    """Logs one warning if several towers give another loss, metric or prediction than one tower with all rows.

    Args:
      forward: `(replica, *batch) -> spec`: a run without gradients, of towers or of one tower.
      info: what is known of the model_fn.
      mode: what it runs for.
      batch: state, features and labels.
    """

    def values(one_tower: bool) -> Callable[..., EstimatorSpec]:
        def run(*batch: Any) -> EstimatorSpec:
            return forward(Replica(forward_only=True, one_tower=one_tower), *batch).replace_unchecked(train_op=None)

        return run

    # Forward only: gradients would cost a backward pass, and a wrong mean already shows in the loss.
    got = compile_read(info, values(False))(*batch)
    want = Program(values(True))(*jax.device_put(batch, info.compared_on))
    lines = list(differences(_values(got), _values(want), "several towers", 1e-3, 1e-5))
    if lines:
        more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
        logging.warning(
            "In mode %r the first batch gives other numbers in several towers than in one: %s. Usual causes: a mean "
            "taken by hand, as `sum(w * l) / sum(w)` is, of which a tower has only its rows (write "
            "`est.losses.compute_weighted_loss(l, w, est.Reduction.MEAN)`, and `weights=` in metrics); batch "
            "normalization that is not synchronized (`synchronized=True`); dropout, which draws other numbers in each "
            "tower.",
            str(mode),
            "; ".join([*lines[:_MOST_SHOWN], *more]),
        )


def _values(spec: EstimatorSpec) -> dict[str, PyTree]:
    return {"loss": spec.loss, "metric": results(spec), "prediction": spec.predictions}


def results(spec: EstimatorSpec) -> dict[str, PyTree]:
    """The values of its metrics, by name; of another library those have `compute`."""
    metrics: Any = spec.eval_metric_ops
    return {name: m.result() if hasattr(m, "result") else m.compute() for name, m in metrics.items()}


def differences(got: PyTree, want: PyTree, towers: str, rtol: float, atol: float) -> Iterator[str]:
    """A line for each array in which two trees of kinds of values differ; half precision may differ by its rounding.

    Args:
      towers: who computed `got`, in words.
    """
    for (name, ours), (_, theirs) in zip(_name_arrays(got), _name_arrays(want), strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            yield f"{name}: {ours.dtype}{[*ours.shape]} in {towers}, {theirs.dtype}{[*theirs.shape]} in one"
            continue
        one, other = ours.astype(np.complex128), theirs.astype(np.complex128)  # which holds numbers of any kind
        rounding = 4 * float(jnp.finfo(ours.dtype).eps) if jnp.issubdtype(ours.dtype, jnp.inexact) else 0.0
        apart = ~np.isclose(one, other, rtol=max(rtol, rounding), atol=max(atol, rounding), equal_nan=True)
        if apart.any():
            distance = np.where(apart, np.nan_to_num(np.abs(one - other), nan=np.inf), -1)
            worst = np.unravel_index(np.argmax(distance), distance.shape)
            place = f" (at {[*map(int, worst)]}; {apart.sum()} of {apart.size} differ)" if worst else ""
            yield f"{name}: {ours[worst]} in {towers}, {theirs[worst]} in one{place}"


def _name_arrays(tree: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a tree of kinds of values with what a reader calls them, such as "the variable 'dense/kernel'"."""
    for (kind, *path), leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        yield f"the {kind.key}" + (f" {name!r}" if name else ""), np.asarray(leaf)
