"""Towers that train on their own copies of the variables, and meet once per block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from estimator import EstimatorSpec, ModeKeys, TrainOp
from estimator.core._frame import Frame
from estimator.core._record import Report, merge_reports
from estimator.core._state import BLOCK_SYNC_SLOTS as SLOTS
from estimator.core._typing import PyTree
from estimator.optim._apply_updates import applied
from estimator.optim._learning_rate import rates_of
from estimator.optim._loss_scale import select
from estimator.steps._deferred_merge import Deferred
from estimator.steps._gradients import Outcome, run, written
from replicate.block_sync._averaging import BlockAverage, BlockState
from replicate.block_sync._block_sync import BlockSync
from replicate.placement._distribution import Replicated
from replicate.runner._merge import apart, concatenate_rows, merge_metrics
from replicate.runner._runner import Call, SyncRunner, keep_names
from replicate.towers._map import TOWER_AXIS, tower_map


class BlockSyncState(NamedTuple):
    """What towers that train on their own have between two synchronisations, beside the slots of their optimizers.

    Attributes:
      copies: by name, each tower's value of a variable that is trained, or assigned and listed in `sync`: arrays
        `[towers, ...]`. At the start of a block all are the global one.
      own: the same of variables that the model_fn assigns and nobody synchronises.
      outer: the state of the outer optimizer.
      steps: int32 scalar, the number of steps so far.
      since: int32 scalar, the number of steps since the last synchronisation.
    """

    copies: dict[str, PyTree]
    own: dict[str, PyTree]
    outer: PyTree
    steps: jax.Array
    since: jax.Array


class LocalCopies(Replicated):
    """Copies and slots with the towers as their first dimension, cut along it; all else on every device."""

    kind = "local copies"

    def state(self, like: Any) -> Any:
        mirrored, cut = super().state(like), NamedSharding(self._mesh, PartitionSpec(TOWER_AXIS))
        slots: dict[str, Any] = dict.fromkeys(like.slots, cut)
        if SLOTS in slots:
            slots[SLOTS] = BlockSyncState(cut, cut, mirrored, mirrored, mirrored)  # type: ignore[arg-type]
        return like._replace(variables=mirrored, slots=slots, global_step=mirrored, key=mirrored)


@dataclasses.dataclass(frozen=True)
class BlockSyncRunner(SyncRunner):
    """Runs a model_fn in towers that meet once per block; evaluates and predicts as others do.

    Attributes:
      block_sync: what `replicate_model_fn` was told.
    """

    block_sync: BlockSync = dataclasses.field(kw_only=True)

    def initialize(self, call: Call, frame: Frame, batch: PyTree) -> EstimatorSpec:
        spec = super().initialize(call, frame, batch)
        if frame.mode != ModeKeys.TRAIN:
            if frame.slots:
                raise ValueError(
                    f"The model_fn reads the state of the optimizers {sorted(frame.slots)} in mode "
                    f"{str(frame.mode)!r}. With `block_sync` each tower has its own. Read it in training alone, or "
                    "leave out `block_sync`."
                )
            return spec
        if SLOTS in frame.slots:
            raise ValueError(f"An optimizer is named {SLOTS!r}, as is what `BlockSync` keeps in the slots. Rename it.")
        trained = {name: value for name, value in frame.variables.items() if frame.trainable[name]}
        assigned = {name: frame.variables[name] for name in self._assigned(call, frame, batch)}
        unknown = [name for name in self.block_sync.sync if name not in assigned]
        if unknown:
            raise ValueError(
                f"`BlockSync(sync={list(self.block_sync.sync)})` names {unknown}, but what the model_fn assigns in "
                f"training is {sorted(assigned)}. Trainable variables are averaged without being listed."
            )

        def for_each_tower(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (len(self.devices), *x.shape))

        copies, slots = jax.tree.map(for_each_tower, ({**trained, **assigned}, dict(frame.slots)))
        own = {name: copies.pop(name) for name in assigned if name not in self.block_sync.sync}
        with jax.numpy_dtype_promotion("standard"):  # as for optimizers in a model_fn
            outer = self.block_sync.outer_optimizer.init(trained)
        frame.slots.update(slots | {SLOTS: BlockSyncState(copies, own, outer, jnp.int32(0), jnp.int32(0))})
        return spec

    def _assigned(self, call: Call, frame: Frame, batch: PyTree) -> list[str]:
        """The names of the variables that the model_fn writes in a training step, from an abstract run of one."""
        found: list[str] = []

        def tower(start: PyTree, batch: PyTree) -> tuple[None, None]:
            variables, slots, key, global_step = start
            inside = Frame(frame.mode, variables, slots, key, global_step, scope=frame.scope, reuse=frame.reuse)
            outcome, _ = run(call, inside, batch, take_gradients=False)
            found.extend({**outcome.assigned, **outcome.added})
            return None, None

        start = frame.variables, frame.slots, frame.key, frame.global_step
        in_one_tower = tower_map(tower, self.devices[:1])
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            in_one_tower(start, batch)  # whoever turns jit off wants to look at values
        else:
            jax.eval_shape(in_one_tower, start, batch)
        return found

    def train(self, call: Call, frame: Frame, batch: PyTree, rows: int) -> EstimatorSpec:
        block = _checked_block(frame, len(self.devices))
        optimizers = {name: state for name, state in frame.slots.items() if name != SLOTS}
        ran: list[Frame] = []

        def tower(start: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
            local = jax.tree.map(lambda x: x[0], given[0])
            same, after, own = self._local_step(call, frame, start, local, given[1], rows)
            ran.append(after)
            return same, own

        start = frame.variables, block.outer, block.steps, block.since, frame.key, frame.global_step
        local = block.copies, block.own, optimizers
        (bare, moved, outer), own = tower_map(tower, self.devices)(start, (local, batch))
        local, predictions, exports, rates, parts = own
        copies, own, slots = local
        keep_names(frame, ran[-1])
        frame.assigned.update(moved)
        merges: dict[str, Callable[[Any], Any]] = {
            "loss": self._loss,
            "eval_metric_ops": self._metrics,
            "reported": self._reports,
        }
        unmerged = {name: Deferred(parts[name], merge) for name, merge in merges.items()}
        merged = {name: each.merge(each.parts) for name, each in unmerged.items()}
        frame.unmerged = {name: (merged[name], unmerged[name]) for name in merged}
        steps, since = block.steps + 1, block.since + 1
        since = jnp.where(self._ends_block(steps, since), 0, since)
        return dataclasses.replace(
            bare,
            predictions=concatenate_rows(predictions),
            export_outputs=concatenate_rows(exports),
            train_op=TrainOp(
                slots={**slots, SLOTS: BlockSyncState(copies, own, outer, steps, since)},
                learning_rates={name: Deferred(rate, self._rate) for name, rate in rates.items()},
            ),
            **merged,
        )

    def _local_step(
        self, call: Call, frame: Frame, start: PyTree, local: PyTree, batch: PyTree, rows: int
    ) -> tuple[PyTree, Frame, PyTree]:
        """A step of one tower, with the synchronisation that may follow.

        Args:
          start: what all towers have: the global variables, the outer state, the steps so far and since the last
            synchronisation, key and global step.
          local: the tower's copies, other variables of its own, and slots.
          batch: the tower's rows.
          rows: of all towers.

        Returns:
          What is the same in all towers (a bare spec, the new global variables, the outer state), the frame as the run
          left it, and what the tower has of its own (what is in `local`, and what its spec holds).
        """
        variables, outer, steps, since, key, step = start
        copies, own, slots = local
        share_of_loss = 1 / len(self.devices) if self.mean_loss else 1.0
        scale = len(self.devices) * share_of_loss  # a tower goes on as if its rows were the whole batch
        # What was done to the global variables between two blocks, such as a warm start, is what all go on from.
        copies = _instead(since == 0, variables, copies)
        own = _instead(steps == 0, variables, own)

        def run_from(variables: dict[str, PyTree]) -> tuple[Outcome, Frame]:
            start = variables, slots, key, step
            return self.run_tower(call, frame, start, batch, rows, scale, average=_of_this_tower)

        def train_op_at(variables: dict[str, PyTree]) -> TrainOp:
            return apart(run_from(variables)[0].spec, scale)[0].train_op

        before = {**variables, **copies, **own}
        outcome, after = run_from(before)
        assigned = written(outcome, before)
        _check_written(assigned, {**copies, **own}, self.block_sync.sync)
        _check_own(own, [n for n in (*copies, *own) if not after.trainable[n] and n not in self.block_sync.sync])
        spec, (predictions, metrics, exports, reported) = apart(outcome.spec, scale)
        moved, slots = applied(spec.train_op, assigned, before, slots, key, step, train_op_at)
        rates = rates_of(slots)
        warmup = self.block_sync.warmup_steps
        meeting = BlockAverage(
            self.block_sync,
            self.ops,
            after,
            spec.train_op,
            added_only=frozenset(outcome.added) - frozenset(outcome.assigned),
            is_warmup=steps + 1 == warmup if warmup else None,
        )
        changing = [*copies, *own]
        met = BlockState(
            {name: variables[name] for name in changing}, outer, {name: moved[name] for name in changing}, slots
        )
        if self.block_sync.block_steps == 1 and not warmup:
            met = meeting(met)
        else:
            met = jax.lax.cond(self._ends_block(steps + 1, since + 1), meeting, lambda met: met, met)
        copies, own = ({name: met.copies[name] for name in some} for some in (copies, own))
        bare = spec.unchecked(loss=None, train_op=None, eval_metric_ops={})
        parts = {
            "loss": outcome.spec.loss * share_of_loss,
            "eval_metric_ops": {**spec.eval_metric_ops, **metrics},
            "reported": reported,
        }
        return (
            (bare, met.variables, met.outer),
            after,
            ((copies, own, met.slots), predictions, exports, rates, parts),
        )

    def _ends_block(self, steps: jax.Array, since: jax.Array) -> jax.Array:
        """Whether towers meet after so many steps, and so many since they last did.

        A state that comes in mid-block from a model with longer blocks meets at its next step.
        """
        warmup = self.block_sync.warmup_steps
        at_the_end_of_a_block = (steps > warmup) & (since >= self.block_sync.block_steps)
        return at_the_end_of_a_block | (steps == warmup) if warmup else at_the_end_of_a_block

    # What becomes of values with the towers as their first dimension. It is communication, so it happens after the last
    # step of a program.

    def _gathered(self, parts: PyTree) -> PyTree:
        return self.placement.gathered(parts)

    def _loss(self, losses: jax.Array) -> jax.Array:
        return self._gathered(losses).sum(axis=0)

    def _metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return merge_metrics(self._gathered(metrics), len(self.devices))

    def _reports(self, reported: dict[str, Report]) -> dict[str, Report]:
        gathered = self._gathered(reported)
        parts = [jax.tree.map(lambda x, i=i: x[i], gathered) for i in range(len(self.devices))]
        return merge_reports(parts, [1] * len(parts))

    def _rate(self, rates: jax.Array) -> jax.Array:
        """All towers have the same, unless a loss scale has skipped a step of some."""
        return self._gathered(rates)[0]


def _instead(condition: jax.Array, variables: dict[str, PyTree], copies: dict[str, PyTree]) -> dict[str, PyTree]:
    """The variables in the place of their copies, where the condition holds."""
    return {name: select(condition, variables[name], copy) for name, copy in copies.items()}


def _of_this_tower(denominators: PyTree) -> PyTree:
    return denominators


def _checked_block(frame: Frame, towers: int) -> BlockSyncState:
    block: BlockSyncState | None = frame.slots.get(SLOTS)
    if block is None:
        raise ValueError(
            f"The state has no slots {SLOTS!r}, only {sorted(frame.slots)}. Initialize it in mode 'train' by the "
            "model_fn with `block_sync`, or start from the variables of this one (`warm_start_from`)."
        )
    sizes = {len(copy) for copy in jax.tree.leaves((block.copies, block.own))}
    if sizes - {towers}:
        raise ValueError(
            f"The state has the copies of {sizes.pop()} towers, but `replicate_model_fn` was given {towers} devices. "
            "To go on with another number of towers, start from its variables (`warm_start_from`)."
        )
    return block


def _check_written(assigned: dict[str, PyTree], copies: dict[str, PyTree], sync: Sequence[str]) -> None:
    unknown = sorted(assigned.keys() - copies.keys())
    if unknown:
        raise ValueError(
            f"The model_fn assigns to {unknown} in this training step, but did not in the one that the state was "
            "initialized for, so that towers have no copies of them. Assign to the same variables for any batch."
        )
    missing = [name for name in sync if name not in assigned]
    if missing:
        raise ValueError(
            f"The model_fn does not assign to {missing} in this training step, but did in the one that the state was "
            "initialized for, and `BlockSync(sync=...)` names them. Assign to the same variables for any batch."
        )


def _check_own(own: dict[str, PyTree], names: list[str]) -> None:
    if own.keys() != set(names):
        raise ValueError(
            f"Each tower keeps {sorted(names)} for itself, but in the state {sorted(own)}: it was initialized by "
            "another `BlockSync(sync=...)`. Give the same one, or start from its variables (`warm_start_from`)."
        )
