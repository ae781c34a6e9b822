"""The training loop: steps in flight, checkpoints, log lines and a progress bar around a compiled step."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from estimator._batch import guarded
from estimator._checkpoint import Checkpoints
from estimator._frame import PyTree
from estimator._non_finite import cleared, log_if_more, raise_if_any, skipped_steps
from estimator._replica_check import check_replicas
from estimator._run_config import RunConfig
from estimator._sparse import alike, with_steps
from estimator._spec import EstimatorSpec, check_no_hooks
from estimator._transform import Model, State

# More gain nothing, and on CPU devices the collectives of many starve each other until XLA aborts the process.
_PROGRAMS_IN_FLIGHT = 2
_STEPS_BETWEEN_LOOKS = 100  # at the losses, for NaN


class NanLossDuringTrainingError(RuntimeError):
    """The loss, or a variable about to be saved, is not a number."""


class Carry(NamedTuple):
    """What goes from step to step on the devices: the state, less its key, which never changes."""

    variables: dict[str, PyTree]
    slots: dict[str, PyTree]
    global_step: jax.Array


class Steps:
    """The compiled programs of the loop: one step, and several in one program. Of the spec they keep the loss alone.

    The key comes as plain numbers, since jax takes typed keys on a slower path (some 8 us per call).

    Args:
      model: what to run; it donates its state.
      is_one_program: whether a step can be compiled together with what is around it.
    """

    def __init__(self, model: Model, is_one_program: bool) -> None:
        def one(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> tuple[Carry, jax.Array]:
            state, spec = model.train_step(_state(carry, key_data), features, labels)
            check_no_hooks(spec)
            return Carry(state.variables, state.slots, state.global_step), _reported_loss(spec)

        def several(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> tuple[Carry, jax.Array]:
            state, spec = model.train_loop(_state(carry, key_data), with_steps((features, labels)))
            check_no_hooks(spec)
            return Carry(state.variables, state.slots, state.global_step), _reported_loss(spec)

        self.one = jax.jit(one, donate_argnums=0) if is_one_program else one
        self.several = jax.jit(several, donate_argnums=0) if is_one_program else several
        self.on_nan = model.on_nan


@dataclasses.dataclass
class Training:
    """One call of `Estimator.train`.

    Attributes:
      steps: the compiled programs.
      config: when to save and to log, and how many steps go into one program.
      checkpoints: where to save.
      step: the number of steps that were started.
      last_step: where to stop; None: where the input ends.
    """

    steps: Steps
    config: RunConfig
    checkpoints: Checkpoints
    step: int
    last_step: int | None
    saved_path: str | None = None
    saved_step: int = -1
    saved_time: float = 0.0
    looked_step: int = -1
    logged_step: int = -1
    skipped: int = 0  # the number of steps that on_nan="skip" left out so far
    clock: tuple[int, float] | None = None  # the step and the time from which the rate is taken

    def run(self, state: State, batches: Iterator[tuple[PyTree, PyTree]]) -> State:
        """Trains until the last step or the end of the input; saves at the start (if nothing is saved), on the way
        as the config says, and at the end.

        Raises:
          NanLossDuringTrainingError: the loss became NaN. Nothing of that is saved.
          NonFiniteGradientError: a gradient was inf or NaN, and on_nan is "raise". Nothing of that is saved.
          ReplicaMismatchError: a check that is due finds copies that differ. Nothing is saved from there on.
        """
        if self.steps.on_nan():
            self.skipped = skipped_steps(state)
            if self.steps.on_nan() == "raise":
                state = cleared(state)
        self.looked_step = self.logged_step = self.step
        self.saved_time = time.monotonic()
        if self.checkpoints.latest() is None:  # a warm start may begin at another step than 0
            self._save(state)
        else:
            self.saved_step = self.step
        key_data = jax.random.key_data(state.key)
        carry = Carry(state.variables, state.slots, state.global_step)
        del state  # its memory goes to the first step
        loss = None
        with self._bar() as bar:
            while True:
                losses: list[jax.Array] = []
                for program, size, batch in self._until_boundary(batches):
                    carry, loss_of_program = guarded(program, *batch, carry, key_data, *batch)
                    losses.append(loss_of_program)
                    if len(losses) > _PROGRAMS_IN_FLIGHT:
                        losses[-1 - _PROGRAMS_IN_FLIGHT].block_until_ready()
                    bar.update(size)
                    if self.clock is None:  # started after the first program, since compiling is no part of the rate
                        loss_of_program.block_until_ready()
                        self.clock = self.step, time.monotonic()
                if not losses:
                    break
                values = self._look(losses, carry)
                self._log(values, bar)
                loss = values[-1]
                every = self.config.check_replicas_every
                if every and self.step // every > (self.step - len(values)) // every:  # a multiple was passed
                    check_replicas(self.step, variable=carry.variables, slot=carry.slots)
                if self._save_is_due():
                    self._save(_state(carry, key_data))
        if loss is None:
            logging.warning("Training with estimator made no steps. Perhaps input is empty or misspecified.")
        else:
            logging.info("Loss for final step: %.6g.", loss)
        if self.step != self.saved_step:
            self._save(_state(carry, key_data))
        return _state(carry, key_data)

    def _until_boundary(
        self, batches: Iterator[tuple[PyTree, PyTree]]
    ) -> Iterator[tuple[Callable[..., Any], int, tuple[PyTree, PyTree]]]:
        """The programs to run, each with its number of steps and its batch, until something has to happen between two
        of them, or the input ends. Nothing but what every step needs is done here: a small step takes 20 us."""
        several = self.config.steps_per_loop
        left = self._steps_to_boundary()
        while left >= several > 1:
            chunk = list(itertools.islice(batches, several))
            stacked = (_stacked(chunk) or _stacked(alike(chunk))) if len(chunk) == several else None
            if stacked is not None:
                self.step += several
                yield self.steps.several, several, stacked
            else:
                for batch in chunk:
                    self.step += 1
                    yield self.steps.one, 1, batch
            left -= several
            if self._save_is_due():
                return
        for batch in itertools.islice(batches, left):
            self.step += 1
            yield self.steps.one, 1, batch
            if self.config.save_checkpoints_secs and self._save_is_due():
                return

    def _steps_to_boundary(self) -> int:
        every = min(self.config.log_step_count_steps or _STEPS_BETWEEN_LOOKS, _STEPS_BETWEEN_LOOKS)
        programs = math.ceil(every / self.config.steps_per_loop)  # a look never cuts a program short
        ends = [self.looked_step + programs * self.config.steps_per_loop]
        if self.last_step is not None:
            ends.append(self.last_step)
        if self.config.save_checkpoints_steps:
            ends.append(self.saved_step + self.config.save_checkpoints_steps)
        if check_every := self.config.check_replicas_every:
            programs = math.ceil((check_every - self.step % check_every) / self.config.steps_per_loop)
            ends.append(self.step + programs * self.config.steps_per_loop)
        return max(0, min(ends) - self.step)

    def _is_due(self, every: int | None, done: int) -> bool:
        return bool(every) and self.step - done >= every  # type: ignore[operator]

    def _save_is_due(self) -> bool:
        if self.config.save_checkpoints_secs:
            return time.monotonic() - self.saved_time >= self.config.save_checkpoints_secs
        return self._is_due(self.config.save_checkpoints_steps, self.saved_step)

    def _look(self, losses: list[jax.Array], carry: Carry) -> np.ndarray:
        """The losses of the steps since the last look, one each, none of them NaN. To read the loss of each step at
        once would cost every step, on several CPU devices, a tenth of its time."""
        if self.steps.on_nan() == "raise":
            raise_if_any(carry)
        elif self.steps.on_nan() == "skip":
            self.skipped = log_if_more(carry, self.skipped)
        values = np.concatenate([np.atleast_1d(loss.addressable_data(0)) for loss in losses])
        if np.isnan(values).any():
            nan_step = self.looked_step + 1 + int(np.argmax(np.isnan(values)))
            raise NanLossDuringTrainingError(
                f"NaN loss during training, at step {nan_step}. {self._newest()} Look for a division by zero or a "
                "logarithm of zero, lower the learning rate, or run with jax.config.update('jax_debug_nans', True)."
            )
        self.looked_step = self.step
        return values

    def _log(self, losses: np.ndarray, bar: Any) -> None:
        """Logs those of the last steps that are due; they may lie within a program of several."""
        every = self.config.log_step_count_steps
        if not self._is_due(every, self.logged_step):
            return
        assert every is not None
        now = time.monotonic()
        step, since = self.clock or (self.step, now)
        rate = f" ({(self.step - step) / (now - since):.4g} steps/sec)" if self.step > step else ""
        with bar.external_write_mode():  # so that the line does not go into the bar
            for due in range(self.logged_step + every, self.step + 1, every):
                logging.info("loss = %.6g, step = %d%s", losses[due - self.step - 1], due, rate)
                self.logged_step = due
        bar.set_postfix(loss=f"{losses[-1]:.4g}", refresh=False)
        self.clock = self.step, now

    def _save(self, state: State) -> None:
        if not (self.config.save_checkpoints_steps or self.config.save_checkpoints_secs):
            return
        bad = sorted(_names_with_nan(state.variables))
        if bad:
            raise NanLossDuringTrainingError(
                f"NaN in the variables {bad} after step {self.step}, of which no checkpoint was saved. "
                f"{self._newest()} Look for a gradient that is not a number, or lower the learning rate."
            )
        self.saved_path = self.checkpoints.save(state)
        self.saved_step, self.saved_time = self.step, time.monotonic()

    def _newest(self) -> str:
        if self.saved_step < 0:
            return "There is no checkpoint."
        return f"The newest checkpoint is that of step {self.saved_step}; nothing later was saved."

    def _bar(self) -> Any:
        """A progress bar, silent where stderr is no terminal."""
        return tqdm.tqdm(total=self.last_step, initial=self.step, unit="step", disable=not sys.stderr.isatty())


def _state(carry: Carry, key_data: jax.Array) -> State:
    return State(carry.variables, carry.slots, carry.global_step, jax.random.wrap_key_data(key_data))


def _reported_loss(spec: EstimatorSpec) -> jax.Array:
    """A skipped step's NaN is reported as inf: it must not end the training."""
    skipped = spec.train_op.skipped
    return spec.loss if skipped is None else jnp.where(skipped & jnp.isnan(spec.loss), jnp.inf, spec.loss)


