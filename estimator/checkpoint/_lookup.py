"""Lookup of the checkpoint that a call reads, and of the state in it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from estimator.checkpoint import _checkpoints
from estimator.checkpoint._checkpoint_dir import NotACheckpointError, check_sound, kept
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.checkpoint._model_dir import check_not_of_tensorflow
from estimator.checkpoint._orbax import verify
from estimator.checkpoint._restore import StateSource
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.core._typing import Features, Labels
from estimator.multihost._process_group import ProcessGroup
from estimator.storage._files import exists, expanded, is_dir, is_url, remove, write
from estimator.storage._manifest import DamagedCheckpointError

T = TypeVar("T")

_SECS_TO_APPEAR = 10.0  # of a file that another host has written


class CheckpointLookup:
    """Finds the checkpoints of a model_dir, some of which a training run may remove meanwhile."""

    def __init__(self, model_dir: str, checkpoints: Checkpoints, states: StateSource) -> None:
        self._model_dir = model_dir
        self._checkpoints = checkpoints
        self._states = states

    def newest(self, group: ProcessGroup, writes: bool = False) -> str | None:
        """The newest checkpoint, the same in all processes, or None."""
        path = _shared_path(group, self._model_dir, lambda: self._checkpoints.latest(self._checker(writes)), writes)
        if path is None:
            check_not_of_tensorflow(self._model_dir)
        return path

    def trained(self) -> str:
        """The newest checkpoint.

        Raises:
          ValueError: there is none.
        """
        path = self._checkpoints.latest()
        if path is None:
            check_not_of_tensorflow(self._model_dir)
            raise ValueError(f"Could not find trained model in model_dir: {self._model_dir}. Call `train` first.")
        return path

    def requested(self, checkpoint_path: str | None, group: ProcessGroup) -> str | None:
        """The checkpoint at a path that a user gives; the newest one where that is None or "latest".

        Raises:
          ValueError: there is none.
        """
        if checkpoint_path not in (None, "latest"):
            self._checkpoints.finish()  # it may be the one that is being written
            checkpoint_path = expanded(checkpoint_path)
            check_sound(checkpoint_path)
            _checkpoints.names(checkpoint_path)  # raises where it is not a checkpoint
            return checkpoint_path
        path = self.newest(group)
        if path is None and checkpoint_path is not None:
            self.trained()  # raises
        if path is None:
            logging.warning(
                "Could not find trained model in model_dir: %s, running initialization instead.",
                self._model_dir,
            )
        return path

    def state(
        self,
        mode: ModeKeys,
        path: str | None,
        checkpoint_path: str | None,
        group: ProcessGroup,
        features: Features,
        labels: Labels = None,
    ) -> tuple[State, str | None]:
        """The state saved at `path`, and that path; the newest checkpoint's where the user's `checkpoint_path` names
        none and the one looked up before has been removed since, or is damaged."""
        while True:
            try:
                return self._states.get(mode, path, group, features, labels), path
            except (NotACheckpointError, DamagedCheckpointError):
                newest = self._checkpoints.latest()
                if checkpoint_path not in (None, "latest") or group.count > 1 or newest in (None, path):
                    raise
                path = newest

    def read_newest(self, read: Callable[[str], T]) -> T:
        """What is read from the newest checkpoint; from the next one if that is removed before, or damaged."""
        failed = None
        while True:
            path = self.trained()
            try:
                with kept(path):
                    return read(path)
            except (NotACheckpointError, DamagedCheckpointError):
                if path == failed:
                    raise
                failed = path

    def _checker(self, slots: bool) -> Callable[[str], None]:
        """Compares the checksums of a checkpoint that a run will read, unless its state is in memory."""

        def check(path: str) -> None:
            if not self._states.is_cached(path):
                verify(path, slots)

        return check


def _shared_path(group: ProcessGroup, directory: str, find: Callable[[], str | None], writes: bool) -> str | None:
    """The path in the directory of this process to what process 0 finds in its own, which must be the same one.

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
            group.all_gather(None)
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
