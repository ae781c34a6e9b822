"""Applies a train_op whose gradients are known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from estimator.core._frame import Declared, Frame, open_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._train_op import TrainOp, UpdatingOptimizer
from estimator.core._typing import PyTree, Slots, Variables
from estimator.optim._extra_args import call_update, extra_args
from estimator.optim._loss_scale import kept_if_skipped
from estimator.optim._moving_average import averaged
from estimator.optim._sparse_update import TouchedRows, takes_rows
from estimator.sparse._indexed_slices import IndexedSlices, dense


def applied(
    train_op: TrainOp,
    assigned: Variables,
    variables: Variables,
    slots: Slots,
    key: jax.Array,
    global_step: jax.Array,
    at: Callable[[Variables], TrainOp] | None = None,
) -> tuple[Variables, Slots]:
    """The variables and slots after a step.

    Args:
      train_op: with gradients.
      assigned: by name, what the model_fn wrote.
      variables, slots, key, global_step: at the beginning of the step.
      at: the train_op that the same step has at other values of the variables; run only for optimizers that ask.
    """
    frame = Frame(  # for an optimizer given as a function that asks for the step or for a variable
        ModeKeys.TRAIN,
        variables,
        slots,
        key=key,
        global_step=global_step,
        declared=Declared(trainable=dict.fromkeys(variables, True)),
        reuse=True,
    )
    with open_frame(frame):
        moved, slots = apply_updates(train_op, variables, slots, at)
    after = {**moved, **kept_if_skipped(train_op, assigned, variables)}
    return {**after, **kept_if_skipped(train_op, averaged(train_op, variables, after), variables)}, slots


def apply_updates(
    train_op: TrainOp,
    variables: Variables,
    slots: Slots,
    at: Callable[[Variables], TrainOp] | None = None,
) -> tuple[Variables, Slots]:
    """The variables and slots after a train_op whose gradients are known.

    Args:
      at: the train_op that the same step has at other values of the variables; run only for optimizers that ask.
    """
    start = variables

    def updated(i: int, changed: Variables) -> tuple[Any, optax.Updates]:
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
        moved, new_slots = _apply(update.optimizer, update.gradients or {}, inner, params, extra)
        if loss_scale:
            moved, new_slots = loss_scale.checked_step(update.gradients, (params, state), (moved, new_slots))
        variables = {**variables, **moved}
        slots = {**slots, update.slots: new_slots}
    return variables, {**slots, **train_op.slots}


def _apply(
    optimizer: UpdatingOptimizer,
    gradients: dict[str, PyTree],
    slots: optax.OptState,
    params: Variables,
    extra: dict[str, Any],
) -> tuple[Variables, optax.OptState]:
    """The variables and slots of one optimizer after its update, by dense and sparse gradients."""
    transformation = optimizer.transformation

    def update(
        gradients: optax.Updates, slots: optax.OptState, params: optax.Params
    ) -> tuple[Variables, optax.OptState]:
        # optax itself mixes dtypes (adam's `decay**count`), so a user's strict promotion must not reach into it.
        with jax.numpy_dtype_promotion("standard"):
            steps, slots = call_update(transformation, gradients, slots, params, extra)
            return optax.apply_updates(params, steps), slots

    sparse = {name: gradient for name, gradient in gradients.items() if isinstance(gradient, IndexedSlices)}
    if not sparse or not takes_rows(transformation, optimizer.get_name(), list(sparse), slots, params):
        return update({name: dense(gradient) for name, gradient in gradients.items()}, slots, params)
    touched = TouchedRows(sparse, params)
    rows, row_slots = update({**gradients, **touched.gradients}, touched.take(slots), touched.take(params))
    return touched.put(params, rows), touched.put(slots, row_slots)
