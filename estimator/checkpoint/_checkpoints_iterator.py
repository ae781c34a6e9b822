"""Iteration over the checkpoints of a model_dir as a training run, maybe of another process, saves them."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator

from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._newest import newest_readable
from estimator.multihost._preemption import ends_by_signals
from estimator.storage._files import expand, is_url
from estimator.storage._sealed_folder import DamagedError

_POLL_SECS = 1.0
_STORE_POLL_SECS = 10.0  # a store is asked over the network, and may charge for it


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], object] | None = None,
) -> Iterator[str]:
    """Yields the path of the newest checkpoint, and of each newer one as it appears: `tf.train.checkpoints_iterator`.

    It looks when the next one is asked for, so that those saved meanwhile are passed over for the newest. Training may
    remove a checkpoint after it was yielded, but not while an Estimator of another process reads it. For evaluations
    of each checkpoint use `train_and_evaluate(..., role="evaluator")`.

    >>> import estimator as est, numpy as np, optax, os, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> x = np.ones((2, 1), np.float32)
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp()).train(lambda: [(x, 3 * x)] * 25)
    >>> [os.path.basename(path) for path in est.checkpoints_iterator(estimator.model_dir, timeout=0.1)]
    ['ckpt-25']

    Args:
      checkpoint_dir: the model_dir of an Estimator, or its URL; it need not exist yet.
      min_interval_secs: seconds from one checkpoint to the next at least.
      timeout: seconds to wait for a new checkpoint; for ever if None.
      timeout_fn: is called when they have passed, and says whether to end; if not, it waits as long again. If None, it
        ends.

    Raises:
      ValueError: `min_interval_secs` is negative, or `timeout` not positive.
    """
    if not min_interval_secs >= 0:
        raise ValueError(f"Must specify min_interval_secs >= 0 for checkpoints_iterator, given: {min_interval_secs!r}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"Must specify timeout > 0, or None, for checkpoints_iterator, given: {timeout!r}.")
    # The arguments are checked here, and not when the first one is taken.
    return _iterate(expand(checkpoint_dir), min_interval_secs, timeout or math.inf, timeout_fn or (lambda: True))


def _iterate(model_dir: str, interval: float, timeout: float, timeout_fn: Callable[[], object]) -> Iterator[str]:
    last, since = None, time.monotonic()
    while True:
        newest = _find_path(model_dir)
        if newest not in (None, last):
            last, started = newest, time.monotonic()
            yield newest
            sleep(started + interval - time.monotonic())
            since = time.monotonic()
        elif time.monotonic() < since + timeout:
            sleep(min(poll_secs(model_dir), since + timeout - time.monotonic()))
        elif timeout_fn():
            logging.info("No new checkpoint in %s within %g s.", model_dir, timeout)
            return
        else:
            since = time.monotonic()


def _find_path(model_dir: str) -> str | None:
    # Damage is in the log; training replaces what it cannot read.
    with contextlib.suppress(DamagedError):
        newest = newest_readable(model_dir, Checkpoint.check_sound)
        return None if newest is None else newest.path
    return None


def poll_secs(model_dir: str) -> float:
    """The seconds between two looks into a model_dir."""
    return _STORE_POLL_SECS if is_url(model_dir) else _POLL_SECS


def sleep(secs: float) -> None:
    """Sleeps; SIGTERM ends the process with the exit code of a run that it ends."""
    with ends_by_signals():
        time.sleep(max(0.0, secs))
