"""A part of a model for export: the requested outputs, and the part of the program that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from estimator.core._record import Report, Rows, Scalar
from estimator.core._typing import Features, PyTree

Program = Callable[[dict[str, Any], PyTree], dict[str, Any]]


def checked_outputs(outputs: object) -> tuple[str, ...] | None:
    """The argument `outputs` of `export_model` as a tuple; a string is one name."""
    if outputs is None:
        return None
    names = (outputs,) if isinstance(outputs, str) else outputs
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "outputs of `export_model` must name at least one recorded value or prediction, for example "
            f"['embedding']; got {outputs!r}. Leave it out for all `export_outputs`."
        )
    return tuple(names)


def choose_outputs(outputs: Sequence[str], predictions: dict[str, Any], reported: dict[str, Report]) -> dict[str, Any]:
    """Picks the arrays that `outputs` names, from the predictions and the values of `est.record`."""
    recorded = {
        name: report.value
        for name, report in reported.items()
        if isinstance(report, Scalar) or (isinstance(report, Rows) and not report.image)
    }
    there_is = f"Recorded are {sorted(recorded)}, the predictions are {sorted(predictions)}."
    unknown = [name for name in outputs if name not in recorded and name not in predictions]
    if unknown:
        raise ValueError(f"`export_model` got outputs={list(outputs)}, but there is no {unknown}. {there_is}")
    both = [name for name in outputs if name in recorded and name in predictions]
    if both:
        raise ValueError(
            f"`export_model` got outputs={list(outputs)}, but {both} is the name of a recorded value and of a "
            f"prediction. Rename one of them. {there_is}"
        )
    return {name: recorded[name] if name in recorded else predictions[name] for name in outputs}


def prune_unused(model: Program, weights: dict[str, Any], features: Features) -> tuple[Program, dict[str, Any], PyTree]:
    """Makes a program with the same outputs that takes only the weights and features they need; returns it and these.

    Dead code is eliminated as jax does it, within `lax.scan` and `lax.cond` too; a `lax.while_loop` stays complete if
    any of it is needed.

    Args:
      model: a pure function.
      weights, features: `jax.ShapeDtypeStruct`s. If no feature is needed, the first one stays: it has the batch
        size.
    """
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # imports Pallas

    leaves, structure = jax.tree.flatten((weights, features))
    traced, shape = jax.make_jaxpr(model, return_shape=True)(weights, features)
    outputs = [True] * len(traced.jaxpr.outvars)
    equations, needed = dce_jaxpr(traced.jaxpr, outputs)
    # At least one feature stays, even for outputs that need none: it says how many rows a batch has.
    if not any(needed[len(weights) :]):
        needed[len(weights)] = True
        equations, _ = dce_jaxpr(traced.jaxpr, outputs, instantiate=needed)
    run = jaxpr_as_fun(ClosedJaxpr(equations, traced.consts))

    def program(weights: dict[str, Any], features: Features) -> dict[str, Any]:
        return jax.tree.unflatten(jax.tree.structure(shape), run(*jax.tree.leaves((weights, features))))

    kept = [leaf if is_needed else None for leaf, is_needed in zip(leaves, needed, strict=True)]
    return program, *_without_none(jax.tree.unflatten(structure, kept))


def _without_none(tree: PyTree) -> PyTree:
    """Dicts without the keys of empty subtrees. Items of lists and tuples keep their places."""
    if isinstance(tree, dict):
        left = {key: _without_none(value) for key, value in tree.items()}
        return {key: value for key, value in left.items() if jax.tree.leaves(value)}
    return type(tree)(map(_without_none, tree)) if isinstance(tree, list | tuple) else tree


def check_rows(outputs: dict[str, Any], rows: object) -> None:
    """Raises a ValueError unless each output is a scalar or has `rows`, maybe symbolic, as its first dimension."""
    for name, output in outputs.items():
        if output.shape and str(output.shape[0]) != str(rows):
            raise ValueError(
                f"`export_model` got {name!r} in outputs, which has the shape {output.shape} for a batch of {rows} "
                "examples. Values recorded for export must be scalars, or have the batch as their first dimension."
            )
