"""Writes a checkpoint into a store, to which orbax cannot write: it is written here, and uploaded.

The file that says that it is whole comes last, and is removed first. What a killed process has left without it is
removed by the next save. One that replaces another of its name removes it right before the upload.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from estimator.checkpoint._checkpoint_dir import (
    WHOLE_FILE,
    checkpoints_in,
    folders_in,
    is_checkpoint,
    remove,
    step_of,
    written_ns,
)
from estimator.checkpoint._orbax import quiet_orbax
from estimator.checkpoint._save import preservation, save_checkpoint
from estimator.multihost._collective_call import run_on_chief
from estimator.multihost._global_arrays import on_chief
from estimator.storage._folders import upload


def save_in_store(
    path: str,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    keep_max: int | None = None,
    keep_every_n_hours: float | None = None,
    copied: Callable[[], object] = lambda: None,
    together: bool = True,
) -> None:
    """As `save_checkpoint`, for a URL. Of several processes, each of which has its own disk, process 0 writes all."""

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, os.path.basename(path))
            save_checkpoint(local, arrays, host, copied=copied, together=False, folder_per_array=True)
            for each in folders_in(os.path.dirname(path)):
                if each == path or not is_checkpoint(each):
                    remove(each)
            upload(local, path, last=(WHOLE_FILE,))
        if keep_max:
            _remove_old(os.path.dirname(path), keep_max, keep_every_n_hours)

    if together and jax.process_count() > 1:
        arrays = on_chief(arrays)
        copied()
        run_on_chief("save", save)
    else:
        save()


class _Info(NamedTuple):
    """What orbax's policies know of a checkpoint."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


def _remove_old(directory: str, keep_max: int, keep_every_n_hours: float | None) -> None:
    from orbax.checkpoint.checkpoint_managers import PreservationContext

    paths = checkpoints_in(directory)
    infos = [_Info(step_of(path), datetime.datetime.fromtimestamp(written_ns(path) / 1e9)) for path in paths]
    with quiet_orbax(), contextlib.ExitStack() as locks:
        policy = preservation(directory, keep_max, keep_every_n_hours, locks)
        keeps = policy.should_preserve(infos, context=PreservationContext())
    for path, keep in zip(paths, keeps, strict=True):
        if not keep:
            remove(path)
