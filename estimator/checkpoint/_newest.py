"""The newest checkpoint that can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError, log_once
from estimator.checkpoint._model_dir import list_folders, sort_written
from estimator.storage._sealed_folder import DamagedError

T = TypeVar("T")


def newest_readable(directory: str, read: Callable[[Checkpoint], T]) -> T | None:
    """Reads the newest checkpoint in a directory; those that are damaged, or removed meanwhile, are passed over.

    Args:
      directory: the model_dir.
      read: reads a checkpoint, for example `Checkpoint.check_sound`, which returns it.

    Returns:
      The result of `read`; None if there is no checkpoint at all.

    Raises:
      DamagedError: all of them are damaged; this one is the newest.
    """
    while True:
        folders, newest = list_folders(directory), None
        for each in reversed(sort_written(folders)):
            try:
                result = read(each)
            except DamagedError as error:
                log_once(str(error))
                newest = newest or error
            except NotACheckpointError:  # it was removed meanwhile
                continue
            else:
                each.log_if_renamed()
                return result
        # Otherwise training has removed what was listed, after it wrote newer ones.
        if folders == list_folders(directory):
            if newest is not None:
                raise newest
            return None
