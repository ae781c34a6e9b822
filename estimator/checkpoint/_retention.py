"""Retention of checkpoints: removes old ones when a new one is written."""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any, NamedTuple

from estimator.checkpoint._checkpoint_dir import (
    NotACheckpointError,
    checkpoints_in,
    is_pinned,
    locked,
    remove,
    step_of,
    written_ns,
)
from estimator.checkpoint._orbax import quiet_orbax
from estimator.storage._manifest import DamagedCheckpointError


class _Info(NamedTuple):
    """What orbax's policies know of a checkpoint."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


def remove_old(newest: str, keep_max: int | None, keep_every_n_hours: float | None) -> None:
    """Removes checkpoints beside the one just written, as in `Checkpoints`, unless they are pinned or being read.

    One stays locked until it is removed, so that nobody begins to read it.
    """
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
    for path in [*(each for each in checkpoints_in(os.path.dirname(newest)) if each != newest), newest]:
        with contextlib.suppress(DamagedCheckpointError, NotACheckpointError):  # or it was removed meanwhile
            infos[path] = _Info(step_of(path), datetime.datetime.fromtimestamp(written_ns(path) / 1e9))
    with quiet_orbax():
        keeps = AnyPreservationPolicy(policies).should_preserve([*infos.values()], context=PreservationContext())
    for path, keep in zip(infos, keeps, strict=True):
        if not keep and not is_pinned(path):
            with contextlib.suppress(BlockingIOError, NotACheckpointError), locked(path, exclusive=True):
                remove(path)
