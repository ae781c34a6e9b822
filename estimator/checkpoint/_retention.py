"""Retention of checkpoints: removes old ones when a new one is written."""

from __future__ import annotations

import contextlib
import os

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._model_dir import list_sound
from estimator.storage._sealed_folder import DamagedError


def remove_old(newest: Checkpoint, keep_max: int | None, keep_every_n_hours: float | None) -> None:
    """Removes checkpoints beside the one just written, as in `Checkpoints`, unless they are pinned or being read."""
    if not keep_max:
        return
    times = {}
    # Damaged checkpoints are not listed: they are neither counted nor removed. The new one is last, whatever its step
    # is.
    for each in [*(each for each in list_sound(os.path.dirname(newest.path)) if each != newest), newest]:
        with contextlib.suppress(DamagedError, NotACheckpointError):  # or it was removed meanwhile
            times[each] = each.written_ns / 3.6e12
    kept = None
    for each, time in [*times.items()][:-keep_max]:
        # A time before the last one is of a clock that was set back: it counts from here.
        if keep_every_n_hours is not None and (kept is None or not 0 <= time - kept < keep_every_n_hours):
            kept = time
        elif not each.is_pinned():
            # Locked until it is removed, so that no process begins to read it; a checkpoint that is being read stays.
            with contextlib.suppress(BlockingIOError, NotACheckpointError), each.lock(exclusive=True):
                each.remove()
