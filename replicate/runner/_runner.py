"""Runs a model_fn in towers and merges what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from estimator import EstimatorSpec, TrainOp
from estimator.core._bcoo import is_sparse
from estimator.core._frame import Frame, lets_out, open_frame
from estimator.core._placement import Placement
from estimator.core._record import merge_reports
from estimator.core._typing import PyTree
from estimator.optim._non_finite import marked, non_finite
from estimator.steps._forward_transform import Forward
from estimator.steps._gradients import Outcome, has_pending, run
from replicate.cross_tower_ops import CrossTowerOps
from replicate.runner._merge import (
    apart,
    check_rows,
    join,
    join_metrics,
    merged,
    summed,
    together,
    total,
    with_gradients,
    without_gradients,
)
from replicate.runner._micro_batches import accumulate_steps, accumulated
from replicate.runner._tower_optimizer import TowerOptimizer
from replicate.towers._collectives import cross_tower_mean
from replicate.towers._map import lone_tower, num_towers, tower_index, tower_map
from replicate.towers._split_batch import take_rows

Call = Callable[[PyTree], EstimatorSpec]


class _DenominatorInside(BaseException):
    """Leaves a run at a loss within a loop or a branch, whose denominator is not known outside of that.

    No `Exception`, so that a model_fn which catches those does not stop it.
    """


@dataclasses.dataclass(frozen=True)
class SyncRunner:
    """Runs a model_fn in towers, within the frame of the run around it.

    Attributes:
      devices: one per tower, or a tuple of them.
      placement: where the variables live.
      mean_loss: whether the merged loss is the mean of the towers' losses, not their sum.
      on_nan: None: gradients are not looked at.
      ops: takes the sums over towers.
      transform: what `replicate_model_fn` was told about the forward function of a tower.
    """

    devices: tuple[Any, ...]
    placement: Placement
    mean_loss: bool
    on_nan: str | None
    ops: CrossTowerOps
    transform: Callable[[Forward], Forward] | None

    def initialize(self, call: Call, frame: Frame, batch: PyTree) -> EstimatorSpec:
        """Creates the variables as one tower with the whole batch would."""
        ran: list[Frame] = []

        def tower(key: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
            ran.append(frame.fresh(key=key))
            with open_frame(ran[0]) as started:
                spec = call(batch)
            if len(self.devices) > 1:
                _check_optimizers(spec.train_op)
            spec = dataclasses.replace(spec, train_op=_taken(spec), reported=started.reported)
            return (spec, started.variables, started.slots), None

        (spec, variables, slots), _ = lone_tower(tower, self.devices)(frame.key, batch)
        frame.variables.update(variables)
        frame.slots.update(slots)
        keep_names(frame, ran[0])
        frame.placement = self.placement.with_partitions(ran[0].partitions)
        frame.slots.update(frame.placement.placed(frame.slots))
        return spec

    def train(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        scale = 1 / len(self.devices) if self.mean_loss else 1.0
        separate = not self.placement.is_one_program  # it sums the gradients where the variables are
        ran: list[Frame] = []

        def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            outcome, after = self.run_tower(call, frame, start, batch, rows, scale, cross_tower_mean)
            ran.append(after)
            flags = non_finite(outcome.spec.train_op) if self.on_nan else None
            same, own = apart(outcome.spec, scale)
            gradients = None
            if separate:
                same, gradients = without_gradients(same)
            same, written = summed(same, outcome, start[0], after.aggregation, self.ops)
            return (same, written), (own, gradients, flags)

        start = _start(frame)
        (same, written), (own, gradients, flags) = tower_map(tower, self.devices)(start, batch)
        if separate:
            same = with_gradients(same, gradients)
        same = dataclasses.replace(same, train_op=self.placement.to_update(same.train_op))
        keep_names(frame, ran[-1])
        frame.assigned.update(written)
        if flags is not None:
            same = dataclasses.replace(same, train_op=marked(same.train_op, flags))
        return self._readable(together(same, self._merged(own, len(self.devices))))

    def run_tower(
        self,
        call: Call,
        frame: Frame,
        start: PyTree,
        batch: PyTree,
        rows: int,
        scale: float,
        average: Callable[[PyTree], PyTree],
    ) -> tuple[Outcome, Frame]:
        """A tower's own run in TRAIN, in micro-batches if its optimizers ask for them.

        Args:
          start: its variables, slots, key and global step.
          batch: the rows of this tower.
          rows: of all towers.
          scale: factor on its loss.
          average: what becomes of the denominators that its losses divide by.
        """
        averaged: list[bool] = []

        def average_denominator(denominator: jax.Array) -> jax.Array:
            averaged.append(True)
            return average(denominator)

        inside = _tower_frame(frame, start, first=0, average_denominator=average_denominator)
        outcome, after = run(call, inside, batch, take_gradients=True, loss_scale=scale, transform=self.transform)
        if num_towers() > 1:
            _check_optimizers(outcome.spec.train_op)
            check_rows(outcome.spec, rows // num_towers())
        steps = accumulate_steps(outcome.spec.train_op)
        if steps > 1:  # what ran so far is not used, and left out of the compiled program
            outcome = accumulated(
                call,
                batch,
                inside.fresh(key=start[2]),
                steps,
                like=outcome,
                aggregation=after.aggregation,
                average=average if averaged else None,
                loss_scale=scale,
                mean_loss=self.mean_loss,
                transform=self.transform,
            )
        return outcome, after

    def evaluate(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        """Every example counts once: what does not divide by the towers is one more, smaller call.

        Losses then divide by what both calls have added up. Where that is not possible, since a loss is within a loop
        or a branch, one tower takes all rows.
        """
        even = rows - rows % len(self.devices)
        parts = [(self.devices, 0, even), (self.devices[:1], even, rows - even)]
        try:
            return self._evaluate(call, frame, batch, rows, [part for part in parts if part[2]])
        except _DenominatorInside:
            return self._evaluate(call, frame, batch, rows, [(self.devices[:1], 0, rows)])

    def _evaluate(
        self, call: Call, frame: Frame, batch: PyTree, rows: int, parts: list[tuple[tuple[Any, ...], int, int]]
    ) -> EstimatorSpec:
        """The merged spec of several parts of a batch: of each its towers, its first row and how many there are."""
        towers = len(self.devices)

        def run_part(part: Any, denominators: list[jax.Array] | None) -> PyTree:
            devices, begin, size = part
            mine = jax.tree.map(lambda x: take_rows(x, begin, size), batch, is_leaf=is_sparse)
            seen: list[jax.Array] = []

            def average(denominator: jax.Array) -> jax.Array:
                if lets_out():
                    seen.append(jax.lax.stop_gradient(denominator))
                elif len(parts) > 1:
                    raise _DenominatorInside
                if denominators is None:
                    return cross_tower_mean(denominator)
                # So that losses weighted by rows add up to the sum over all divided by this.
                return denominators[len(seen) - 1] * (size / len(devices) / rows)

            def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
                inside = _tower_frame(frame, start, first=begin, average_denominator=average)
                scale = 1 / len(devices) if self.mean_loss else 1.0
                outcome, after = run(
                    call,
                    inside,
                    batch,
                    take_gradients=False,
                    loss_scale=scale,
                    denominators=seen,
                    transform=self.transform,
                )
                ran.append(after)
                if towers > 1:
                    check_rows(outcome.spec, size // len(devices))
                same, own = apart(outcome.spec, scale)
                return total([], (same, seen), self.ops)[1], own

            mapped = tower_map(tower, devices) if len(devices) == towers else lone_tower(tower, self.devices)
            (same, totals), own = mapped(_start(frame), mine)
            return same, totals, self._merged(own, len(devices))

        ran: list[Frame] = []
        results = [run_part(part, None) for part in parts]
        if len(parts) > 1 and results[0][1]:
            totals = [sum(both[1:], both[0]) for both in zip(*(r[1] for r in results), strict=True)]
            results = [run_part(part, totals) for part in parts]
        keep_names(frame, ran[-1])
        specs = [together(same, own) for same, _, own in results]
        return self._readable(self._join(specs, [size for _, _, size in parts]))

    def _merged(self, own: PyTree, towers: int) -> PyTree:
        predictions, metrics, *others = own
        return merged((predictions, self.placement.to_merge(metrics), *others), towers)

    def _readable(self, spec: EstimatorSpec) -> EstimatorSpec:
        """The spec with what every process reads whole in each."""
        metrics, reported = self.placement.whole_in_each((spec.eval_metric_ops, spec.reported))
        return dataclasses.replace(spec, eval_metric_ops=metrics, reported=reported)

    def _join(self, specs: list[EstimatorSpec], sizes: list[int]) -> EstimatorSpec:
        if len(specs) == 1:
            return specs[0]
        first, second = specs
        loss = first.loss
        if loss is not None:
            weights = [size / sum(sizes) if self.mean_loss else 1.0 for size in sizes]
            loss = first.loss * weights[0] + second.loss * weights[1]
        return dataclasses.replace(
            first,
            loss=loss,
            predictions=join([first.predictions, second.predictions]),
            export_outputs=join([first.export_outputs, second.export_outputs]),
            eval_metric_ops=join_metrics([first.eval_metric_ops, second.eval_metric_ops]),
            reported=merge_reports([first.reported, second.reported], sizes),
        )


def _start(frame: Frame) -> PyTree:
    return frame.variables, frame.slots, frame.key, frame.global_step


def _tower_frame(frame: Frame, start: PyTree, first: int, **changes: Any) -> Frame:
    """The frame of one tower; `first` keeps its random keys apart from those of another call's towers."""
    variables, slots, key, global_step = start
    if num_towers() > 1 or first:
        key = jax.random.fold_in(key, tower_index() + first)
    return frame.fresh(
        variables=variables,
        slots=slots,
        key=key,
        global_step=global_step,
        **({"average_denominator": cross_tower_mean} | changes),
    )


def _check_optimizers(train_op: TrainOp | None) -> None:
    for update in train_op.updates if train_op else ():
        if not isinstance(update.optimizer, TowerOptimizer):
            raise ValueError(
                "Please wrap optimizers with TowerOptimizer in order to use replicate_model_fn with multiple "
                f"`devices`. Got the plain optimizer {update.optimizer.get_name()!r}; write "
                "`TowerOptimizer(optimizer).minimize(loss)`."
            )


def _taken(spec: EstimatorSpec) -> TrainOp | None:
    """A train_op without pending losses: the towers take the gradients, not the run around them."""
    if not has_pending(spec.train_op):
        return spec.train_op
    return TrainOp(tuple(dataclasses.replace(u, gradients={}) for u in spec.train_op.updates))


def keep_names(frame: Frame, ran: Frame) -> None:
    """Lets the run around the towers know the variables and optimizers they had."""
    frame.trainable.update(ran.trainable)
    frame.aggregation.update(ran.aggregation)
    frame.slot_owners.update(ran.slot_owners)
    frame.rng_calls = ran.rng_calls