def _names_with_nan(variables: dict[str, PyTree]) -> list[str]:
    by_devices: dict[Any, dict[str, PyTree]] = {}  # a program takes arrays of the same devices
    for name, value in variables.items():
        devices = frozenset(device for leaf in jax.tree.leaves(value) for device in leaf.devices())
        by_devices.setdefault(devices, {})[name] = value
    flags = jax.device_get([_has_nan(group) for group in by_devices.values()])
    return [name for group in flags for name, has_nan in group.items() if has_nan]


@jax.jit
def _has_nan(variables: dict[str, PyTree]) -> dict[str, jax.Array]:
    def has_nan(value: PyTree) -> jax.Array:
        floats = [x for x in jax.tree.leaves(value) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return jnp.any(jnp.array([jnp.isnan(x).any() for x in floats], bool))

    return {name: has_nan(value) for name, value in variables.items()}


def _kind(leaf: Any) -> Any:
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _stacked(chunk: Sequence[tuple[PyTree, PyTree]]) -> tuple[PyTree, PyTree] | None:
    """The batches as one of arrays `[steps, batch, ...]`; None if they differ in structure, shapes or dtypes."""
    flat = [jax.tree.flatten(batch) for batch in chunk]
    first_structure = flat[0][1]
    if any(structure != first_structure for _, structure in flat):  # type: ignore[operator]
        return None
    stacked = []
    for first, *rest in zip(*(leaves for leaves, _ in flat), strict=True):
        if any(_kind(leaf) != _kind(first) for leaf in rest):
            return None
        stacked.append((jnp if isinstance(first, jax.Array) else np).stack([first, *rest]))
    return jax.tree.unflatten(first_structure, stacked)
