"""Applies the updates of a train_op, with their gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator.core._frame import Declared, Frame, open_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.core._train_op import TrainOp, Update, UpdatingOptimizer
from estimator.core._typing import Gradients, Slots, Variables
from estimator.optim._absent import hide, names_in_slots, put_back
from estimator.optim._extra_args import call_update, extra_args
from estimator.optim._finite import all_finite, select, update_if
from estimator.optim._given_rate import read_carried
from estimator.optim._sparse_update import TouchedRows, takes_rows, takes_sparse_gradients
from estimator.sparse._indexed_slices import select_sparse, to_dense


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepGradients:
    """The gradients that a train_op asks for, beside it: a model_fn's run finds them, and a step applies them.

    Attributes:
      by_slots: by the slots of each update, and the name of each of its variables.
      marks: by the slots of each update, of each tower a number that is 0 where its gradients may be applied; floats
        of shape `[towers]`, so that they share a vector with the gradients that are summed. Empty: nobody has looked.
    """

    by_slots: dict[str, Gradients] = dataclasses.field(default_factory=dict)
    marks: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def select(self, train_op: TrainOp | None) -> tuple[StepGradients, list[Update]]:
        """The gradients of a train_op, and its updates whose losses are still to be differentiated."""
        updates = {update.slots: update for update in (train_op.updates if train_op else ())}
        by_slots = {slots: own for slots, own in self.by_slots.items() if slots in updates}
        marks = {slots: mark for slots, mark in self.marks.items() if slots in updates}
        pending = [update for slots, update in updates.items() if slots not in by_slots]
        if lost := [update.slots for update in pending if update.loss is None]:
            raise RuntimeError(
                f"`apply_gradients` of {lost} was called in a part of the batch, and its gradients did not come to the "
                "step. A model_fn that maps another one hands them on: `ModelRun.leave(written, gradients)`."
            )
        return StepGradients(by_slots, marks), pending

    def is_allowed(self) -> jax.Array | None:
        """True, a bool scalar, if the updates may be made: no tower has marked a gradient; None if nobody looked."""
        return jnp.stack([(mark == 0).all() for mark in self.marks.values()]).all() if self.marks else None


At = Callable[[Variables], tuple[TrainOp, StepGradients]]
"""The train_op and the gradients that a step has at other values of the variables."""


def apply_step(
    train_op: TrainOp, gradients: StepGradients, written: Variables, state: State, at: At | None = None
) -> tuple[Variables, Slots]:
    """The variables and slots after a step: the updates, then what the model_fn wrote, then the moves.

    Args:
      train_op, gradients: what is asked for, and the gradients of each of its updates.
      written: by name, what the model_fn wrote.
      state: at the beginning of the step.
      at: run only for optimizers that ask.
    """
    frame = Frame(  # for an optimizer given as a function that asks for the step or for a variable
        ModeKeys.TRAIN,
        *state[:2],
        key=state.key,
        global_step=state.global_step,
        declared=Declared(trainable=dict.fromkeys(state.variables, True)),
        reuse=True,
    )
    # Decided once, from the gradients only, before anything is updated. Where a gradient of a tower was marked none is
    # made; where the sum of a scaled one is not finite, that one is not.
    allowed, scaled = gradients.is_allowed(), [u.slots for u in train_op.updates if u.optimizer.loss_scale]
    finite = {slots: all_finite(gradients.by_slots[slots]) for slots in scaled}
    with open_frame(frame):
        updated, slots = _apply_updates(train_op, gradients, allowed, finite, state, at)

    def if_all(new: Variables) -> Variables:
        """The new values where all updates are made, or the values before."""
        good = _all_of(allowed, *finite.values())
        return new if good is None else select(good, new, {name: state.variables[name] for name in new})

    # Moves come last: they use the values of variables after the step, whatever the order in `est.group` is.
    after = {**updated, **if_all(written)}
    moved: Variables = {}
    for move in train_op.moves:
        moved |= move.apply(state.variables, after)
    return {**after, **if_all(moved)}, slots


def _all_of(*conditions: jax.Array | None) -> jax.Array | None:
    known = [condition for condition in conditions if condition is not None]
    return functools.reduce(jnp.logical_and, known) if known else None


def _apply_updates(
    train_op: TrainOp,
    gradients: StepGradients,
    allowed: jax.Array | None,
    finite: dict[str, jax.Array],
    state: State,
    at: At | None,
) -> tuple[Variables, Slots]:
    variables, slots = state.variables, state.slots

    def values_at(i: int, changed: Variables) -> tuple[Any, optax.Updates]:
        # All other variables have the values that the step began with, as for all gradients.
        asked, found = at({**state.variables, **changed})  # type: ignore[misc]
        update = asked.updates[i]
        known = {name: to_dense(gradient) for name, gradient in found.by_slots[update.slots].items()}
        return update.loss, {
            name: known[name] if name in known else jax.tree.map(jnp.zeros_like, x) for name, x in changed.items()
        }

    for i, update in enumerate(train_op.updates):
        if update.slots not in slots:
            raise ValueError(
                f"The state has no slots for the optimizer {update.slots!r}, only {sorted(slots)}. "
                "Initialize it in mode 'train' by the same model_fn."
            )
        # `variables` include the earlier updates: two optimizers of one variable are applied one after the other.
        own = gradients.by_slots[update.slots]
        names = names_in_slots(update, slots[update.slots], own, variables)
        params = {name: variables[name] for name in variables if name in names}
        extra = extra_args(update.loss, params, at and functools.partial(values_at, i))
        extra |= read_carried(update.learning_rate)
        before, loss_scale, good = slots[update.slots], update.optimizer.loss_scale, finite.get(update.slots)
        inner = before.inner if loss_scale else before
        moved, new_slots = _apply(update.optimizer, own, inner, params, extra, _all_of(allowed, good))
        if loss_scale:  # it changes in a skipped step, too: it shrinks after an overflow
            new_slots = loss_scale.after(good, before, new_slots)
        variables = {**variables, **moved}
        slots = {**slots, update.slots: new_slots}
    return variables, slots


def _apply(
    optimizer: UpdatingOptimizer,
    gradients: Gradients,
    slots: optax.OptState,
    params: Variables,
    extra: dict[str, Any],
    good: jax.Array | None,
) -> tuple[Variables, optax.OptState]:
    """The variables and slots of one optimizer after its update, by dense and sparse gradients.

    Args:
      params: the variables that the slots are about. Those without a gradient stay as they are, with their slots.
      good: whether the update is to be made; if None, it is.
    """
    transformation = optimizer.transformation
    before, absent = (params, slots), params.keys() - gradients.keys()
    gradients = {name: gradients.get(name, optax.MaskedNode()) for name in params}
    params, slots = hide(before, absent, params)

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
                steps, new_slots = call_update(transformation, gradients, slots, params, extra)
                _check_slots(optimizer.get_name(), slots, new_slots)
                return {**optax.apply_updates(params, steps), **{name: steps[name] for name in no_steps}}, new_slots

        return update_if(good, make_update, ({**params, **no_steps}, slots))

    def finish(params: Variables, slots: optax.OptState) -> tuple[Variables, optax.OptState]:
        return put_back((params, slots), before) if absent else (params, slots)

    sparse = select_sparse(gradients)
    if not sparse or not takes_rows(transformation, optimizer.get_name(), list(sparse), slots, params):
        whole = {name: to_dense(gradient) for name, gradient in gradients.items()}
        takes_both = sparse and takes_sparse_gradients(transformation)
        return finish(*update(whole, params, slots, {**extra, "sparse_gradients": sparse} if takes_both else extra))
    # The optimizer gets small arrays, the touched rows of tables and slots: the time of a step does not depend on the
    # size of a table.
    touched = TouchedRows(sparse, params)
    gradients = {**gradients, **touched.gradients}
    changed, row_slots = update(gradients, touched.take(params), touched.take(slots), no_steps=touched.no_steps())
    return finish(touched.add(params, changed), touched.put(slots, row_slots))


def _check_slots(name: str, before: optax.OptState, after: optax.OptState) -> None:
    old, new = (
        {jax.tree_util.keystr(p): jnp.shape(x) for p, x in jax.tree.leaves_with_path(s)} for s in (before, after)
    )
    if old != new:
        differing = sorted(path for path in {**old, **new} if old.get(path) != new.get(path))
        raise ValueError(
            f"The update of the optimizer {name!r} changes the structure of its slots, which all training steps share: "
            f"{differing} {'is' if len(differing) == 1 else 'are'} of other shapes after it, or only before or after "
            "it. Let the `init` of the transformation make all slots as its `update` leaves them."
        )
