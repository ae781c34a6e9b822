"""Saves the state of a training run, with the positions of its input and hooks, unless it has a NaN."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.core._hook import Hook
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.loop import _hook_calls
from estimator.loop._context import RunContext
from estimator.loop._loss_reader import NanLossDuringTrainingError
from estimator.loop._resume_input import warn_of_resuming
from estimator.runtime._uninterrupted import shield


@dataclasses.dataclass(eq=False, repr=False)
class Saver:
    """The checkpoints of one training run. A save may still be under way while the run continues.

    Args:
      checkpoints: where to save.
      config: whether a save may be under way, and how its input is resumed.
      hooks: whose states are saved.
      context: of the run.
      path: the checkpoint that the run starts from, if it does.
      skipped_batches: the number of batches of the input that earlier runs have taken.

    Attributes:
      path: the newest checkpoint, which may still be under way.
      step: its step, or -1.
      position: of the input, after the last chunk of steps.
    """

    _checkpoints: Checkpoints
    _config: RunConfig
    _hooks: Sequence[Hook]
    _context: RunContext
    path: str | None
    _skipped_batches: int

    def __post_init__(self) -> None:
        # A failed run finishes its last.
        self._channel = self._context.group.channel("checkpoint", is_independent=True)
        self._first_step = self._context.global_step
        self._warned_of_input = False
        self.step = -1 if self.path is None else self._first_step
        self._before = self.path, self.step  # the newest if the last save fails
        self.position: Any = None

    @property
    def batches(self) -> int:
        """The number of batches of the input that this run and earlier ones have taken."""
        return self._skipped_batches + self._context.batches

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, or, if there is none, the step at which the run began."""
        return max(self.step, self._first_step)

    @property
    def unsaved_steps(self) -> int:
        return self._context.global_step - self.newest_step

    def begin(self, last_step: int | None) -> None:
        """Says before the first step whether a kill would change the results, if the run is to save before its last."""
        every = self._config.save_checkpoints_steps
        if every and (last_step is None or last_step > self._context.global_step + every):
            self._warn_of_resuming()

    def save(self, state: State, wait: bool, skip: bool) -> str | None:
        """Saves the state, if it is not saved and has no NaN; returns the newest checkpoint.

        Args:
          wait: whether to return when it is on disk, if the config allows anything else. In `end` it always is then.
          skip: whether to save nothing, and only to wait.
        """
        step = self._context.global_step
        wait = wait or not self._config.save_checkpoints_async or self._context.phase == "end"
        is_within = self._context.phase != "end" or self._context.preempted
        if self.step == step or skip:
            if wait:
                with self._context.in_phase("checkpoint"):
                    self._wait()
            return self.path
        with self._context.in_phase("checkpoint"):
            self._context.flush()  # a run that resumes from here will not write it
            bad = sorted(_names_with_nan(state.variables))
            if bad:
                raise NanLossDuringTrainingError(
                    f"NaN in the variables {bad} after step {step}, of which no checkpoint was saved. "
                    f"{self.describe_newest()} Look for a gradient that is not a number, or lower the learning rate."
                )
            # Each process reads another part of the input. All of them call this at the same step.
            stopwatch = self._context.stopwatch
            positions, seconds = zip(*self._context.group.all_gather((self.position, stopwatch.read())), strict=True)
            host = {
                "input": {"batches": self.batches, "positions": list(positions)},
                "hooks": _hook_calls.states(self._hooks),
                "time": stopwatch.record(list(seconds)),
                "towers": self._context.towers,
            }
            self._wait()  # one save at a time; the newest that is on disk is known then
            self._before = self.path, self.step
            later = not self._context.batches
            self.path, self.step = self._checkpoints.save(state, host, wait, self._channel, later), step
        if is_within and self.batches:
            self._warn_of_resuming()
        return self.path

    def start(self) -> None:
        """Starts to write what was saved before the first program, which has shown its loss by now."""
        with self._context.in_phase("checkpoint"):
            self._checkpoints.start()

    @contextlib.contextmanager
    def finish_last(self) -> Iterator[None]:
        """Waits for the last checkpoint when the block ends, however it ends. An error of the block comes before the
        checkpoint's, which is in the log. A second Ctrl-C does not wait."""
        try:
            try:
                yield
            except BaseException:
                if not self._context.ends_at_once:
                    with contextlib.suppress(Exception):
                        self._wait()
                if self.unsaved_steps:
                    logging.warning(
                        "Training failed after step %d. What came after step %d is in no checkpoint, and is lost.",
                        self._context.global_step,
                        self.newest_step,
                    )
                raise
            with self._context.in_phase("checkpoint"):
                self._wait()
        except BaseException:
            self._checkpoints.give_up()
            raise

    def describe_newest(self) -> str:
        """A sentence about the newest checkpoint, for errors."""
        path = self._checkpoints.latest()  # waits for one that is being written
        if path is None:
            return "There is no checkpoint."
        return f"The newest checkpoint is from step {Checkpoint(path).step}; nothing later was saved."

    def _warn_of_resuming(self) -> None:
        if not self._warned_of_input:
            self._warned_of_input = warn_of_resuming(self.position, self._config)

    def _wait(self) -> None:
        try:
            self._checkpoints.wait()
        except Exception:
            self.path, self.step = self._before
            raise


@shield
def _names_with_nan(variables: dict[str, PyTree]) -> list[str]:
    on_devices: dict[frozenset[jax.Device], dict[str, list[jax.Array]]] = {}  # a program takes arrays of the same ones
    names = []
    for name, value in variables.items():
        leaves = [leaf for leaf in jax.tree.leaves(value) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        here = [_parts_in_host_memory(leaf) for leaf in leaves]
        if any(np.isnan(part).any() for parts in here for part in parts or ()):
            names.append(name)
        elif None in here:
            devices = frozenset(device for leaf in leaves for device in leaf.devices())
            on_devices.setdefault(devices, {})[name] = leaves
    flags = jax.device_get([_has_nan(group) for group in on_devices.values()])
    return names + [name for group in flags for name, has_nan in group.items() if has_nan]


def _parts_in_host_memory(x: jax.Array) -> list[jax.Array] | None:
    """The parts that numpy can read without a copy, so that no program is compiled before the first save."""
    if any(device.platform != "cpu" for device in x.devices()):
        return None
    if x.is_fully_replicated:
        return [x.addressable_data(0)]
    if not x.is_fully_addressable:
        return None
    return [shard.data for shard in x.addressable_shards if not shard.replica_id]


@jax.jit
def _has_nan(variables: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    return {name: jnp.array([jnp.isnan(x).any() for x in leaves]).any() for name, leaves in variables.items()}
