"""Checks of the arguments of an optimizer's methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from estimator.core._frame import Frame, check_is_known_outside
from estimator.core._typing import PyTree, Variables
from estimator.optim._gradient_calls import GradientCalls
from estimator.sparse._indexed_slices import checked_struct

WHY_NO_GRADIENTS = (
    "The usual causes: a loss made of `argmax`, of an accuracy or of a comparison; integers on the way from the "
    "variables to the loss, such as by `astype(int)`; `jax.lax.stop_gradient` around what depends on them; a loss of "
    "the labels only; or a var_list without the variables that the loss uses."
)
"""The end of the error that TensorFlow begins with "No gradients provided for any variable"."""


def check_is_outermost(caller: str, frame: Frame) -> None:
    check_is_known_outside(
        f"`{caller}`",
        frame,
        "where a loss or a gradient belongs to one branch or iteration. Return it, and call this outside; to leave out "
        "the update of some steps, use `optax.conditionally_mask`",
    )


def is_transformation(candidate: object) -> bool:
    return callable(getattr(candidate, "init", None)) and callable(getattr(candidate, "update", None))


def check_makes_optimizer(caller: str, fn: Callable[..., Any]) -> None:
    """Raises a TypeError for a function that needs arguments, such as `optax.sgd`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some of C have none
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        name = getattr(fn, "__name__", "fn")
        rate = f", or `{caller}({name}, learning_rate=0.1)`" if needed == ["learning_rate"] else ""
        raise TypeError(
            f"`{caller}` calls the function that it is given without arguments, and `{name}` needs {needed}. Write "
            f"`{caller}({name}({', '.join(f'{n}=...' for n in needed)}))`{rate}."
        )


# Transformations of optax that cannot work here, by their states.
_UNSUPPORTED: dict[type, str] = {
    optax.LookaheadState: "`optax.lookahead` needs each variable as a pair, `optax.LookaheadParams`, and a variable "
    "is one value here. Leave it out; an average of the variables is `est.ExponentialMovingAverage`",
    optax.MonitorState: "`optax.monitor` adds its measurements to the state in the first update, and the state of a "
    "training step keeps its structure. Use `optax.snapshot`, or `est.clip_by_global_norm(None)` for the norm",
    optax.contrib.DifferentiallyPrivateAggregateState: "`optax.contrib.dpsgd` and `differentially_private_aggregate` "
    "need a gradient of each example, and the gradients here are of the whole batch. Take them in the model_fn by "
    "`jax.vmap(jax.grad(...))`, clip, sum and add the noise there, and give `est.tower_gradient` of the result to "
    "`apply_gradients`",
}


def check_initial_slots(caller: str, slots: PyTree) -> None:
    """Raises a ValueError for an optax transformation that needs what a training step does not give."""
    for node in jax.tree.leaves(slots, is_leaf=lambda node: type(node) in _UNSUPPORTED):
        if type(node) in _UNSUPPORTED:
            raise ValueError(f"`{caller}` got a transformation that does not work here: {_UNSUPPORTED[type(node)]}.")


def in_order(caller: str, frame: Frame, given: Sequence[Any], var_list: Any, global_step: Any) -> Sequence[str] | None:
    """The var_list of `minimize`, which in TensorFlow comes behind the global step.

    Args:
      given: both, by position, in any order.

    Raises:
      TypeError: one of them is given twice, or the global step is not this run's.
    """
    values = [value for value in (*given, var_list, global_step) if value is not None]
    steps = [value for value in values if _is_number(value)]
    lists = [value for value in values if not _is_number(value)]
    if len(steps) > 1 or len(lists) > 1 or len(given) > 2:
        raise TypeError(
            f"`{caller}` takes a loss, `est.global_step()` and a list of names; got {len(values) + 1} arguments: the "
            f"loss, {', '.join(map(repr, values))}."
        )
    check_global_step(caller, frame, *steps or [None])
    return lists[0] if lists else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | jax.Array | np.ndarray)


def check_global_step(caller: str, frame: Frame, global_step: object) -> None:
    # By `is`: traced arrays have no values to compare.
    if global_step is not None and global_step is not frame.global_step:
        raise TypeError(
            f"`{caller}` got global_step={global_step!r}, which is not what `est.global_step()` returns in this run. A "
            "training step advances the global step by itself: leave it out. A counter of your own is a variable that "
            "`est.assign_add` writes."
        )


