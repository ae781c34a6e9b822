"""The checkpoints in a directory, as a list."""

from __future__ import annotations

import os
from typing import NamedTuple

from estimator.checkpoint._checkpoint_dir import (
    NotACheckpointError,
    find_damage,
    folders_in,
    is_pinned,
    step_of,
    written_in,
    written_ns,
)
from estimator.storage._files import expanded, files_in, is_dir
from estimator.storage._manifest import DamagedCheckpointError


class CheckpointInfo(NamedTuple):
    """A checkpoint on disk.

    Attributes:
      path: what `evaluate`, `predict` and `export_model` take as `checkpoint_path`.
      step: its global step.
      time: when it was written, in seconds since 1970; 0.0 where damage has taken that.
      bytes: the size of its files.
      pinned: whether it stays whatever `keep_checkpoint_max` says, as the best one of early stopping does.
      damage: the reason why it cannot be used; None: its files are there, with the sizes that were written. Their
        contents are compared when they are read, and by `python -m estimator.inspect MODEL_DIR --verify`.
    """

    path: str
    step: int
    time: float
    bytes: int
    pinned: bool
    damage: str | None = None


def checkpoints(model_dir: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Lists the checkpoints in a model_dir, oldest first; empty where training has not saved any yet.

    A damaged one is listed, but not used: training and evaluation take the newest sound one. The training run in the
    directory, or another process, may remove any of them at any time, all but the newest.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> x = np.ones((2, 1), np.float32)
    >>> config = est.RunConfig(save_checkpoints_steps=10)
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp(), config)
    >>> _ = estimator.train(lambda: [(x, 3 * x)] * 25)
    >>> [each.step for each in est.checkpoints(estimator.model_dir)]
    [0, 10, 20, 25]
    >>> est.checkpoints(estimator.model_dir)[-1].path == estimator.latest_checkpoint()
    True

    Args:
      model_dir: the directory of an Estimator.

    Returns:
      One `CheckpointInfo` for each: a tuple of `path`, `step`, `time`, `bytes`, `pinned` and `damage`.

    Raises:
      FileNotFoundError: there is no such directory.
    """
    directory = expanded(model_dir)
    if not is_dir(directory):
        raise FileNotFoundError(f"There is no directory {directory!r}. Give the `model_dir` of an Estimator.")
    while True:
        folders = folders_in(directory)
        infos = _infos(directory)
        if infos or folders == folders_in(directory):  # otherwise training has removed all, after it wrote newer ones
            return infos


def _infos(directory: str) -> list[CheckpointInfo]:
    infos = []
    for path in written_in(directory):
        try:
            damage = find_damage(path)
            time, size = _time(path, damage), sum(files_in(path).values())
        except (NotACheckpointError, FileNotFoundError):  # it was removed meanwhile
            continue
        infos.append(CheckpointInfo(path, step_of(path), time, size, is_pinned(path), damage))
    return infos


def _time(path: str, damage: str | None) -> float:
    try:
        return written_ns(path) / 1e9
    except (DamagedCheckpointError, NotACheckpointError):
        if damage is None:
            raise
        return 0.0
