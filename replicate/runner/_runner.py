"""Runs a model_fn in towers and merges what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from estimator import EstimatorSpec, State, TrainOp
from estimator.replication import (
    Frame,
    RunResult,
    check_rows,
    has_pending,
    join_spec,
    open_frame,
    run_model_fn,
    split_spec,
    train_op_of,
)
from estimator.typing import PyTree
from replicate.runner._base import Call, Runner, tower_frame
from replicate.runner._evaluation import Evaluation
from replicate.runner._merge import reduce_result
from replicate.runner._micro_batches import MicroBatches, accumulate_steps
from replicate.runner._tower_optimizer import TowerOptimizer
from replicate.towers._collectives import cross_tower_mean
from replicate.towers._map import lone_tower, num_towers, tower_index, tower_map

Average = Callable[[Any], Any]
"""The average over towers of a denominator, or of each in a list."""


@dataclasses.dataclass(frozen=True)
class SyncRunner(Runner):
    """Sums the gradients of all towers in every step."""

    def initialize(self, call: Call, frame: Frame, batch: PyTree) -> EstimatorSpec:
        """Creates the variables as one tower with the whole batch would."""
        frames: list[Frame] = []

        def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            key, initial = start
            frames.append(frame.fresh(key=key, initial=initial))
            with open_frame(frames[0]) as inside:
                spec = call(batch)
            if len(self.devices) > 1:
                _check_optimizers(spec.train_op)
            train_op = spec.train_op
            if train_op is not None and has_pending(train_op):  # the towers take the gradients, not the run around them
                train_op = train_op.without_gradients()
            spec = dataclasses.replace(spec, train_op=train_op, reported=inside.reported)
            return (spec, inside.variables, inside.slots), None

        (spec, variables, slots), _ = lone_tower(tower, self.devices)((frame.key, frame.initial), batch)
        frame.variables.update(variables)
        frame.slots.update(slots)
        frame.adopt_names(frames[0])
        frame.placement = self.placement.with_partitions(frames[0].declared.partitions)
        frame.slots.update(frame.placement.placed(frame.slots))
        return spec

    def train(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        scale = 1 / len(self.devices) if self.mean_loss else 1.0
        sums_here = self.placement.is_one_program  # otherwise the gradients are summed where the variables are
        frames: list[Frame] = []

        def tower(start: State, batch: PyTree) -> tuple[PyTree, PyTree]:
            result = self.run_tower(call, frame, start, batch, rows, scale, cross_tower_mean)
            frames.append(result.frame)
            spec = result.spec
            if self.on_nan is not None:
                spec = dataclasses.replace(
                    spec, train_op=self.on_nan.mark(train_op_of(spec), tower_index(), num_towers())
                )
            summed, per_part = split_spec(spec, scale)
            gradients = None
            if not sums_here:
                train_op = train_op_of(summed)
                gradients = train_op.gradients()
                summed = dataclasses.replace(summed, train_op=train_op.without_gradients())
            summed, written = reduce_result(summed, result, start.variables, self.ops)
            return (summed, written), (per_part, gradients)

        (spec, written), (per_part, gradients) = tower_map(tower, self.devices)(self.start_of(frame), batch)
        train_op = train_op_of(spec)
        if gradients is not None:
            train_op = train_op.with_gradients(gradients)
        train_op = self.placement.to_update(train_op)
        frame.adopt_names(frames[-1])
        frame.writes.assigned.update(written)
        merged = self.merge_parts(per_part, len(self.devices))
        return self.readable(join_spec(dataclasses.replace(spec, train_op=train_op), merged))

    def run_tower(
        self, call: Call, frame: Frame, start: State, batch: PyTree, rows: int, scale: float, average: Average
    ) -> RunResult:
        """A tower's own run in TRAIN, in micro-batches if its optimizers ask for them.

        Args:
          start: the state that the tower starts from.
          batch: the rows of this tower.
          rows: of all towers.
          scale: factor on its loss.
          average: takes the average of the denominators that the towers' losses divide by.
        """
        share = 1.0 if self.mean_loss else 1 / num_towers()
        inside = tower_frame(frame, start, lambda denominator, index: average(denominator), share)
        result = run_model_fn(call, inside, batch, differentiate=True, loss_scale=scale, transform=self.transform)
        if num_towers() > 1:
            _check_optimizers(result.spec.train_op)
            check_rows(result.spec, rows // num_towers())
        steps = accumulate_steps(result.spec.train_op)
        if steps == 1:
            return result
        # The run so far tells the structure of the result; the compiled program has nothing of it.
        return MicroBatches(call, inside.fresh(key=start.key), steps, scale, self.mean_loss, self.transform).run(
            batch, like=result, average=average
        )

    def evaluate(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        return Evaluation(self, call, frame, batch, rows).spec()


def _check_optimizers(train_op: TrainOp | None) -> None:
    for update in train_op.updates if train_op else ():
        if not isinstance(update.optimizer, TowerOptimizer):
            raise ValueError(
                "Please wrap optimizers with TowerOptimizer in order to use replicate_model_fn with multiple "
                f"`devices`. Got the plain optimizer {update.optimizer.get_name()!r}; write "
                "`TowerOptimizer(optimizer).minimize(loss)`."
            )