def check_loss(caller: str, loss: object) -> jax.Array:
    if not isinstance(loss, jax.Array) or loss.size != 1:
        what = f"shape {loss.shape}" if isinstance(loss, jax.Array) else repr(loss)
        raise ValueError(
            f"`{caller}` needs a scalar loss computed by this run; got {what}. "
            "Reduce it, for example by `est.losses.compute_weighted_loss(losses)`."
        )
    if jnp.issubdtype(loss.dtype, jnp.complexfloating):
        raise TypeError(f"`{caller}` needs a real loss; got {loss.dtype}. Write `loss.real`, or `jnp.abs(loss)`.")
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"No gradients provided for any variable: `{caller}` got a loss of dtype {loss.dtype}, which has no "
            f"derivative. {WHY_NO_GRADIENTS}"
        )
    return loss.reshape(())


def list_names(caller: str, frame: Frame, var_list: Iterable[str] | None) -> tuple[str, ...]:
    if var_list is None:
        return frame.declared.trainable_names
    if isinstance(var_list, str):
        raise TypeError(f"`{caller}`: var_list must be a list of names; write [{var_list!r}].")
    if _is_number(var_list):
        raise TypeError(f"`{caller}`: var_list must be a list of names; got {var_list!r}.")
    return tuple(var_list)


def check_pair(caller: str, pair: object) -> tuple[PyTree, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"`{caller}` takes pairs (gradient, variable name) as `compute_gradients` returns; got {pair!r}."
        )
    return pair[0], pair[1]


def check_var_list(caller: str, frame: Frame, var_list: Iterable[str] | None) -> tuple[str, ...]:
    trainable = list(frame.declared.trainable_names)
    names = list_names(caller, frame, var_list)
    if not names:
        raise ValueError(
            f"`{caller}` got no variables to optimize; create them before the call by `est.get_variable`, or "
            '`est.flax_module(net, "net")`. Weights that `net.init` makes in a model_fn, and those in an NNX object '
            "that was made outside, are not trained."
        )
    unknown = [name for name in names if name not in trainable]
    if unknown:
        raise ValueError(
            f"`{caller}` cannot optimize {unknown}; the trainable variables of this run are {trainable}. "
            "A var_list holds full names of variables."
        )
    return names


def check_scaled(caller: str, frame: Frame, gradients: Variables) -> None:
    """Raises a ValueError for gradients whose sum over N towers would be N times too large.

    A model_fn may do anything with a gradient between `compute_gradients` and here. So a variable counts as scaled
    once `compute_gradients` of any optimizer has returned a gradient for it.
    """
    calls, scale = frame.notes.get(GradientCalls), frame.replica.loss_scale
    own = [name for name in gradients if name not in calls.scaled]
    if own and scale != 1 and not calls.says_scaled:
        raise ValueError(
            f"`{caller}` got gradients for {own} that no `compute_gradients` of this run returned. They are added to "
            f"the gradients of other towers (or micro-batches), so they have to be scaled as the loss is, by "
            f"{scale:g}. Take them by `compute_gradients(loss)`, or give `est.tower_gradient(gradient)` for "
            "a gradient of your own."
        )


def check_loss_scale(caller: str, frame: Frame, gradients: Variables, optimizer: object) -> None:
    """Raises a ValueError for gradients with the loss scale of another optimizer, which would not see them overflow."""
    scaled_by = frame.notes.get(GradientCalls).loss_scaled_by
    others = [name for name in gradients if scaled_by.get(name, optimizer) is not optimizer]
    if others:
        raise ValueError(
            f"`{caller}` got gradients for {others} that another optimizer has computed, which has a loss_scale. Apply "
            "them by the same one, or compute them by this one: a loss scale belongs to one optimizer."
        )


def check_gradient(caller: str, name: str, gradient: PyTree, variable: PyTree) -> None:
    gradient = checked_struct(caller, gradient)
    same = jax.tree.structure(gradient) == jax.tree.structure(variable)  # type: ignore[operator]
    if not same or any(
        jnp.shape(g) != jnp.shape(v) for g, v in zip(jax.tree.leaves(gradient), jax.tree.leaves(variable), strict=True)
    ):
        raise ValueError(
            f"`{caller}`: the gradient of {name!r} must have the variable's structure and shapes, "
            f"{jax.tree.map(jnp.shape, variable)}; got {jax.tree.map(jnp.shape, gradient)}."
        )
