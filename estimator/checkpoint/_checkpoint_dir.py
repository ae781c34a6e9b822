"""One checkpoint as a directory, `<model_dir>/ckpt-<step>`: what is noted in it, and who may remove it.

Its arrays are in `arrays/`. orbax writes the two files that are read here: one that says that it is whole, and a JSON
file with its time and with what was saved beside arrays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from estimator.checkpoint._file_lock import lock_if_possible
from estimator.checkpoint._json_state import decode
from estimator.storage._files import exists, is_url, list_dir, read
from estimator.storage._folders import LocalCopy, remove_marked

ARRAYS = "arrays"
PIN = "PINNED"  # a file in a checkpoint that is kept; removed and copied with it
WHOLE_FILE = "commit_success.txt"
_METADATA_FILE = "_CHECKPOINT_METADATA"
_NAME = re.compile(r"ckpt-(\d+)")


class NotACheckpointError(ValueError):
    """There is no checkpoint at a path, or a training run or somebody else has removed it."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not a checkpoint. Give the path of one, as `latest_checkpoint()` returns it: "
            "`<model_dir>/ckpt-<step>`. Training removes all but the newest: see `RunConfig(keep_checkpoint_max=...)`."
        )


def name_of(step: int) -> str:
    return f"ckpt-{step}"


def step_of(path: str) -> int:
    """The global step of a checkpoint, from its path."""
    return int(path.rsplit("-")[-1])


def is_checkpoint(path: str) -> bool:
    return exists(os.path.join(path, WHOLE_FILE))


def check_is_checkpoint(path: str) -> None:
    if not is_checkpoint(path):
        raise NotACheckpointError(path)


def folders_in(directory: str) -> list[str]:
    """The paths in a directory that have the name of a checkpoint, oldest first."""
    steps = sorted(int(m[1]) for m in map(_NAME.fullmatch, list_dir(directory)) if m)
    return [os.path.join(directory, name_of(step)) for step in steps]


def checkpoints_in(directory: str) -> list[str]:
    """The paths of the whole checkpoints in a directory, oldest first."""
    return list(filter(is_checkpoint, folders_in(directory)))


def is_pinned(path: str) -> bool:
    return exists(os.path.join(path, PIN))


def written_ns(path: str) -> int:
    """When the checkpoint at `path` was written, in nanoseconds: two checkpoints of the same name differ in it.

    Raises:
      NotACheckpointError: `path` is not a checkpoint, or no longer one.
    """
    return _metadata(path)["commit_timestamp_nsecs"]


def host_of(path: str) -> dict[str, Any]:
    """What was saved beside arrays.

    Raises:
      NotACheckpointError: `path` is not a checkpoint, or no longer one.
    """
    return _metadata(path)["custom_metadata"]


def _metadata(path: str) -> dict[str, Any]:
    try:
        return decode(read(os.path.join(path, _METADATA_FILE)).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpointError(path) from None


def remove(path: str) -> None:
    """Removes a checkpoint, the file first that says it is whole."""
    remove_marked(path, WHOLE_FILE)


def local_copy(path: str) -> LocalCopy:
    """Of a checkpoint in a store, a copy, which stays for the next call; of one on disk, itself."""
    return _copy(path, written_ns(path)) if is_url(path) else LocalCopy(path)


@functools.lru_cache(maxsize=2)  # so that two can be compared
def _copy(path: str, at: int) -> LocalCopy:
    del at
    return LocalCopy(path)


@contextlib.contextmanager
def kept(path: str) -> Iterator[None]:
    """Prevents training runs from removing a checkpoint within the block, where the file system has locks.

    Raises:
      NotACheckpointError: it is not there, or, without locks, was removed while it was read.
    """
    with locked(path, exclusive=False) as is_there:
        if not is_there():
            raise NotACheckpointError(path)
        try:
            yield
        except Exception as error:
            if not is_there():
                raise NotACheckpointError(path) from error
            raise
        if not is_there():  # only a part of it may have been read
            raise NotACheckpointError(path)


@contextlib.contextmanager
def locked(path: str, exclusive: bool) -> Iterator[Callable[[], bool]]:
    """Locks a file of a checkpoint, if there are locks; yields a function that says whether it is still there.

    Raises:
      NotACheckpointError: there is no checkpoint.
      BlockingIOError: `exclusive`, and somebody else has a lock.
    """
    if is_url(path):  # a store has no locks
        at = written_ns(path)
        yield lambda: is_checkpoint(path) and written_ns(path) == at
        return
    name = os.path.join(path, WHOLE_FILE)
    try:
        file = os.open(name, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpointError(path) from None

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(name))
        except FileNotFoundError:
            return False

    try:
        lock_if_possible(file, exclusive)
        yield is_there
    finally:
        os.close(file)
