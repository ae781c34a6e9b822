"""A run in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from estimator.core._record import Histogram
from estimator.integrations._images import as_picture
from estimator.runtime._extras import import_extra
from estimator.summary._trackers import Run

_STEP = "global_step"
_BINS = 64  # as wandb's own histograms; it takes 512 at most


class WandbTracker:
    """Sends a run to Weights & Biases: numbers, histograms, images and texts, by tag; the settings as its config.

    A training run and the evaluations of its model_dir are one run of W&B, with tags such as "eval/accuracy" and the
    training step as the axis; a run that was killed resumes it, by the id in the model_dir. W&B keeps all that it
    gets: steps that a resumed run repeats are there twice.

    With `mode="offline"` (or the environment variable WANDB_MODE) it needs no network: files are in `wandb` in the
    model_dir, or where `dir` says, and `wandb sync` sends them. wandb writes them about every 15 seconds: a kill loses
    what came since.

    >>> import estimator as est
    >>> config = est.RunConfig(trackers=[est.trackers.WandbTracker(project="digits", mode="offline")])

    Args:
      **settings: arguments of `wandb.init`, such as `project`, `name`, `tags`, `mode` and `dir`; `id`, `resume` and
        `config` are the tracker's.

    Raises:
      ImportError: wandb is not installed.
      TypeError: the tracker's own arguments are given.
    """

    def __init__(self, **settings: Any) -> None:
        import_extra("est.trackers.WandbTracker", "wandb", "wandb")
        own = sorted({"id", "resume", "reinit", "config"} & settings.keys())
        if own:
            raise TypeError(
                f"WandbTracker sets {own} of `wandb.init` itself: the id is kept in the model_dir, the config is the "
                f"RunConfig and the params. Leave them out; got {settings!r}."
            )
        self._settings = settings
        self._open: dict[str, tuple[Any, int]] = {}  # by id: wandb's run, and how many writers share it

    def open(self, run: Run) -> _WandbWriter:
        import wandb

        # An evaluation within a training run shares its run: W&B knows only one writer of an id.
        shared, writers = self._open.get(run.id, (None, 0))
        if shared is None:
            place = {} if "://" in run.model_dir else {"dir": run.model_dir}
            shared = wandb.init(
                **(place | self._settings), id=run.id, resume="allow", reinit="create_new", config=run.settings
            )
            # Not W&B's own step, which may not decrease: training writes late, after evaluations of later steps.
            shared.define_metric("*", step_metric=_STEP)
        self._open[run.id] = shared, writers + 1
        return _WandbWriter(self, run, shared)

    def release(self, run: Run, error: BaseException | None) -> None:
        """Finishes wandb's run with the last of its writers."""
        shared, writers = self._open.pop(run.id)
        if writers > 1:
            self._open[run.id] = shared, writers - 1
        else:
            shared.finish(exit_code=0 if error is None else 1)


class _WandbWriter:
    def __init__(self, tracker: WandbTracker, run: Run, shared: Any) -> None:
        self._tracker, self._run, self._shared = tracker, run, shared

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        shown = {f"{self._run.prefix}{tag}": _as_wandb(value) for tag, value in values.items()}
        self._shared.log({**shown, _STEP: step})  # last: a summary may have its name

    def flush(self) -> None:
        pass  # wandb's own process writes at once

    def close(self, error: BaseException | None = None) -> None:
        self._tracker.release(self._run, error)


def _as_wandb(value: Any) -> Any:
    import wandb

    if isinstance(value, Histogram):
        return wandb.Histogram(np_histogram=value.rebin(_BINS))
    if isinstance(value, np.ndarray):
        return [wandb.Image(as_picture(image)) for image in value]
    return value
