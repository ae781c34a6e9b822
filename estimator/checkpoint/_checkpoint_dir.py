"""One checkpoint as a directory: whether it is whole, when it was written, and who may read or remove it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator

from estimator.checkpoint._file_lock import lock_if_possible
from estimator.checkpoint._orbax import METADATA_FILE

PIN = "PINNED"  # a file in a checkpoint that is kept; removed and copied with it


class NotACheckpointError(ValueError):
    """There is no checkpoint at a path, or a training run or somebody else has removed it."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not a checkpoint. Give the path of one, as `latest_checkpoint()` returns it: "
            "`<model_dir>/ckpt-<step>`. Training removes all but the newest: see `RunConfig(keep_checkpoint_max=...)`."
        )


def is_checkpoint(path: str) -> bool:
    return os.path.isfile(os.path.join(path, METADATA_FILE))


def check_is_checkpoint(path: str) -> None:
    if not is_checkpoint(path):
        raise NotACheckpointError(path)


def is_pinned(path: str) -> bool:
    return os.path.exists(os.path.join(path, PIN))


def step_of(path: str) -> int:
    """The global step of a checkpoint, from its path."""
    return int(path.rsplit("-")[-1])


def written_ns(path: str) -> int:
    """When the checkpoint at `path` was written, in nanoseconds: two checkpoints of the same name differ in it.

    Raises:
      NotACheckpointError: `path` is not a checkpoint, or no longer one.
    """
    try:
        return os.stat(os.path.join(path, METADATA_FILE)).st_mtime_ns
    except FileNotFoundError:
        raise NotACheckpointError(path) from None


@contextlib.contextmanager
def kept(path: str) -> Iterator[None]:
    """Prevents training runs from removing a checkpoint within the block, where the file system has locks.

    Raises:
      NotACheckpointError: it is not there, or, without locks, was removed while it was read.
    """
    with _locked(path, exclusive=False) as is_there:
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


def remove(path: str) -> None:
    """Removes a checkpoint, unless somebody reads it: then the next call may."""
    try:
        with _locked(path, exclusive=True):
            os.rename(path, f"{path}.removed")
    except BlockingIOError:
        return
    shutil.rmtree(f"{path}.removed")


@contextlib.contextmanager
def _locked(path: str, exclusive: bool) -> Iterator[Callable[[], bool]]:
    """Locks a file of a checkpoint, if there are locks; yields a function that says whether it is still there.

    Raises:
      BlockingIOError: `exclusive`, and somebody else has a lock.
    """
    metadata = os.path.join(path, METADATA_FILE)
    try:
        file = os.open(metadata, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpointError(path) from None

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(metadata))
        except FileNotFoundError:
            return False

    try:
        lock_if_possible(file, exclusive)
        yield is_there
    finally:
        os.close(file)
