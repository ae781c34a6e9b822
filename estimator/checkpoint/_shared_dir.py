"""Paths in a directory that several processes share, found by one of them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable

from estimator.multihost._process_group import ProcessGroup
from estimator.storage._files import exists, is_dir, is_url, remove, write

_SECS_TO_APPEAR = 10.0  # of a file that another host has written


def find_shared(group: ProcessGroup, directory: str, find: Callable[[], str | None], writes: bool) -> str | None:
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
