"""Lookup of the checkpoint that a call reads, and of the state in it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.checkpoint._model_dir import check_not_of_tensorflow
from estimator.checkpoint._restore import Init, StateSource
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.multihost._process_group import ProcessGroup
from estimator.steps._model_info import ModelInfo
from estimator.storage._files import exists, expand, is_dir, is_url, remove, write
from estimator.storage._manifest import DamagedCheckpointError

T = TypeVar("T")

_SECS_TO_APPEAR = 10.0  # of a file that another host has written


class CheckpointLookup:
    """Finds the checkpoints of a model_dir, some of which a training run may remove meanwhile."""

    def __init__(self, model_dir: str, checkpoints: Checkpoints, states: StateSource) -> None:
        self._model_dir = model_dir
        self._checkpoints = checkpoints
        self._states = states

    def find_newest(self, group: ProcessGroup, writes: bool = False) -> str | None:
        """Finds the newest checkpoint, the same in all processes; None if there is none."""
        path = _find_shared(group, self._model_dir, lambda: self._checkpoints.latest(self._make_check(writes)), writes)
        if path is None:
            check_not_of_tensorflow(self._model_dir)
        return path

    def find_trained(self) -> str:
        """Finds the newest checkpoint, of which there must be one."""
        path = self._checkpoints.latest()
        if path is None:
            check_not_of_tensorflow(self._model_dir)
            raise ValueError(f"Could not find trained model in model_dir: {self._model_dir}. Call `train` first.")
        return path

    def find(self, checkpoint_path: str | None, group: ProcessGroup) -> str | None:
        """Finds the checkpoint at a path that a user gives; the newest one where that is None or "latest".

        Raises:
          ValueError: there is none.
        """
        if checkpoint_path not in (None, "latest"):
            self._checkpoints.finish()  # it may be the one that is being written
            checkpoint = Checkpoint(expand(checkpoint_path))
            checkpoint.check_sound()
            checkpoint.names()  # raises if it is not a checkpoint
            return checkpoint.path
        path = self.find_newest(group)
        if path is None and checkpoint_path is not None:
            self.find_trained()  # raises
        if path is None:
            logging.warning(
                "Could not find trained model in model_dir: %s, running initialization instead.",
                self._model_dir,
            )
        return path

    def read_state(
        self,
        mode: ModeKeys,
        path: str | None,
        checkpoint_path: str | None,
        group: ProcessGroup,
        info: ModelInfo,
        init: Init,
    ) -> tuple[State, str | None]:
        """Reads the state saved at `path`, and returns it with that path; the newest checkpoint's where the user's
        `checkpoint_path` names none and the one looked up before has been removed since, or is damaged."""
        while True:
            try:
                return self._states.get(mode, path, group, info, init), path
            except (NotACheckpointError, DamagedCheckpointError):
                newest = self._checkpoints.latest()
                if checkpoint_path not in (None, "latest") or group.count > 1 or newest in (None, path):
                    raise
                path = newest

    def read_newest(self, read: Callable[[Checkpoint], T]) -> T:
        """Reads the newest checkpoint; the next one if that is removed before, or damaged."""
        failed = None
        while True:
            newest = Checkpoint(self.find_trained())
            try:
                with newest.hold():
                    return read(newest)
            except (NotACheckpointError, DamagedCheckpointError):
                if newest == failed:
                    raise
                failed = newest

    def _make_check(self, trains: bool) -> Callable[[Checkpoint], None]:
        """Makes a function that compares the checksums of a checkpoint, unless its state is cached: then training
        compares sizes, since it reads more than the state, and other calls nothing."""

        def check(checkpoint: Checkpoint) -> None:
            if not self._states.is_cached(checkpoint.path):
                checkpoint.verify(slots=trains)
            elif trains:
                checkpoint.check_sound()

        return check


def _find_shared(group: ProcessGroup, directory: str, find: Callable[[], str | None], writes: bool) -> str | None:
    """Finds what process 0 finds in its directory: its path in this process's directory, which must be the same one.

    Args:
      directory: as this process calls it.
      find: returns a path in the directory, or None.
      writes: whether the processes are about to write into it: then it is checked also where nothing is there.

    Raises:
      FileNotFoundError: this process sees another directory.
    """
    if group.count == 1:
        return find()
    path = group.broadcast_from_chief(find)
    if path is not None:
        return _check_shared(group, directory, path)
    if writes:
        probe = group.broadcast_from_chief(lambda: _make_probe(directory))
        try:
            _check_shared(group, directory, probe)
            group.all_gather(None)  # all see the file before process 0 removes it
        finally:
            if not group.index:
                remove(probe)
    return None


def _check_shared(group: ProcessGroup, directory: str, path_of_chief: str) -> str:
    path = os.path.join(directory, os.path.basename(path_of_chief))
    deadline = time.monotonic() + _SECS_TO_APPEAR
    while not exists(path):
        if time.monotonic() >= deadline or not is_dir(directory):
            raise FileNotFoundError(
                f"Process {group.index}, with model_dir={directory!r}, does not see there what process 0 has written, "
                f"{path_of_chief}. Give all processes the same model_dir, on a file system that they share."
            )
        time.sleep(0.1)
    return path


def _make_probe(directory: str) -> str:
    if not is_url(directory):
        os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"shared-{uuid.uuid4().hex}")
    write(path, b"")
    return path
