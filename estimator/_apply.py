"""Applies a train_op whose gradients are known."""

from __future__ import annotations

from collections.abc import Callable

import jax

from estimator._frame import Frame, PyTree, open_frame
from estimator._loss_scale import kept_if_skipped
from estimator._modes import ModeKeys
from estimator._optimizer import TrainOp, apply_updates


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
