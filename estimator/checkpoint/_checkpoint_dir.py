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

from absl import logging

from estimator.checkpoint._file_lock import lock_if_possible
from estimator.checkpoint._json_state import decode
from estimator.storage._files import exists, is_dir, is_url, list_dir
from estimator.storage._folders import LocalCopy
from estimator.storage._manifest import DamagedCheckpointError, check_sizes, read_checked, written_name
from estimator.storage._own_folders import is_own, remove_own

ARRAYS = "arrays"
PIN = "PINNED"  # a file in a checkpoint that is kept; removed and copied with it
WHOLE_FILE = "commit_success.txt"
_METADATA_FILE = "_CHECKPOINT_METADATA"
_NAME = re.compile(r"ckpt-(\d+)")
UNFINISHED, _REMOVED, REPLACING = ".unfinished", ".removed", ".replacing"  # behind the name: not, or no longer, one
_LEFTOVER = re.compile(r"ckpt-\d+\.(unfinished|removed|replacing)")


class NotACheckpointError(ValueError):
    """There is no checkpoint at a path, or a training run or somebody else has removed it."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not a checkpoint. Give the path of one, as `latest_checkpoint()` returns it: "
            "`<model_dir>/ckpt-<step>`. Training removes all but the newest: see `RunConfig(keep_checkpoint_max=...)`."
        )


def name_of(step: int) -> str:
    return f"ckpt-{step}"


def named_step(path: str) -> int:
    """The global step in the name of a checkpoint."""
    return int(path.rsplit("-")[-1])


def step_of(path: str) -> int:
    """The global step at which a checkpoint was written, whatever its folder is called now."""
    return named_step(written_name(path))


def is_renamed(path: str) -> bool:
    """Whether a checkpoint was written under another name: then it is not the one of the step in its name."""
    return step_of(path) != named_step(path)


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
    """The paths of the sound checkpoints in a directory, oldest first."""
    sound = []
    for path in written_in(directory):
        with contextlib.suppress(NotACheckpointError, DamagedCheckpointError):
            check_sound(path)
            sound.append(path)
    return sound


def written_in(directory: str) -> list[str]:
    """The paths of the checkpoints in a directory, sound or damaged, oldest first."""
    return _written(folders_in(directory))


def _written(folders: list[str]) -> list[str]:
    return sorted(filter(_is_written, folders), key=lambda path: (step_of(path), not is_renamed(path)))


def newest_sound(directory: str, check: Callable[[str], object] = lambda path: None) -> str | None:
    """The newest checkpoint in a directory that is not damaged; None where there is none at all.

    Args:
      directory: the model_dir.
      check: raises a DamagedCheckpointError for a checkpoint whose sizes are right.

    Raises:
      DamagedCheckpointError: all of them are damaged; this one is the newest.
    """
    while True:
        folders, newest = folders_in(directory), None
        for path in reversed(_written(folders)):
            try:
                check_sound(path)
                check(path)
            except DamagedCheckpointError as error:
                _log_once(str(error))
                newest = newest or error
            except NotACheckpointError:  # it was removed meanwhile
                continue
            else:
                if is_renamed(path):
                    _log_once(
                        f"{path} was written at step {step_of(path)}, and is used as the checkpoint of that step."
                    )
                return path
        # Otherwise training has removed what was listed, after it wrote newer ones.
        if folders == folders_in(directory):
            if newest is not None:
                raise newest
            return None


def check_sound(path: str) -> None:
    """Compares the sizes of the files of a checkpoint with those written; `_orbax` compares the checksums.

    Raises:
      NotACheckpointError: `path` is not a checkpoint.
      DamagedCheckpointError: they differ.
    """
    if not _is_written(path):
        raise NotACheckpointError(path)
    try:
        if not is_checkpoint(path):
            raise DamagedCheckpointError(path, f"{WHOLE_FILE} is missing")
        check_sizes(path)
    except (DamagedCheckpointError, OSError) as error:
        if not _is_written(path) or (isinstance(error, FileNotFoundError) and is_url(path)):  # removed meanwhile
            raise NotACheckpointError(path) from None
        raise


def find_damage(path: str) -> str | None:
    """The reason why a checkpoint is not sound, as far as sizes and its metadata show it; None if it is.

    Raises:
      NotACheckpointError: `path` is not a checkpoint.
    """
    try:
        check_sound(path)
        _metadata(path)
    except DamagedCheckpointError as error:
        return error.reason
    return None


def _is_written(path: str) -> bool:
    """Whether a checkpoint was written at a path. A store has no renames: there the file that says so is the last."""
    return is_checkpoint(path) or (not is_url(path) and (is_own(path) or exists(os.path.join(path, _METADATA_FILE))))


_logged: set[str] = set()


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        logging.error("%s", text)


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
        return decode(read_checked(path, _METADATA_FILE).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpointError(path) from None


def remove(path: str) -> None:
    """Removes a checkpoint. Killed meanwhile, it leaves what the next save recognizes and removes."""
    if not is_url(path) and not os.path.lexists(path + _REMOVED):  # which may be a user's
        os.rename(path, path + _REMOVED)
        path += _REMOVED
    remove_own(path, first=WHOLE_FILE)


def remove_leftovers(directory: str) -> None:
    """Removes what killed processes have left unfinished: what has such a name and was made by an Estimator."""
    for path in (os.path.join(directory, name) for name in list_dir(directory) if _LEFTOVER.fullmatch(name)):
        if is_own(path):
            remove_own(path)
        else:
            with contextlib.suppress(OSError):  # of a process killed before it was marked: only if it is empty
                os.rmdir(path)


def check_places(directory: str, first: int, last: int | None) -> None:
    """To be called before the steps from `first` to `last` are trained.

    Raises:
      FileExistsError: something else has the name of one of their checkpoints.
    """
    for path in folders_in(directory):
        if first <= named_step(path) and (last is None or named_step(path) <= last):
            check_place(path)


def check_place(path: str) -> None:
    """To be called where a checkpoint has to go.

    Raises:
      FileExistsError: there is something that no Estimator has written.
    """
    if (
        not exists(path)
        or is_own(path)
        or any(exists(os.path.join(path, name)) for name in (WHOLE_FILE, _METADATA_FILE))
    ):
        return
    if not is_dir(path) or list_dir(path):
        raise FileExistsError(
            f"{path} was not written by an Estimator, but a checkpoint of this name may have to go there. Training "
            "removes nothing that it cannot recognize: move it away, or choose another model_dir."
        )


def local_copy(path: str) -> LocalCopy:
    """Of a checkpoint in a store, a copy, which stays for the next call; of one on disk, itself."""
    return _copy(path, written_ns(path)) if is_url(path) else LocalCopy(path)


@functools.lru_cache(maxsize=2)  # so that two can be compared
def _copy(path: str, at: int) -> LocalCopy:
    del at
    return LocalCopy(path)


def forget_copies() -> None:
    """To be called where one is damaged: the checkpoint in the store may be mended."""
    _copy.cache_clear()


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
