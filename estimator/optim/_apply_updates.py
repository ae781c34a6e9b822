"""Applies a train_op whose gradients are known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator.core._frame import Declared, Frame, open_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._train_op import TrainOp, UpdatingOptimizer
from estimator.core._typing import PyTree, Slots, Variables
from estimator.optim._extra_args import call_update, extra_args
from estimator.optim._finite import all_finite, select, update_if
from estimator.optim._given_rate import read_carried
from estimator.optim._sparse_update import TouchedRows, takes_rows, takes_sparse_gradients
from estimator.sparse._indexed_slices import select_sparse, to_dense


def apply_step(
    train_op: TrainOp,
    written: Variables,
    variables: Variables,
    slots: Slots,
    key: jax.Array,
    global_step: jax.Array,
    at: Callable[[Variables], TrainOp] | None = None,
) -> tuple[Variables, Slots]:
    """The variables and slots after a step: the updates, then what the model_fn wrote, then the moves.

    Args:
      train_op: with gradients.
      written: by name, what the model_fn wrote.
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
    # Decided once, from the gradients only, before anything is updated.
    may_update = _Permissions(train_op)
    with open_frame(frame):
        updated, slots = _apply_updates(train_op, may_update, variables, slots, at)

    def if_all(new: Variables) -> Variables:
        """The new values where all updates are made, or the values before."""
        allowed = may_update.all()
        return new if allowed is None else select(allowed, new, {name: variables[name] for name in new})

    # Moves come last: they use the values of variables after the step, whatever the order in `est.group` is.
    after = {**updated, **if_all(written)}
    moved: Variables = {}
    for move in train_op.moves:
        moved |= move.apply(variables, after)
    return {**after, **if_all(moved)}, slots


class _Permissions:
    """Permissions for the updates of a step, each a bool scalar; None: it may be made.

    Where a gradient of a tower was marked none is made; where the sum of a scaled one is not finite, that one is not.
    """

    def __init__(self, train_op: TrainOp) -> None:
        self._allowed = train_op.is_allowed()
        self.finite = [
            all_finite(update.gradients) if update.optimizer.loss_scale else None for update in train_op.updates
        ]

    def of(self, i: int) -> jax.Array | None:
        return _all_of([self._allowed, self.finite[i]])

    def all(self) -> jax.Array | None:
        return _all_of([self._allowed, *self.finite])


def _all_of(conditions: list[jax.Array | None]) -> jax.Array | None:
    known = [condition for condition in conditions if condition is not None]
    return functools.reduce(jnp.logical_and, known) if known else None


def _apply_updates(
    train_op: TrainOp,
    may_update: _Permissions,
    variables: Variables,
    slots: Slots,
    at: Callable[[Variables], TrainOp] | None,
) -> tuple[Variables, Slots]:
    start = variables

    def values_at(i: int, changed: Variables) -> tuple[Any, optax.Updates]:
        # All other variables have the values that the step began with, as for all gradients.
        update = at({**start, **changed}).updates[i]  # type: ignore[misc]
        return update.loss, {name: to_dense(gradient) for name, gradient in (update.gradients or {}).items()}

    for i, update in enumerate(train_op.updates):
        if update.slots not in slots:
            raise ValueError(
                f"The state has no slots for the optimizer {update.slots!r}, only {sorted(slots)}. "
                "Initialize it in mode 'train' by the same model_fn."
            )
        # `variables` include the earlier updates: two optimizers of one variable are applied one after the other.
        params = {name: variables[name] for name in update.gradients or {}}
        extra = extra_args(update.loss, params, at and functools.partial(values_at, i))
        extra |= read_carried(update.learning_rate)
        state, loss_scale, finite = slots[update.slots], update.optimizer.loss_scale, may_update.finite[i]
        inner = state.inner if loss_scale else state
        moved, new_slots = _apply(update.optimizer, update.gradients or {}, inner, params, extra, may_update.of(i))
        if loss_scale:  # it changes in a skipped step, too: it shrinks after an overflow
            new_slots = loss_scale.after(finite, state, new_slots)
        variables = {**variables, **moved}
        slots = {**slots, update.slots: new_slots}
    return variables, {**slots, **train_op.slots}


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
        gradients: optax.Updates,
        params: optax.Params,
        slots: optax.OptState,
        extra: dict[str, Any] = extra,
        no_steps: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> tuple[Variables, optax.OptState]:
        """The variables and slots after an update; of those in `no_steps`, what is to be added to them."""

        def make_update(before: tuple[Variables, optax.OptState]) -> tuple[Variables, optax.OptState]:
            _, slots = before
            # optax itself mixes dtypes (adam's `decay**count`), so a user's strict promotion must not reach into it.
            with jax.numpy_dtype_promotion("standard"):
                steps, slots = call_update(transformation, gradients, slots, params, extra)
                return {**optax.apply_updates(params, steps), **{name: steps[name] for name in no_steps}}, slots

        return update_if(good, make_update, ({**params, **no_steps}, slots))

    sparse = select_sparse(gradients)
    if not sparse or not takes_rows(transformation, optimizer.get_name(), list(sparse), slots, params):
        whole = {name: to_dense(gradient) for name, gradient in gradients.items()}
        takes_both = sparse and takes_sparse_gradients(transformation)
        return update(whole, params, slots, {**extra, "sparse_gradients": sparse} if takes_both else extra)
    # The optimizer gets small arrays, the touched rows of tables and slots: the time of a step does not depend on the
    # size of a table.
    touched = TouchedRows(sparse, params)
    gradients = {**gradients, **touched.gradients}
    changed, row_slots = update(gradients, touched.take(params), touched.take(slots), no_steps=touched.no_steps())
    return touched.add(params, changed), touched.put(slots, row_slots)
