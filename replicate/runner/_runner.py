"""Runs a model_fn in towers and merges what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from estimator import EstimatorSpec, State, TrainOp
from estimator.replication import Frame, ModelRun, RunResult
from estimator.typing import PyTree
from replicate.runner._base import Runner, tower_frame
from replicate.runner._evaluation import Evaluation
from replicate.runner._micro_batches import MicroBatches, accumulate_steps
from replicate.runner._tower_optimizer import TowerOptimizer
from replicate.towers._collectives import cross_tower_mean
from replicate.towers._map import lone_tower, num_towers, tower_index, tower_map


@dataclasses.dataclass(frozen=True)
class SyncRunner(Runner):
    """Sums the gradients of all towers in every step."""

    def initialize(self, run: ModelRun) -> EstimatorSpec:
        """Creates the variables as one tower with the whole batch would."""
        frame, frames = run.frame, list[Frame]()

        def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            key, initial_values = start
            result = run.on(batch, frame.fresh(key=key, initial_values=initial_values), differentiate=False)
            frames.append(result.frame)
            if len(self.devices) > 1:
                _check_optimizers(result.spec.train_op)
            return (result.spec, result.frame.variables, result.frame.slots), None

        # In one tower: initial values depend on the key only, and all towers start with the same values.
        (spec, variables, slots), _ = lone_tower(tower, self.devices)((frame.key, frame.initial_values), run.batch)
        frame.variables.update(variables)
        frame.slots.update(slots)
        frame.adopt_names(frames[0])
        # The towers take the gradients, not the run around them.
        run.leave({}, {update.slots: {} for update in (spec.train_op or TrainOp()).updates})
        # Which variables are cut is known only after the run that creates them.
        frame.placement = self.placement.with_partitions(frames[0].declared.partitions)
        # Already here, in the program of `init`, so that no device makes the slots of a cut variable whole.
        frame.slots.update(frame.placement.place(frame.slots))
        return spec

    def train(self, run: ModelRun) -> EstimatorSpec:
        scale = 1 / len(self.devices) if self.mean_loss else 1.0
        sums_here = self.placement.is_one_program  # otherwise the gradients are summed where the variables are
        frames: list[Frame] = []

        def tower(start: State, batch: PyTree) -> tuple[PyTree, PyTree]:
            result = self.run_tower(run, start, batch, scale, cross_tower_mean)
            frames.append(result.frame)
            summed, per_part = result.scale(scale).split()
            # Marks are set before the sum, which spreads a NaN of one tower to all.
            marks = self.on_nan.mark(result.gradients, tower_index(), num_towers()) if self.on_nan else {}
            own, others = result.list_gradients(), (summed, marks, result.addends(tower_index(), num_towers()))
            sums, (summed, marks, addends) = self.ops.sum_step(own if sums_here else [], others)
            return (summed, marks, addends.applied_to(start.variables), sums), (per_part, [] if sums_here else own)

        in_towers = tower_map(tower, self.devices)
        (spec, marks, written, sums), (per_part, to_sum) = in_towers(self.start_of(run.frame), run.batch)
        run.frame.adopt_names(frames[-1])
        per_part = self.merge_parts(per_part, len(self.devices))
        train_op, gradients, marks = self.placement.to_update((spec.train_op, sums or to_sum, marks))
        run.leave(written, dict(zip((u.slots for u in train_op.updates), gradients, strict=True)), marks)
        return self.readable(per_part.join(spec)).replace_unchecked(train_op=train_op)

    def run_tower(
        self, run: ModelRun, start: State, batch: PyTree, scale: float, average: Callable[[PyTree], PyTree]
    ) -> RunResult:
        """A tower's own run in TRAIN, in micro-batches if its optimizers ask for them.

        Args:
          run: on the rows of all towers.
          start: the state that the tower starts from.
          batch: the rows of this tower.
          scale: factor on its loss.
          average: takes the average of the denominators that the towers' losses divide by.
        """
        share = 1.0 if self.mean_loss else 1 / num_towers()
        inside = tower_frame(run.frame, start, lambda denominator, index: average(denominator), share)
        result = run.on(batch, inside, differentiate=True, loss_scale=scale, transform=self.transform)
        if num_towers() > 1:
            _check_optimizers(result.spec.train_op)
            result.check_rows(run.rows // num_towers())
        # Known only after a run, since the model_fn creates its optimizers.
        steps = accumulate_steps(result.spec.train_op)
        if steps == 1:
            return result
        # The run so far only gives the structure of the result; it is not a part of the compiled program.
        parts = MicroBatches(self, run, inside.fresh(key=start.key), steps, scale)
        return parts.run_all(batch, like=result, average=average)

    def evaluate(self, run: ModelRun) -> EstimatorSpec:
        return Evaluation(self, run).spec()


def _check_optimizers(train_op: TrainOp | None) -> None:
    for update in train_op.updates if train_op else ():
        if not isinstance(update.optimizer, TowerOptimizer):
            raise ValueError(
                "Please wrap optimizers with TowerOptimizer in order to use replicate_model_fn with multiple "
                f"`devices`. Got the plain optimizer {update.optimizer.get_name()!r}; write "
                "`TowerOptimizer(optimizer).minimize(loss)`."
            )
