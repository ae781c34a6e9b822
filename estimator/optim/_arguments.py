"""Checks of the arguments of an optimizer's methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._frame import Frame, check_is_known_outside
from estimator.core._typing import PyTree, Variables
from estimator.optim._gradient_calls import GradientCalls
from estimator.sparse._indexed_slices import checked_struct


def check_is_outermost(caller: str, frame: Frame) -> None:
    check_is_known_outside(
        f"`{caller}`",
        frame,
        "where a loss or a gradient belongs to one branch or iteration. Return it, and call this outside; to leave out "
        "the update of some steps, use `optax.conditionally_mask`",
    )


def is_transformation(candidate: object) -> bool:
    return callable(getattr(candidate, "init", None)) and callable(getattr(candidate, "update", None))


def in_order(caller: str, frame: Frame, var_list: Any, global_step: Any) -> Sequence[str] | None:
    """The var_list of `minimize`, which in TensorFlow comes behind the global step.

    Raises:
      TypeError: the global step is not this run's.
    """
    # By position TensorFlow's second argument is the global step, a number; a var_list holds names.
    if _is_number(var_list) or not (global_step is None or _is_number(global_step)):
        var_list, global_step = global_step, var_list
    check_global_step(caller, frame, global_step)
    return var_list


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
    return loss.reshape(())


def trainable_names(frame: Frame) -> tuple[str, ...]:
    return tuple(name for name, is_trainable in frame.declared.trainable.items() if is_trainable)


def list_names(caller: str, frame: Frame, var_list: Iterable[str] | None) -> tuple[str, ...]:
    if var_list is None:
        return trainable_names(frame)
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
    trainable = list(trainable_names(frame))
    names = list_names(caller, frame, var_list)
    if not names:
        raise ValueError(f"`{caller}` got no variables to optimize; create them before the call.")
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
