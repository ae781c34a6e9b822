"""The parts of an optax transformation.

optax does not list them, since a transformation is two functions. But the qualified name of its `update` begins with
the public function that made it, as in `scale_by_adam.<locals>.update_fn`, and the closure holds the arguments of that
function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import optax

from estimator.core._typing import Labels, Variables


def maker(transformation: optax.GradientTransformation) -> str:
    """The function or class of optax that made it, such as "scale_by_adam"; "" where it is not optax's."""
    update: Any = transformation.update
    in_optax = str(getattr(update, "__module__", "")).partition(".")[0] == "optax"
    return update.__qualname__.partition(".")[0] if in_optax else ""


UNKNOWN = optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state))
"""Stands for a part that cannot be seen; its maker is ""."""


def parts(transformation: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """The transformations that it applies, in order; none where it does not combine others.

    Where another version of optax holds them under other names there is one, `UNKNOWN`.
    """
    try:
        return _parts(transformation)
    except KeyError:
        return [UNKNOWN]


def _parts(transformation: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    held = closure(transformation.update)
    if maker(transformation) == "chain":
        updates = zip(closure(transformation.init)["init_fns"], held["update_fns"], strict=True)
        return [optax.GradientTransformationExtraArgs(*functions) for functions in updates]
    if maker(transformation) == "inject_hyperparams":  # which makes it again in each step, from the values of that step
        held = closure(transformation.init)
        # Any number stands for a schedule's value: only the parts that the transformation consists of are looked at.
        values = {**held["other_hps"], **held["numeric_hps"], **dict.fromkeys(held["sched_hps"], 1.0)}
        return [held["inner_factory"](**values)]
    return [value for value in _flat(held.values()) if is_transformation(value)]


def leaves(transformation: optax.GradientTransformation, variable: str, params: Variables) -> Iterator[str]:
    """The makers of all that is applied to a variable, in order; a wrapper comes before what it wraps.

    >>> list(leaves(optax.MultiSteps(optax.scale_by_adam(), 2), "w", {"w": 1.0}))
    ['MultiSteps', 'with_extra_args_support', 'scale_by_adam']
    """
    name = maker(transformation)
    yield name
    held = closure(transformation.update)
    if name == "masked" and "mask" in held:
        inner = parts(transformation) if _of_variable(held["mask"], variable, params) else []
    elif name == "partition" and "transforms" in held:
        inner = [held["transforms"][_of_variable(held["param_labels"], variable, params)]]
    else:
        inner = parts(transformation)
    for part in inner:
        yield from leaves(part, variable, params)


def holds_tracer(transformation: optax.GradientTransformation) -> bool:
    """Whether one of its arguments was a traced value, as a learning rate that a model_fn has computed."""
    held = _flat(closure(transformation.update).values())
    return any(isinstance(value, jax.core.Tracer) for value in held) or any(map(holds_tracer, parts(transformation)))


def is_transformation(candidate: object) -> bool:
    return callable(getattr(candidate, "init", None)) and callable(getattr(candidate, "update", None))


def closure(function: Callable[..., object]) -> dict[str, Any]:
    """The variables that a function has from the function around it, or a method from its object, by name."""
    if inspect.ismethod(function):
        return dict(vars(function.__self__))
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _flat(value.values())
        elif isinstance(value, list | tuple) and not is_transformation(value):
            yield from _flat(value)
        else:
            yield value


def _of_variable(labels: Labels, variable: str, params: Variables) -> Any:
    """The label, or mask, of a variable: a tree that begins as `params` does, or a function that makes it of them."""
    tree = labels(params) if callable(labels) else labels
    return jax.tree.leaves(jax.tree.broadcast(tree, dict(params))[variable])[0]
