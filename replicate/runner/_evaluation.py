"""Evaluation and prediction in towers, exact for any number of rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from estimator import EstimatorSpec, State
from estimator.replication import Frame, check_rows, concatenate_specs, is_sparse, join_spec, run_model_fn, split_spec
from estimator.typing import PyTree
from replicate.runner._base import Call, Runner, tower_frame
from replicate.runner._merge import all_reduce
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


class _Result(NamedTuple):
    """What the run of a part leaves.

    Attributes:
      spec: merged over the part's towers.
      denominators: what its losses divide by, summed over the part's towers.
      frame: as the run left it.
    """

    spec: EstimatorSpec
    denominators: list[jax.Array]
    frame: Frame


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run of a model_fn over a batch in which every example counts once.

    The rows that do not divide by the towers are a second, smaller part, which one tower takes. Losses divide by what
    both parts have added up, so each part runs twice: for the denominators, then with them. XLA keeps nothing of the
    first run but those.

    Attributes:
      runner: has the towers.
      call: runs the model_fn.
      frame: of the run around the towers.
      batch: features and labels, of `rows` rows.
    """

    runner: Runner
    call: Call
    frame: Frame
    batch: PyTree
    rows: int

    @functools.cached_property
    def _start(self) -> State:
        return self.runner.start_of(self.frame)

    def spec(self) -> EstimatorSpec:
        """The merged spec. Where a loss is within a loop or a branch, its denominator cannot be carried from one run
        into the next: then one tower takes all rows."""
        devices = self.runner.devices
        even = self.rows - self.rows % len(devices)
        parts = [_Part(devices, 0, even), _Part(devices[:1], even, self.rows - even)]
        try:
            return self._merged([part for part in parts if part.size])
        except _DenominatorInside:
            return self._merged([_Part(devices[:1], 0, self.rows)])

    def _merged(self, parts: list[_Part]) -> EstimatorSpec:
        is_only = len(parts) == 1
        results = [self._run(part, is_only, None) for part in parts]
        if not is_only and results[0].denominators:
            totals = [sum(both[1:], both[0]) for both in zip(*(r.denominators for r in results), strict=True)]
            results = [self._run(part, is_only, totals) for part in parts]
        self.frame.adopt_names(results[-1].frame)
        sizes = [part.size for part in parts]
        return self.runner.readable(concatenate_specs([r.spec for r in results], sizes, self.runner.mean_loss))

    def _run(self, part: _Part, is_only: bool, totals: list[jax.Array] | None) -> _Result:
        """Runs the model_fn on a part.

        Args:
          is_only: whether the part has all rows.
          totals: the denominators summed over all parts, for losses to divide by; None: not known yet.
        """
        runner, towers = self.runner, len(part.devices)
        scale = 1 / towers if runner.mean_loss else 1.0
        frames: list[Frame] = []

        def average(denominator: jax.Array, index: int | None) -> jax.Array:
            if index is None and not is_only:
                raise _DenominatorInside
            if totals is None or index is None:
                return cross_tower_mean(denominator)
            # So that losses weighted by rows add up to the sum over all divided by this.
            return totals[index] * (part.size / towers / self.rows)

        def tower(start: State, batch: PyTree) -> tuple[PyTree, PyTree]:
            share = 1.0 if runner.mean_loss else part.size / towers / self.rows
            inside = tower_frame(self.frame, start, average, share, first=part.begin)
            result = run_model_fn(
                self.call, inside, batch, differentiate=False, loss_scale=scale, transform=runner.transform
            )
            frames.append(result.frame)
            if len(runner.devices) > 1:
                check_rows(result.spec, part.size // towers)
            summed, per_part = split_spec(result.spec, scale)
            return all_reduce([], (summed, result.denominators), runner.ops)[1], per_part

        is_even = towers == len(runner.devices)
        mapped = tower_map(tower, part.devices) if is_even else lone_tower(tower, runner.devices)
        rows = jax.tree.map(lambda x: take_rows(x, part.begin, part.size), self.batch, is_leaf=is_sparse)
        (summed, denominators), per_part = mapped(self._start, rows)
        return _Result(join_spec(summed, runner.merge_parts(per_part, towers)), denominators, frames[-1])
