"""Retention of checkpoints: removes old ones when a new one is written."""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any, NamedTuple

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._model_dir import list_sound
from estimator.checkpoint._orbax import quiet_orbax
from estimator.storage._manifest import DamagedCheckpointError


class _Info(NamedTuple):
    """A checkpoint as orbax's policies see it."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


def remove_old(newest: Checkpoint, keep_max: int | None, keep_every_n_hours: float | None) -> None:
    """Removes checkpoints beside the one just written, as in `Checkpoints`, unless they are pinned or being read."""
    if not keep_max:
        return
    from orbax.checkpoint.checkpoint_managers import (
        AnyPreservationPolicy,
        EveryNSeconds,
        LatestN,
        PreservationContext,
        PreservationPolicy,
    )

    policies: list[PreservationPolicy] = [LatestN(keep_max)]
    if keep_every_n_hours is not None:
        policies.append(EveryNSeconds(keep_every_n_hours * 3600))
    infos = {}
    # Damaged checkpoints are not listed: they are neither counted nor removed. The new one is last, whatever its step
    # is.
    for each in [*(each for each in list_sound(os.path.dirname(newest.path)) if each != newest), newest]:
        with contextlib.suppress(DamagedCheckpointError, NotACheckpointError):  # or it was removed meanwhile
            infos[each] = _Info(each.step, datetime.datetime.fromtimestamp(each.written_ns / 1e9))
    with quiet_orbax():
        keeps = AnyPreservationPolicy(policies).should_preserve([*infos.values()], context=PreservationContext())
    for each, keep in zip(infos, keeps, strict=True):
        if not keep and not each.is_pinned():
            # Locked until it is removed, so that no process begins to read it; a checkpoint that is being read stays.
            with contextlib.suppress(BlockingIOError, NotACheckpointError), each.lock(exclusive=True):
                each.remove()
