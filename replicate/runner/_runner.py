"""Runs a model_fn in towers and merges what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from absl import logging

from estimator import EstimatorSpec, ModeKeys, Reduction, State, TrainOp
from estimator.replication import ModelRun, RunResult, reductions
from estimator.typing import PyTree
from replicate.runner._base import Runner, tower_frame
from replicate.runner._evaluation import Evaluation
from replicate.runner._micro_batches import MicroBatches, accumulate_steps
from replicate.towers._collectives import cross_tower_mean
from replicate.towers._map import lone_tower, num_towers, tower_index, tower_map


@dataclasses.dataclass(frozen=True)
class SyncRunner(Runner):
    """Sums the gradients of all towers in every step."""

    def initialize(self, run: ModelRun) -> EstimatorSpec:
        """Creates the variables as one tower with the whole batch would."""
        frame = run.frame
        declared = [frame.declared]  # then the tower's

        def tower(start: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            key, initial_values = start
            result = run.on(batch, frame.fresh(key=key, initial_values=initial_values), differentiate=False)
            declared.append(result.frame.declared)
            if len(self.devices) > 1:
                _check_optimizers(result.spec.train_op)
                self._compare_reductions(result)
            return (result.spec, result.frame.variables, result.frame.slots), None

        # In one tower: initial values depend on the key only, and all towers start with the same values.
        (spec, variables, slots), _ = lone_tower(tower, self.devices)((frame.key, frame.initial_values), run.batch)
        frame.variables.update(variables)
        frame.slots.update(slots)
        frame.adopt_names(declared[-1])
        # The towers take the gradients, not the run around them.
        run.leave({}, {update.slots: {} for update in (spec.train_op or TrainOp()).updates})
        # Which variables are cut is known only after the run that creates them.
        frame.placement = self.placement.with_partitions(declared[-1].partitions)
        # Already here, in the program of `init`, so that no device makes the slots of a cut variable whole.
        frame.slots.update(frame.placement.place(frame.slots))
        return spec

    def train(self, run: ModelRun) -> EstimatorSpec:
        scale = 1 / len(self.devices) if self.mean_loss else 1.0
        sums_here = self.placement.is_one_program  # otherwise the gradients are summed where the variables are
        # Then the towers', but not their frames: those hold values of the towers.
        declared = [run.frame.declared]

        def tower(start: State, batch: PyTree) -> tuple[PyTree, PyTree]:
            result = self.run_tower(run, start, batch, scale, cross_tower_mean)
            declared.append(result.frame.declared)
            summed, per_part = result.scale(scale).split()
            # Marks are set before the sum, which spreads a NaN of one tower to all.
            marks = self.on_nan.mark(result.gradients, tower_index(), num_towers()) if self.on_nan else {}
            own, others = result.list_gradients(), (summed, marks, result.addends(tower_index(), num_towers()))
            sums, (summed, marks, addends) = self.ops.sum_step(own if sums_here else [], others)
            return (summed, marks, addends.applied_to(start.variables), sums), (per_part, [] if sums_here else own)

        in_towers = tower_map(tower, self.devices)
        (spec, marks, written, sums), (per_part, to_sum) = in_towers(self.start_of(run.frame), run.batch)
        run.frame.adopt_names(declared[-1])
        per_part = self.merge_parts(per_part, len(self.devices))
        train_op, gradients, marks = self.placement.to_update((spec.train_op, sums or to_sum, marks))
        run.leave(written, dict(zip((u.slots for u in train_op.updates), gradients, strict=True)), marks)
        return self.readable(per_part.join(spec)).replace_unchecked(train_op=train_op)

    def _compare_reductions(self, result: RunResult) -> None:
        known = [reduction for loss, reduction in reductions(result.frame) if loss is result.spec.loss]
        if known and result.spec.mode == ModeKeys.TRAIN and self.mean_loss == (known[0] == Reduction.SUM):
            logging.warning(
                "The model_fn's loss has Reduction.%s, but the loss_reduction of the towers is %s: they do not compute "
                "the numbers of one big batch. Write `replicate_model_fn(model_fn, est.Reduction.%s)`.",
                *(Reduction(known[0]).name, "a mean" if self.mean_loss else "SUM", Reduction(known[0]).name),
            )

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
        if not update.optimizer.sums_over_towers:
            raise ValueError(
                "Please wrap optimizers with TowerOptimizer in order to use replicate_model_fn with multiple "
                f"`devices`. Got the plain optimizer {update.optimizer.get_name()!r}; write "
                "`TowerOptimizer(optimizer).minimize(loss)`."
            )
