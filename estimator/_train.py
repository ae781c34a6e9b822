"""The training loop: steps in flight, checkpoints, log lines and a progress bar around a compiled step."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from estimator._batch import guarded
from estimator._checkpoint import Checkpoints
from estimator._frame import PyTree
from estimator._run_config import RunConfig
from estimator._spec import check_no_hooks
from estimator._transform import Model, State

# More steps in flight gain nothing, and on CPU devices the collectives of many steps starve each other until XLA
# aborts the process.
_STEPS_IN_FLIGHT = 2
_STEPS_BETWEEN_LOOKS = 100


class NanLossDuringTrainingError(RuntimeError):
    """The loss, or a variable about to be saved, is not a number."""


class Carry(NamedTuple):
    """What goes from step to step on the devices: the state, less its key, which never changes.

    Attributes:
      variables, slots: of the `State`.
      progress: int32, shape `(2,)`: the global step, and the first step whose loss was NaN, -1 as long as there was
        none. It is kept on the devices so that no step has to wait for the host to look at its loss, and in one array
        because each array that goes in and out costs some microseconds per step on several devices.
    """

    variables: dict[str, PyTree]
    slots: dict[str, PyTree]
    progress: jax.Array


class Steps:
    """The compiled programs of the loop: one step, and several in one program. Of the spec they keep the loss alone.

    The key comes as plain numbers, since jax takes typed keys on a slower path (some 8 us per call).
    """

    def __init__(self, model: Model) -> None:
        def start(carry: Carry, key_data: jax.Array) -> State:
            key = jax.random.wrap_key_data(key_data)
            return State(carry.variables, carry.slots, carry.progress[0], key)

        def finish(carry: Carry, state: State, losses: jax.Array) -> Carry:
            """`losses`: of the steps since `carry`, shape `(steps,)`."""
            step, nan_step = carry.progress
            bad = jnp.isnan(losses)
            first_bad = step + 1 + jnp.argmax(bad).astype(jnp.int32)
            nan_step = jnp.where((nan_step < 0) & bad.any(), first_bad, nan_step)
            return Carry(state.variables, state.slots, jnp.stack([state.global_step, nan_step]))

        def one(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> tuple[Carry, jax.Array]:
            state, spec = model.train_step(start(carry, key_data), features, labels)
            check_no_hooks(spec)
            return finish(carry, state, spec.loss[None]), spec.loss

        def several(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> tuple[Carry, jax.Array]:
            state, spec = model.train_loop(start(carry, key_data), (features, labels))
            check_no_hooks(spec)
            return finish(carry, state, spec.loss), spec.loss[-1]

        self.one = jax.jit(one, donate_argnums=0)
        self.several = jax.jit(several, donate_argnums=0)


@dataclasses.dataclass
class Training:
    """One call of `Estimator.train`.

    Attributes:
      steps: the compiled programs.
      config: when to save and to log, and how many steps go into one program.
      checkpoints: where to save.
      step: the number of finished steps.
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
    clock: tuple[int, float] | None = None  # the step and the time from which the rate is taken

    def run(self, state: State, batches: Iterator[tuple[PyTree, PyTree]]) -> State:
        """Trains until the last step or the end of the input; saves at the start (if nothing is saved), on the way
        as the config says, and at the end.

        Raises:
          NanLossDuringTrainingError: the loss became NaN. Nothing of that is saved.
        """
        self.looked_step = self.step
        self.saved_time = time.monotonic()
        if self.step == 0:
            self._save(state)
        else:
            self.saved_step = self.step
        key, key_data = state.key, jax.random.key_data(state.key)
        progress = jnp.stack([state.global_step, jnp.full_like(state.global_step, -1)])
        carry = Carry(state.variables, state.slots, progress)
        del state  # its memory goes to the first step
        loss = None
        in_flight: collections.deque[jax.Array] = collections.deque()
        with self._bar() as bar:
            while programs := self._next_programs(batches):
                for step, size, batch in programs:
                    carry, loss = guarded(step, *batch, carry, key_data, *batch)
                    self.step += size
                    in_flight.append(loss)
                    if len(in_flight) > _STEPS_IN_FLIGHT:
                        in_flight.popleft().block_until_ready()
                    bar.update(size)
                    if self.clock is None:  # started after the first program, since compiling is no part of the rate
                        loss.block_until_ready()
                        self.clock = self.step, time.monotonic()
                    if self.step - self.looked_step >= self._look_every():
                        self._check(carry)
                        self._log(float(loss), bar)
                    if self._save_is_due():
                        self._check(carry)
                        self._save(_state(carry, key))
        if loss is None:
            logging.warning("Training with estimator made no steps. Perhaps input is empty or misspecified.")
        else:
            self._check(carry)
            logging.info("Loss for final step: %.6g.", float(loss))
        if self.step != self.saved_step:
            self._save(_state(carry, key))
        return _state(carry, key)

    def _next_programs(
        self, batches: Iterator[tuple[PyTree, PyTree]]
    ) -> list[tuple[Callable[..., Any], int, tuple[PyTree, PyTree]]]:
        """The next programs to run, each with its number of steps and its batch; none at the end."""
        size = min(self.config.steps_per_loop, self._steps_to_boundary())
        chunk = list(itertools.islice(batches, size))
        if 1 < len(chunk) == self.config.steps_per_loop and _alike(chunk):
            return [(self.steps.several, size, jax.tree.map(_stack, *chunk))]
        return [(self.steps.one, 1, batch) for batch in chunk]

    def _steps_to_boundary(self) -> int:
        """How many steps fit before something has to happen between two of them."""
        ends = [self.step + self.config.steps_per_loop]
        if self.last_step is not None:
            ends.append(self.last_step)
        if self.config.save_checkpoints_steps:
            ends.append(self.saved_step + self.config.save_checkpoints_steps)
        ends.append(self.looked_step + self._look_every())
        return max(0, min(ends) - self.step)

    def _look_every(self) -> int:
        """How often to see whether the loss is NaN, and to log it if the config says so."""
        return self.config.log_step_count_steps or _STEPS_BETWEEN_LOOKS

    def _save_is_due(self) -> bool:
        if self.config.save_checkpoints_steps:
            return self.step - self.saved_step >= self.config.save_checkpoints_steps
        if self.config.save_checkpoints_secs:
            return time.monotonic() - self.saved_time >= self.config.save_checkpoints_secs
        return False

    def _log(self, loss: float, bar: Any) -> None:
        now = time.monotonic()
        step, since = self.clock or (self.step, now)
        rate = f" ({(self.step - step) / (now - since):.4g} steps/sec)" if self.step > step else ""
        if self.config.log_step_count_steps:
            logging.info("loss = %.6g, step = %d%s", loss, self.step, rate)
        bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
        self.looked_step, self.clock = self.step, (self.step, now)

    def _check(self, carry: Carry) -> None:
        nan_step = int(carry.progress[1])
        if nan_step >= 0:
            raise NanLossDuringTrainingError(
                f"NaN loss during training, at step {nan_step}. {self._newest()} Look for a division by "
                "zero or a logarithm of zero, "
                "lower the learning rate, or run with jax.config.update('jax_debug_nans', True)."
            )

    def _save(self, state: State) -> None:
        if not (self.config.save_checkpoints_steps or self.config.save_checkpoints_secs):
            return
        bad = sorted(name for name, is_nan in _nan_variables(state.variables).items() if is_nan)
        if bad:
            raise NanLossDuringTrainingError(
                f"NaN in the variables {bad} after step {self.step}, of which no checkpoint was saved. "
                f"{self._newest()} "
                "Look for a gradient that is not a number, or lower the learning rate."
            )
        self.saved_path = self.checkpoints.save(state)
        self.saved_step, self.saved_time = self.step, time.monotonic()

    def _newest(self) -> str:
        if self.saved_step < 0:
            return "There is no checkpoint."
        return f"The newest checkpoint is that of step {self.saved_step}; nothing later was saved."

    def _bar(self) -> Any:
        """A progress bar, silent where stderr is no terminal."""
        return tqdm.tqdm(
            total=self.last_step,
            initial=self.step,
            unit="step",
            disable=not sys.stderr.isatty(),
        )


def _state(carry: Carry, key: jax.Array) -> State:
    return State(carry.variables, carry.slots, carry.progress[0], key)


@jax.jit
def _nan_variables(variables: dict[str, PyTree]) -> dict[str, jax.Array]:
    def has_nan(value: PyTree) -> jax.Array:
        floats = [x for x in jax.tree.leaves(value) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return jnp.any(jnp.array([jnp.isnan(x).any() for x in floats], bool))

    return {name: has_nan(value) for name, value in variables.items()}


def _alike(chunk: list[tuple[PyTree, PyTree]]) -> bool:
    """Whether batches can be stacked: the same structure, shapes and dtypes."""

    def kind(batch: tuple[PyTree, PyTree]) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        return structure, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)

    first = kind(chunk[0])
    return all(kind(batch) == first for batch in chunk[1:])


def _stack(*leaves: Any) -> Any:
    return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves)
