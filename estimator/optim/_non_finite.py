"""Gradients that are inf or NaN: detected before they are summed, counted, and kept out of the variables."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from estimator.core._frame import Frame
from estimator.core._state import State
from estimator.core._typing import Gradients, Variables
from estimator.optim._apply_updates import StepGradients
from estimator.optim._finite import all_finite, update_if

SLOTS = "on_nan"
"""The entry of `State.slots` with the counters, which is not an optimizer's. A checkpoint may lack it (the counters are
zero then) or have it in excess: on_nan can be switched on and off."""


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
    """A replicated model_fn's way with gradients that are inf or NaN; a `StepGuard`.

    Each tower marks its own gradients before they are summed (`mark`), while it is known whose they are. The marks are
    summed with them, and decide in `StepGradients.is_allowed` whether the updates of the step are made. The state
    counts the steps that are not (`count_skipped`); whoever runs the steps looks at the counters.

    Args:
      on_nan: "raise" or "skip".

    Raises:
      ValueError: it is something else.
    """

    def __init__(self, on_nan: str) -> None:
        if on_nan not in ("raise", "skip"):
            raise ValueError(f'on_nan must be None, "raise" or "skip"; got {on_nan!r}.')
        self._on_nan = on_nan

    def guard_run(self, frame: Frame) -> None:
        """Makes the run around count the steps with a gradient that `mark` marks, and leave out what they would do."""
        owners = frame.declared.slot_owners | frame.declared.reserved_slots
        if owners.get(SLOTS, NonFinite) is not NonFinite:
            raise ValueError(f"An optimizer must not be named {SLOTS!r} where on_nan is set; give it another name.")
        frame.declared.reserved_slots[SLOTS] = NonFinite
        frame.guard = self
        if frame.initializing:
            frame.slots[SLOTS] = NonFinite(*(jnp.int32(0) for _ in NonFinite._fields))

    def mark(self, gradients: StepGradients, tower: jax.Array, towers: int) -> dict[str, jax.Array]:
        """The marks of one tower, which are to be summed over towers.

        They are floats, so that they share a vector with gradients and losses; a sum with zeros is exact.
        """

        # One element for each tower: the sum of the vectors has the marks of all towers.
        numbers = jnp.arange(towers, dtype=tower.dtype)  # by default of 64 bits under x64, which a tower's has not

        return {
            slots: jnp.where(numbers == tower, _first_non_finite(own), 0).astype(jnp.float32)
            for slots, own in gradients.by_slots.items()
            if own
        }

    def before_step(self, state: State) -> State:
        return _forget_first(state) if self._on_nan == "raise" else state

    def after_step(self, state: State) -> None:
        if self._on_nan == "raise":
            _raise_if_any(state)

    def watch(self, state: State) -> SkippedSteps:
        return SkippedSteps(self._on_nan == "raise", state)


class SkippedSteps:
    """The steps that a training run has left out; a `StepWatch`.

    Args:
      raises: whether one of them ends the run.
      state: where the run starts.
    """

    def __init__(self, raises: bool, state: State) -> None:
        self._raises = raises
        self._count = skipped_steps(state)
        self.state = _forget_first(state) if raises else state

    def look(self, state: Any, skipped: np.ndarray) -> None:
        if not skipped.any():
            return
        # Only in this case the host waits for the newest program.
        if self._raises:
            _raise_if_any(state)
        more = int(skipped.sum())
        self._count += more
        record = jax.device_get(state.slots[SLOTS])
        logging.warning(
            "Skipped %d steps with non-finite gradients, %d in all; the first was of %s.",
            more,
            self._count,
            _place(record, state.variables),
        )


def _first_non_finite(gradients: Gradients) -> jax.Array:
    """The number, from 1 on in the order of names, of the first gradient with an inf or a NaN, or 0."""
    # By the order of names, in which `_first_place` finds the variable of a number again.
    good = jnp.stack([all_finite(gradients[name]) for name in sorted(gradients)])
    beyond = len(gradients) + 1
    # Where all are finite `beyond` is the least, and becomes 0.
    return jnp.where(good, beyond, jnp.arange(1, beyond)).min() % beyond


def count_skipped(gradients: StepGradients, before: State, after: State) -> State:
    """The state after a step in which gradients were looked at; it counts the step if one was marked."""
    allowed = gradients.is_allowed()
    assert allowed is not None

    def with_this(record: NonFinite) -> NonFinite:
        is_first = record.first_step == 0
        now = (before.global_step + 1, *_first_place(gradients, sorted(before.variables)))
        return NonFinite(
            record.skipped + 1,
            *(jnp.where(is_first, x.astype(y.dtype), y) for x, y in zip(now, record[1:], strict=True)),
        )

    # On CPU devices this is a branch, so that steps that are not skipped take no longer.
    record = update_if(~allowed, with_this, _record(before))
    return after._replace(slots={**after.slots, SLOTS: record})


def _first_place(gradients: StepGradients, names: list[str]) -> tuple[jax.Array, jax.Array]:
    """The first tower with a marked gradient, and in it the first variable, an index into `names`."""
    marks = [
        # Mark 0, for none, becomes a number behind all variables, which `min` passes over.
        jnp.array([len(names), *map(names.index, sorted(gradients.by_slots[slots]))])[mark.astype(jnp.int32)]
        for slots, mark in gradients.marks.items()
    ]
    first_of_towers = jnp.stack(marks).min(axis=0)
    tower = (first_of_towers < len(names)).argmax()
    return tower, first_of_towers[tower]


def _forget_first(state: State) -> State:
    """Forgets the first of the steps that an earlier run has skipped, so that the next one is recorded."""
    record = _record(state)
    if int(record.first_step) == 0:
        return state
    # On the devices of the one before, for which the step is compiled.
    zero = jnp.zeros_like(record.first_step, device=record.first_step.sharding)
    return state._replace(slots={**state.slots, SLOTS: record._replace(first_step=zero)})


def _raise_if_any(state: Any) -> None:
    """Raises the error for a non-finite gradient since `_forget_first`; waits for the steps."""
    record = jax.device_get(state.slots[SLOTS])
    if record.first_step:
        raise NonFiniteGradientError(
            f"Non-finite gradient of {_place(record, state.variables)}. That step changed nothing. Look for a division "
            "by zero, a logarithm of zero or a bad row in that tower's part of the batch, or lower the learning rate; "
            'on_nan="skip" skips such steps and continues, as a loss scale needs it.'
        )


def _place(record: NonFinite, variables: Variables) -> str:
    return f"the variable {sorted(variables)[record.variable]!r} in tower {record.tower}, at step {record.first_step}"


def skipped_steps(state: State) -> int:
    """The number of steps skipped because of gradients that are inf or NaN (`replicate_model_fn(..., on_nan="skip")`).

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> zero = jnp.int32(0)
    >>> est.skipped_steps(est.State({}, {"on_nan": NonFinite(jnp.int32(2), zero, zero, zero)}, zero, jax.random.key(0)))
    2

    Raises:
      ValueError: the state does not count them.
    """
    return int(_record(state).skipped)


def _record(state: State) -> NonFinite:
    record = state.slots.get(SLOTS)
    if not isinstance(record, NonFinite):
        raise ValueError(
            f"The state does not count skipped steps; its slots are {sorted(state.slots)}. Initialize it in mode "
            "'train' by a model_fn made by `replicate_model_fn(..., on_nan=\"skip\")`."
        )
    return record
