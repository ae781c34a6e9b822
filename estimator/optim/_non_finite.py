"""Gradients that are inf or NaN: detected before they are summed, counted, and kept out of the variables."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from estimator.core._frame import Frame
from estimator.core._state import ON_NAN_SLOTS, State
from estimator.core._train_op import TrainOp
from estimator.core._typing import Variables
from estimator.optim._loss_scale import LossScaleState, all_finite, select

Flags = tuple[dict[str, jax.Array], ...]
"""For each update, whether the gradient of a variable, by its name, holds an inf or a NaN; bools."""

_NONE = np.int32(2**31 - 1)


class NonFiniteGradientError(RuntimeError):
    """A gradient was inf or NaN, and `replicate_model_fn` was called with on_nan="raise"."""


class NonFinite(NamedTuple):
    """The entry "on_nan" of `State.slots`, about steps with non-finite gradients; int32 scalars.

    Attributes:
      skipped: how many steps left variables and slots as they were.
      first_step: the number of the first of them, counted from 1; 0 if there was none.
      tower: the first tower that had such a gradient in that step.
      variable: the variable of that gradient, an index into the sorted names of the variables.
    """

    skipped: jax.Array
    first_step: jax.Array
    tower: jax.Array
    variable: jax.Array


class NonFinitePolicy:
    """What a replicated model_fn does about gradients that are inf or NaN.

    Args:
      on_nan: "raise" or "skip".

    Raises:
      ValueError: it is something else.
    """

    def __init__(self, on_nan: str) -> None:
        if on_nan not in ("raise", "skip"):
            raise ValueError(f'on_nan must be None, "raise" or "skip"; got {on_nan!r}.')
        self._on_nan = on_nan

    def watch(self, frame: Frame) -> None:
        """Makes the run around count the steps that `mark` marks, and do with them what the policy says."""
        if frame.declared.slot_owners.setdefault(ON_NAN_SLOTS, NonFinite) is not NonFinite:
            raise ValueError(
                f"An optimizer must not be named {ON_NAN_SLOTS!r} where on_nan is set; give it another name."
            )
        frame.on_nan = self._on_nan
        if frame.initializing:
            frame.slots[ON_NAN_SLOTS] = NonFinite(*(jnp.int32(0) for _ in NonFinite._fields))

    def flags(self, train_op: TrainOp) -> Flags:
        """Whether the gradients of one tower hold an inf or a NaN."""
        return tuple(
            {name: ~all_finite(gradient) for name, gradient in (update.gradients or {}).items()}
            for update in train_op.updates
        )

    def mark(self, train_op: TrainOp, flags: Flags) -> TrainOp:
        """The train_op with the flags of all towers, arrays of shape `[towers]`."""
        pairs = zip(train_op.updates, flags, strict=True)
        updates = tuple(dataclasses.replace(update, non_finite=own) for update, own in pairs)
        return dataclasses.replace(train_op, updates=updates)


def kept_if_non_finite(train_op: TrainOp, before: State, after: State) -> State:
    """The state after a step; where a gradient was marked, the state before it, but for the counters.

    A loss scale changes all the same: it must shrink where it makes gradients overflow.
    """
    names = sorted(before.variables)
    first = _first(train_op, names)
    if first is None:
        return after
    record = _record(before)
    good = first == _NONE
    is_first = ~good & (record.first_step == 0)
    now = (before.global_step + 1, first // len(names), first % len(names))
    counted = NonFinite(record.skipped + (~good).astype(jnp.int32), *select(is_first, now, tuple(record[1:])))
    kept = {name: _with_scale(slots, after.slots[name]) for name, slots in before.slots.items()}
    return after._replace(
        variables=select(good, after.variables, before.variables),
        slots={**select(good, after.slots, kept), ON_NAN_SLOTS: counted},
    )


def done(train_op: TrainOp, variables: Variables, learning_rates: dict[str, jax.Array]) -> TrainOp:
    """The train_op in the spec of a finished step: whether it was skipped, and its learning rates."""
    first = _first(train_op, sorted(variables))
    return TrainOp(skipped=None if first is None else first != _NONE, learning_rates=learning_rates)


def _first(train_op: TrainOp, names: list[str]) -> jax.Array | None:
    """The first tower with a marked gradient, and in it the first variable, as one number: tower * variables +
    variable, or `_NONE`. One reduction finds it: the marks may lie on several devices."""
    marks = [mark for update in train_op.updates for mark in (update.non_finite or {}).items()]
    places = [
        jnp.where(mark, jnp.arange(mark.size, dtype=jnp.int32) * len(names) + names.index(name), _NONE)
        for name, mark in marks
    ]
    return jnp.stack(places).min() if places else None


def _with_scale(before: optax.OptState, after: optax.OptState) -> optax.OptState:
    return after._replace(inner=before.inner) if isinstance(after, LossScaleState) else before


def cleared(state: State) -> State:
    """Forgets the first of the steps that an earlier run has skipped, so that the next one is recorded."""
    record = _record(state)
    if int(record.first_step) == 0:
        return state
    zero = jnp.zeros_like(record.first_step, device=record.first_step.sharding)
    return state._replace(slots={**state.slots, ON_NAN_SLOTS: record._replace(first_step=zero)})


def raise_if_any(state: Any) -> None:
    """Raises the error for a non-finite gradient since `cleared`; waits for the steps."""
    record = jax.device_get(state.slots[ON_NAN_SLOTS])
    if record.first_step:
        raise NonFiniteGradientError(
            f"Non-finite gradient of {_place(record, state.variables)}. That step changed nothing. Look for a division "
            "by zero, a logarithm of zero or a bad row in that tower's part of the batch, or lower the learning rate; "
            'on_nan="skip" skips such steps and continues, as a loss scale needs it.'
        )


def log_if_more(state: Any, seen: int) -> int:
    """Logs that more than `seen` steps were skipped, if so; returns how many were."""
    record = jax.device_get(state.slots[ON_NAN_SLOTS])
    if record.skipped > seen:
        logging.warning(
            "Skipped %d steps with non-finite gradients, %d in all; the first was of %s.",
            record.skipped - seen,
            record.skipped,
            _place(record, state.variables),
        )
    return int(record.skipped)


def _place(record: NonFinite, variables: Variables) -> str:
    return f"the variable {sorted(variables)[record.variable]!r} in tower {record.tower}, at step {record.first_step}"


def skipped_steps(state: State) -> int:
    """How many steps were skipped because of gradients that are inf or NaN (`replicate_model_fn(..., on_nan="skip")`).

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> zero = jnp.int32(0)
    >>> est.skipped_steps(est.State({}, {"on_nan": NonFinite(jnp.int32(2), zero, zero, zero)}, zero, jax.random.key(0)))
    2

    Raises:
      ValueError: the state does not count them.
    """
    return int(_record(state).skipped)


def _record(state: State) -> NonFinite:
    record = state.slots.get(ON_NAN_SLOTS)
    if not isinstance(record, NonFinite):
        raise ValueError(
            f"The state does not count skipped steps; its slots are {sorted(state.slots)}. Initialize it in mode "
            "'train' by a model_fn made by `replicate_model_fn(..., on_nan=\"skip\")`."
        )
    return record
