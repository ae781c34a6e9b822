"""The arguments of `train_and_evaluate`: how to train, and how to evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from estimator.core._argument_checks import check_steps
from estimator.core._estimator_spec import checked_hooks
from estimator.export._exporters import Exporter
from estimator.hooks._checkpoint_saver import checked_listeners


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`: arguments of `Estimator.train`.

    >>> spec = TrainSpec(lambda: [], max_steps=1000)

    Args:
      input_fn: gives the training batches.
      max_steps: the global step at which to stop. If None, trains until the input ends, or a hook stops it.
      hooks: `est.Hook`s, around the steps.
      saving_listeners: `est.CheckpointSaverListener`s; they are called before the evaluation of a checkpoint.

    Raises:
      TypeError: `input_fn` is not a function, or a hook or listener is not one.
      ValueError: `max_steps` is not positive.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Any = None
    saving_listeners: Any = None

    def __post_init__(self) -> None:
        _check_input_fn(self.input_fn)
        check_steps("TrainSpec", max_steps=self.max_steps)
        # The class is frozen. Any iterable is allowed, and becomes a checked tuple.
        object.__setattr__(self, "hooks", checked_hooks("hooks", self.hooks))
        object.__setattr__(self, "saving_listeners", checked_listeners(self.saving_listeners))


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The evaluations of `train_and_evaluate`, and their intervals.

    >>> spec = EvalSpec(lambda: [], steps=None, name="test", eval_every_steps=100)

    Args:
      input_fn: gives the batches, from the beginning for each evaluation.
      steps: how many of them to take; all if None.
      name: of the evaluation, where there are several; it goes into `Estimator.eval_dir(name)`.
      hooks: `est.Hook`s, around the batches.
      exporters: an `est.Exporter`, or several.
      start_delay_secs: how many seconds an evaluator waits before its first evaluation; as in TensorFlow it has no
        meaning for a process that trains.
      throttle_secs: the least number of seconds between the starts of two evaluations; earlier ones are left out. The
        last state of the run is always evaluated.
      eval_every_steps: evaluate at its multiples in global steps; default: as configured in `train_and_evaluate`.

    Raises:
      TypeError: `input_fn` is not a function, `name` not a string, or a hook or exporter is not one.
      ValueError: `steps` or `eval_every_steps` is not positive, or a time is negative; exporters have no name, or the
        same one.
    """

    input_fn: Callable[..., Any]
    # 100 is TensorFlow's default.
    steps: int | None = 100
    name: str | None = None
    hooks: Any = None
    exporters: Any = None
    # TensorFlow's defaults are 120 and 600: there an evaluation makes a graph and reads a checkpoint.
    start_delay_secs: float = 0
    throttle_secs: float = 0
    eval_every_steps: int | None = None

    def __post_init__(self) -> None:
        _check_input_fn(self.input_fn)
        check_steps("EvalSpec", steps=self.steps, eval_every_steps=self.eval_every_steps)
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"`name` must be string, given: {self.name!r}.")
        for field in ("start_delay_secs", "throttle_secs"):
            if getattr(self, field) < 0:
                raise ValueError(f"Must specify {field} >= 0, given: {getattr(self, field)!r}.")
        object.__setattr__(self, "hooks", checked_hooks("hooks", self.hooks))
        object.__setattr__(self, "exporters", _checked_exporters(self.exporters))


def _check_input_fn(input_fn: object) -> None:
    if not callable(input_fn):
        raise TypeError(f"`input_fn` must be callable, given: {input_fn!r}.")


def _checked_exporters(exporters: object) -> tuple[Exporter, ...]:
    if exporters is None:
        return ()
    several = tuple(exporters) if isinstance(exporters, Iterable) else (exporters,)
    if not all(isinstance(each, Exporter) for each in several):
        raise TypeError(
            f"`exporters` must be an Exporter, an iterable of Exporter, or `None`, given: {exporters!r}. "
            "Derive a class of your own from `est.Exporter`."
        )
    names = [each.name for each in several]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"An Exporter must have a name that is a non-empty string, given: {name!r}.")
    if len(set(names)) < len(names):
        raise ValueError(f"`exporters` must have unique names, given: {names}.")
    return several
