"""Writes a checkpoint into a store, to which orbax cannot write: it is written here, and uploaded.

The file that says that it is whole comes last, and is removed first. What a killed process has left without it is
removed by the next save. One that replaces another of its name removes it right before the upload.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from estimator.checkpoint._checkpoint_dir import (
    WHOLE_FILE,
    check_place,
    folders_in,
    is_checkpoint,
    remove,
)
from estimator.checkpoint._retention import remove_old
from estimator.checkpoint._save import save_checkpoint
from estimator.multihost._collective_call import run_on_chief
from estimator.multihost._global_arrays import gather_on_chief
from estimator.storage._folders import upload
from estimator.storage._manifest import MANIFEST
from estimator.storage._own_folders import MARK, is_own


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
                if each == path or (is_own(each) and not is_checkpoint(each)):
                    check_place(each)
                    remove(each)
            upload(local, path, first=(MARK,), last=(MANIFEST, WHOLE_FILE))
        remove_old(path, keep_max, keep_every_n_hours)

    if together and jax.process_count() > 1:
        arrays = gather_on_chief(arrays)
        copied()
        run_on_chief("save", save)
    else:
        save()
