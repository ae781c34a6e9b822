"""The lines at the start of a run: the devices it runs on, and the numbers that it trains."""

from __future__ import annotations

import glob
import math
import os

import jax
from absl import logging

from estimator.core._mode_keys import ModeKeys
from estimator.core._placement import plural
from estimator.steps._model_info import ModelInfo


class StartLines:
    """The lines at the start of the runs of an Estimator, once in each mode."""

    def __init__(self) -> None:
        self._compiling: set[ModeKeys] = set()
        self._started: set[ModeKeys] = set()

    def say_compiling(self, mode: ModeKeys) -> None:
        """Says that the first batch of a mode takes longer: on some machines a minute."""
        if mode not in self._compiling:
            self._compiling.add(mode)
            name = mode.name.lower()  # "predict", as the method is called; the mode's value is TensorFlow's "infer"
            logging.info("Calling model_fn in mode %r and compiling it; the first batch takes longer.", name)

    def say_where(self, mode: ModeKeys, info: ModelInfo, rows: int) -> None:
        """Says on what a run is, given the rows of this process in its first batch."""
        if mode not in self._started:
            self._started.add(mode)
            logging.info("%s; %s", info.placement.introduce(rows), _count(mode, info))
            _warn_of_unused_accelerators()

    def say_resuming(self, step: int, before: int | None, now: int) -> None:
        """Says that a run resumes on another number of towers; `before` is None if the checkpoint does not know it."""
        if before not in (None, now):
            logging.info("It resumes at step %d of a run on %s, now on %d.", step, plural(before, "tower"), now)


def _count(mode: ModeKeys, info: ModelInfo) -> str:
    arrays = {name: jax.tree.leaves(value) for name, value in info.like.variables.items()}
    every = [x for leaves in arrays.values() for x in leaves]
    trained = [x for name in info.trained for x in arrays[name]] if mode == ModeKeys.TRAIN else every
    kind = "trained number" if mode == ModeKeys.TRAIN else "number"
    rest = f", {len(every) - len(trained):,} not trained" if len(every) > len(trained) else ""
    return f"{plural(sum(math.prod(x.shape) for x in trained), kind)} in {plural(len(trained), 'variable')}{rest}"


def _warn_of_unused_accelerators() -> None:
    chosen = jax.config.values["jax_platforms"] or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    there = sorted([*glob.glob("/dev/nvidia[0-9]*"), *glob.glob("/dev/accel[0-9]*")])
    if there and not chosen and jax.default_backend() == "cpu":
        logging.log_first_n(
            logging.WARNING,
            "This host has accelerators (%s), but jax finds none, and runs on the CPU. Install the jax for them, as "
            "the page Install shows (docs/how_to/install.md): `pip install -U 'jax[cuda13]'` for NVIDIA GPUs.",
            1,
            ", ".join(there),
        )
