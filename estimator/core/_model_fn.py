"""The contract of a model_fn: which arguments it takes, and what it returns."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from traceback import walk_tb
from typing import Any

import jax

from estimator.core._batch import rows_of
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import current_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._typing import Features, Labels
from estimator.porting._missing_names import explain_missing_key

ModelFn = Callable[..., EstimatorSpec]
"""A function of `features` and any of `labels, mode, params, config`."""

# jax's errors where Python needs the value of a tracer; they have no base class of their own.
_NEED_VALUES = (
    jax.errors.ConcretizationTypeError,  # an `if` raises a subclass
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_NEEDS_A_SHAPE = "Shapes must be 1D sequences of concrete values"  # an error of `jnp.zeros(n)`, with a traced n
_OF_SHAPES = re.compile(r"shape|broadcast|Size of label")
_INSTEAD_OF_VALUES = (
    "Write `jnp.where` or `jax.lax.cond` instead of `if`, `jnp.where` or weights instead of `x[x > 0]`, functions of "
    "jnp instead of numpy's, and shapes of Python's ints. (jax may name a function of this library, which calls yours.)"
)
_INSTEAD_OF_SKLEARN = (
    "scikit-learn cannot take them: use `est.metrics` in the model_fn, "
    "`eval_metric_ops={'accuracy': est.metrics.accuracy(labels, predictions)}`, or give it what `predict` yields."
)
# How this note begins: a model_fn around this one finds it by that, and does not add its own.
_TRACED = "A value of Python is needed where jax only traces, in"
_OPTIONAL = ("labels", "mode", "params", "config")


def bind(model_fn: ModelFn, params: Any = None, config: Any = None) -> ModelFn:
    """A function of only `(features, labels, mode)` that checks what comes back.

    Arguments go by keyword, and only those that the model_fn has; `**kwargs` takes all. As in TensorFlow each run has
    a copy of params: the model_fn runs more than once, in each mode and for each shape of a batch.

    Raises:
      ValueError: the model_fn has no `features`, has arguments no one fills, or lacks `params` although some are given.
    """
    if not callable(model_fn):
        raise TypeError(f"model_fn must be a function; got {model_fn!r}.")
    # Looked at here and not in `call`: wrong arguments are an error when the model_fn is given, before any run.
    signature = inspect.signature(model_fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    accepted = {n for n, p in signature.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    shown = f"model_fn ({getattr(model_fn, '__name__', model_fn)})"
    if "features" not in accepted and not takes_all:
        raise ValueError(f"{shown} must include features argument; it has {sorted(accepted)}.")
    unknown = [
        name for name, p in signature.items() if name in accepted - {"features", *_OPTIONAL} and p.default is p.empty
    ]
    if unknown:
        raise ValueError(
            f"{shown} has following not expected args: {unknown}. It may have features, labels, mode, params and "
            "config; bind others by functools.partial or give them defaults."
        )
    if params and "params" not in accepted and not takes_all:
        raise ValueError(
            f"{shown} does not include params argument, but params ({params!r}) is passed. Add the argument."
        )

    def call(features: Features, labels: Labels, mode: ModeKeys) -> EstimatorSpec:
        # As in TensorFlow, labels that the model_fn does not take are an error; a mode or a config is left out.
        if labels is not None and "labels" not in accepted and not takes_all:
            raise ValueError(
                f"{shown} does not take labels, but input_fn returns labels. "
                "Add the argument, or let input_fn return features alone."
            )
        offered = {"labels": labels, "mode": mode, "params": _own_copy(params), "config": config}
        taken = {n: v for n, v in offered.items() if takes_all or n in accepted}
        try:
            spec = model_fn(features=features, **taken)
        except Exception as error:
            explain_missing_key(error, params=taken.get("params"), features=features, labels=labels)
            _explain(error, shown, features, labels, mode)
            raise
        if not isinstance(spec, EstimatorSpec):
            raise ValueError(f"{shown} should return an EstimatorSpec; got {spec!r}.")
        if spec.mode != mode:
            raise ValueError(
                f"{shown} was run in mode {str(mode)!r}, but its EstimatorSpec says {str(spec.mode)!r}. "
                "Pass `mode` on to EstimatorSpec."
            )
        _check_train_op(shown, spec)
        return spec

    return call


def with_params(model_fn: ModelFn, params: Any) -> ModelFn:
    """The model_fn as a function of `(features, labels, mode, config)`: params are the ones given here."""

    def call(features: Features, labels: Labels, mode: str, config: Any) -> EstimatorSpec:
        return bind(model_fn, params, config)(features, labels, ModeKeys(mode))

    return call


def _explain(error: Exception, shown: str, features: Features, labels: Labels, mode: ModeKeys) -> None:
    """Adds to an error of a model_fn what its input may have to do with it."""
    notes, there = [], getattr(error, "__notes__", ())  # a replicated model_fn is in another one
    towers, rows = current_frame("a model_fn").replica.towers, rows_of(features, labels)
    needs_value = isinstance(error, _NEED_VALUES) or _NEEDS_A_SHAPE in str(error)
    if needs_value and not any(_TRACED in note for note in there):
        packages = {frame.f_globals.get("__name__", "").split(".")[0] for frame, _ in walk_tb(error.__traceback__)}
        notes.append(
            f"{_TRACED} {shown}: its arrays have no values yet. "
            + (_INSTEAD_OF_SKLEARN if "sklearn" in packages else _INSTEAD_OF_VALUES)
        )
    if labels is None and ("None" in str(error) or (needs_value and mode == ModeKeys.PREDICT)):
        notes.append(
            "In PREDICT labels are None. Return `EstimatorSpec(mode, predictions=...)` before they are used."
            if mode == ModeKeys.PREDICT
            else "The labels are None, since input_fn gave only features. Let it give tuples (features, labels); a "
            "list is one of batches."
        )
    elif needs_value:
        pass  # no shape has to do with it
    elif isinstance(features, tuple | list) and _shapes(features) == _shapes(labels):
        notes.append(
            "The features are a tuple like the labels. If they are a batch each: a tuple that input_fn returns is one "
            "batch, (features, labels). For several batches return a list of such tuples."
        )
    elif towers > 1 and _has_rows_of_all_towers(str(error), rows, towers):
        notes.append(
            f"The model_fn runs in one of {towers} towers, which has {rows} of the {rows * towers} rows of the batch. "
            "Write -1, or `features.shape[0]`, instead of the batch size."
        )
    for note in notes:
        if note not in there:
            error.add_note(note)


def _has_rows_of_all_towers(error: str, rows: int, towers: int) -> bool:
    """Returns whether an error is about shapes, one of them of the whole batch, or of all its elements."""
    if sizes := re.search(r"cannot reshape .*\(size (\d+)\) into .*\(size (\d+)\)", error):
        # Of a reshape jax names the numbers of elements, of which the rows are a factor.
        return int(sizes[1]) * towers == int(sizes[2])
    # Whole numbers are compared: the digits of the batch size may stand within a longer one.
    return bool(_OF_SHAPES.search(error)) and str(rows * towers) in re.findall(r"\d+", error)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: getattr(leaf, "shape", None), tree)


def _check_train_op(shown: str, spec: EstimatorSpec) -> None:
    """Raises a ValueError for a train_op of another run: its losses do not depend on the variables of this one."""
    updates = spec.train_op.updates if spec.train_op else ()
    # By `id`: all tokens of runs compare equal.
    runs = {id(run) for run in current_frame("a model_fn").tracing.runs} if updates else set()
    others = [update.slots for update in updates if id(update.run) not in runs]
    if others:
        raise ValueError(
            f"{shown} returned a train_op that another run of it has made (by the optimizer {others[0]!r}): it "
            "would train nothing. A model_fn runs several times; call `minimize`, or `compute_gradients` and "
            "`apply_gradients`, in each of them, and keep nothing of what they return."
        )


def _own_copy(params: Any) -> Any:
    """A copy that shares arrays: to copy these would become a part of the compiled program."""
    # `deepcopy` takes what its memo has under the id of an object for the copy of it.
    return copy.deepcopy(params, {id(x): x for x in _arrays(params)})


def _arrays(params: Any) -> Iterator[jax.Array]:
    """The arrays of jax in params, whose dicts may have keys of several kinds, which jax cannot sort."""
    for leaf in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, dict)):
        if isinstance(leaf, dict):
            yield from itertools.chain.from_iterable(map(_arrays, leaf.values()))
        elif isinstance(leaf, jax.Array):
            yield leaf
