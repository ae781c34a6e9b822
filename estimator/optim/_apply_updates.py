"""Applies a train_op whose gradients are known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator.core._frame import Declared, Frame, open_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._train_op import TrainOp, Update, UpdatingOptimizer
from estimator.core._typing import PyTree, Slots, Variables
from estimator.optim._extra_args import call_update, extra_args
from estimator.optim._finite import all_finite, select, update_if
from estimator.optim._given_rate import carried
from estimator.optim._moving_average import averaged
from estimator.optim._non_finite import is_good
from estimator.optim._sparse_update import TouchedRows, takes_rows, takes_sparse_gradients
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
    good = _all_of([is_good(train_op), *(_finite_if_scaled(update) for update in train_op.updates)])

    def kept(written: Variables) -> Variables:
        """What is written where the step is made, or the values before."""
        return written if good is None else select(good, written, {name: variables[name] for name in written})

    after = {**moved, **kept(assigned)}
    return {**after, **kept(averaged(train_op, variables, after))}, slots


def apply_updates(
    train_op: TrainOp,
    variables: Variables,
    slots: Slots,
    at: Callable[[Variables], TrainOp] | None = None,
) -> tuple[Variables, Slots]:
    """The variables and slots after a train_op whose gradients are known.

    Where a gradient of a tower was marked (`on_nan`) all stay as they are; where the sum of a scaled one is not finite,
    what it was to move. A loss scale changes in either case: it must shrink where it makes gradients overflow.

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
        extra = extra_args(update.loss, params, at and functools.partial(updated, i)) | carried(update.learning_rate)
        state, loss_scale, finite = slots[update.slots], update.optimizer.loss_scale, _finite_if_scaled(update)
        inner = state.inner if loss_scale else state
        good = _all_of([is_good(train_op), finite])
        moved, new_slots = _apply(update.optimizer, update.gradients or {}, inner, params, extra, good)
        if loss_scale:
            new_slots = loss_scale.after(finite, state, new_slots)
        variables = {**variables, **moved}
        slots = {**slots, update.slots: new_slots}
    return variables, {**slots, **train_op.slots}


def _finite_if_scaled(update: Update) -> jax.Array | None:
    """Whether the gradients of an optimizer with a loss scale are finite; None where it has none."""
    return all_finite(update.gradients) if update.optimizer.loss_scale else None


def _all_of(conditions: list[jax.Array | None]) -> jax.Array | None:
    known = [condition for condition in conditions if condition is not None]
    return functools.reduce(jnp.logical_and, known) if known else None


def _apply(
    optimizer: UpdatingOptimizer,
    gradients: dict[str, PyTree],
    slots: optax.OptState,
    params: Variables,
    extra: dict[str, Any],
    good: jax.Array | None,
) -> tuple[Variables, optax.OptState]:
    """The variables and slots of one optimizer after its update, by dense and sparse gradients.

    Args:
      good: whether the update is to be made; None: it is.
    """
    transformation = optimizer.transformation

    def update(
        gradients: optax.Updates, params: optax.Params, slots: optax.OptState, extra: dict[str, Any] = extra
    ) -> tuple[Variables, optax.OptState]:
        def updated(before: tuple[Variables, optax.OptState]) -> tuple[Variables, optax.OptState]:
            params, slots = before
            # optax itself mixes dtypes (adam's `decay**count`), so a user's strict promotion must not reach into it.
            with jax.numpy_dtype_promotion("standard"):
                steps, slots = call_update(transformation, gradients, slots, params, extra)
                return optax.apply_updates(params, steps), slots

        return update_if(good, updated, (params, slots))

    sparse = {name: gradient for name, gradient in gradients.items() if isinstance(gradient, IndexedSlices)}
    if not sparse or not takes_rows(transformation, optimizer.get_name(), list(sparse), slots, params):
        whole = {name: dense(gradient) for name, gradient in gradients.items()}
        takes_both = sparse and takes_sparse_gradients(transformation)
        return update(whole, params, slots, {**extra, "sparse_gradients": sparse} if takes_both else extra)
    touched = TouchedRows(sparse, params)
    rows, row_slots = update({**gradients, **touched.gradients}, touched.take(params), touched.take(slots))
    return touched.put(params, rows), touched.put(slots, row_slots)
