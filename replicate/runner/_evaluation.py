"""Evaluation and prediction in towers, exact for any number of rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from estimator import EstimatorSpec, State
from estimator.replication import ModelRun, concatenate_specs
from estimator.typing import PyTree
from replicate.runner._base import Runner, tower_frame
from replicate.towers._collectives import cross_tower_mean
from replicate.towers._map import lone_tower, tower_map
from replicate.towers._split_batch import take_rows


class _DenominatorInside(BaseException):
    """Leaves a run at a loss within a loop or a branch, whose denominator is not known outside of that.

    No `Exception`, so that a model_fn which catches those does not stop it.
    """


class _Part(NamedTuple):
    """Rows of a batch, and the towers that take them.

    Attributes:
      devices: of the towers.
      begin, size: the first row, and how many there are.
    """

    devices: tuple[Any, ...]
    begin: int
    size: int


class _PartResult(NamedTuple):
    """The result of the towers that take a part.

    Attributes:
      spec: merged over them.
      denominators: of the losses, summed over them.
      declared: `Frame.declared` of one of them.
    """

    spec: EstimatorSpec
    denominators: list[jax.Array]
    declared: Any


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run of a model_fn over a batch in which every example counts once.

    The rows that do not divide by the towers are a second, smaller part, which one tower takes. Losses divide by what
    both parts have added up, so each part runs twice: for the denominators, then with them. XLA keeps nothing of the
    first run but those.

    Attributes:
      runner: has the towers.
      run: of the model_fn.
    """

    runner: Runner
    run: ModelRun

    @functools.cached_property
    def _start(self) -> State:
        return self.runner.start_of(self.run.frame)

    def spec(self) -> EstimatorSpec:
        """The merged spec. Where a loss is within a loop or a branch, its denominator cannot be carried from one run
        into the next: then one tower takes all rows."""
        devices, rows = self.runner.devices, self.run.rows
        # The remainder is not padded: padding would change batch normalization, metrics and all that the model_fn
        # computes.
        even = rows - rows % len(devices)
        parts = [_Part(devices, 0, even), _Part(devices[:1], even, rows - even)]
        try:
            return self._merge([part for part in parts if part.size])
        except _DenominatorInside:
            return self._merge([_Part(devices[:1], 0, rows)])

    def _merge(self, parts: list[_Part]) -> EstimatorSpec:
        is_only = len(parts) == 1
        results = [self._run(part, is_only, None) for part in parts]
        if not is_only and results[0].denominators:
            totals = [sum(both[1:], both[0]) for both in zip(*(r.denominators for r in results), strict=True)]
            results = [self._run(part, is_only, totals) for part in parts]
        self.run.frame.adopt_names(results[-1].declared)
        sizes = [part.size for part in parts]
        return self.runner.readable(concatenate_specs([r.spec for r in results], sizes, self.runner.mean_loss))

    def _run(self, part: _Part, is_only: bool, totals: list[jax.Array] | None) -> _PartResult:
        """The result of all towers that take a part.

        Args:
          is_only: whether the part has all rows.
          totals: the denominators summed over all parts, for losses to divide by; None if not known yet.
        """
        runner, towers = self.runner, len(part.devices)
        scale = 1 / towers if runner.mean_loss else 1.0
        # Then the towers', but not their frames: those hold values of the towers.
        declared = [self.run.frame.declared]

        def average(denominator: jax.Array, index: int | None) -> jax.Array:
            if index is None and not is_only:
                raise _DenominatorInside
            if totals is None or index is None:
                return cross_tower_mean(denominator)
            # So that losses weighted by rows add up to the sum over all divided by this.
            return totals[index] * (part.size / towers / self.run.rows)

        def tower(start: State, batch: PyTree) -> tuple[PyTree, PyTree]:
            share = 1.0 if runner.mean_loss else part.size / towers / self.run.rows
            inside = tower_frame(self.run.frame, start, average, share, first=part.begin)
            result = self.run.on(batch, inside, differentiate=False, loss_scale=scale, transform=runner.transform)
            declared.append(result.frame.declared)
            if len(runner.devices) > 1:
                result.check_rows(part.size // towers)
            summed, per_part = result.scale(scale).split()
            return runner.ops.sum_step([], (summed, result.denominators))[1], per_part

        is_even = towers == len(runner.devices)
        mapped = tower_map(tower, part.devices) if is_even else lone_tower(tower, runner.devices)
        rows = take_rows(self.run.batch, part.begin, part.size)
        (summed, denominators), per_part = mapped(self._start, rows)
        return _PartResult(runner.merge_parts(per_part, towers).join(summed), denominators, declared[-1])
