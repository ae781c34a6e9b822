"""Applies a train_op whose gradients are known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from estimator.core._frame import Frame, open_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._train_op import TrainOp
from estimator.core._typing import PyTree
from estimator.optim._extra_args import extra_args
from estimator.optim._loss_scale import kept_if_skipped
from estimator.optim._sparse_update import update_rows
from estimator.sparse._indexed_slices import dense


def applied(
    train_op: TrainOp,
    assigned: dict[str, PyTree],
    variables: dict[str, PyTree],
    slots: dict[str, PyTree],
    key: jax.Array,
    global_step: jax.Array,
    at: Callable[[dict[str, PyTree]], TrainOp] | None = None,
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
    """The variables and slots after a step.

    Args:
      train_op: with gradients.
      assigned: by name, what the model_fn wrote.
      variables, slots, key, global_step: those that the step began with.
      at: the train_op that the same step has at other values of the variables; run only for optimizers that ask.
    """
    frame = Frame(  # for an optimizer given as a function that asks for the step or for a variable
        ModeKeys.TRAIN,
        variables,
        slots,
        key=key,
        global_step=global_step,
        trainable=dict.fromkeys(variables, True),
        reuse=True,
    )
    with open_frame(frame):
        moved, slots = apply_updates(train_op, variables, slots, at)
    return {**moved, **kept_if_skipped(train_op, assigned, variables)}, slots


def apply_updates(
    train_op: TrainOp,
    variables: dict[str, PyTree],
    slots: dict[str, PyTree],
    at: Callable[[dict[str, PyTree]], TrainOp] | None = None,
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
    """The variables and slots after a train_op whose gradients are known.

    Args:
      at: the train_op that the same step has at other values of the variables; run only for optimizers that ask.
    """
    start = variables

    def updated(i: int, changed: dict[str, PyTree]) -> tuple[Any, Any]:
        update = at({**start, **changed}).updates[i]  # type: ignore[misc]
        return update.loss, {name: dense(gradient) for name, gradient in (update.gradients or {}).items()}

    for i, update in enumerate(train_op.updates):
        if update.slots not in slots:
            raise ValueError(
                f"The state has no slots for the optimizer {update.slots!r}, only {sorted(slots)}. "
                "Initialize it in mode 'train' by the same model_fn."
            )
        params = {name: variables[name] for name in update.gradients or {}}
        extra = extra_args(update.loss, params, at and functools.partial(updated, i))
        state, loss_scale = slots[update.slots], update.optimizer.loss_scale
        inner = state.inner if loss_scale else state
        moved, new_slots = update_rows(update.optimizer, update.gradients or {}, inner, params, extra)
        if loss_scale:
            moved, new_slots = loss_scale.checked_step(update.gradients, (params, state), (moved, new_slots))
        variables = {**variables, **moved}
        slots = {**slots, update.slots: new_slots}
    return variables, {**slots, **train_op.slots}
