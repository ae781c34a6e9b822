"""Towers that train on their own copies of the variables, and are averaged once per block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from estimator import EstimatorSpec, ModeKeys, State, TrainOp
from estimator.replication import Deferred, Frame, ModelRun, PerPart, RunResult, update_if
from estimator.typing import PyTree, Slots, Variables
from replicate.block_sync._averaging import BlockAverage, BlockState
from replicate.block_sync._block_sync import BlockSync
from replicate.placement._mirrored import MirroredPlacement
from replicate.runner._runner import SyncRunner
from replicate.towers._map import TOWER_AXIS, tower_map

SLOTS = "block_sync"
"""The entry of `State.slots` that is not an optimizer's."""


class BlockSyncState(NamedTuple):
    """The state of towers that train on their own between two synchronizations, beside their optimizers' slots.

    Attributes:
      copies: by name, each tower's value of a variable that is trained, or assigned and listed in `sync`: arrays
        `[towers, ...]`. At the start of a block all are the global one.
      own: the same of variables that the model_fn assigns and nobody synchronises.
      outer: the state of the outer optimizer.
      steps: int32 scalar, the number of steps so far.
      since: int32 scalar, the number of steps since the last synchronisation.
    """

    copies: Variables
    own: Variables
    outer: PyTree
    steps: jax.Array
    since: jax.Array


class _Local(NamedTuple):
    """The state of one tower; `copies` and `own` as in `BlockSyncState`.

    Attributes:
      slots: of its optimizers.
    """

    copies: Variables
    own: Variables
    slots: Slots


class _LocalStep(NamedTuple):
    """The result of a tower's step.

    Attributes:
      bare: the spec without what is merged later or by its rows.
      variables: the global ones that may have changed.
      outer: the state of the outer optimizer.
      local: for the next step.
      of_rows: what is concatenated: predictions and export outputs of the tower's rows.
      merged_later: by field of the spec, this tower's part of what is merged after the last step of a program.
    """

    bare: EstimatorSpec
    variables: Variables
    outer: PyTree
    local: _Local
    of_rows: PerPart
    merged_later: dict[str, PyTree]


class LocalCopies(MirroredPlacement):
    """Copies and slots with the towers as their first dimension, cut along it; all else on every device."""

    kind = "local copies"

    def state(self, like: Any) -> Any:
        mirrored, cut = super().state(like), NamedSharding(self._mesh, PartitionSpec(TOWER_AXIS))
        slots: Slots = dict.fromkeys(like.slots, cut)
        if SLOTS in slots:
            slots[SLOTS] = BlockSyncState(cut, cut, mirrored, mirrored, mirrored)  # type: ignore[arg-type]
        return like._replace(variables=mirrored, slots=slots, global_step=mirrored, key=mirrored)


@dataclasses.dataclass(frozen=True)
class BlockSyncRunner(SyncRunner):
    """Runs a model_fn in towers that are averaged once per block; evaluates and predicts as `SyncRunner` does.

    Attributes:
      block_sync: the argument of `replicate_model_fn`.
    """

    block_sync: BlockSync = dataclasses.field(kw_only=True)

    def initialize(self, run: ModelRun) -> EstimatorSpec:
        # Default names are counted from here again in the abstract run below.
        before = run.frame.fresh()
        spec, frame = super().initialize(run), run.frame
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
        trained = {name: value for name, value in frame.variables.items() if frame.declared.trainable[name]}
        assigned = {name: frame.variables[name] for name in self._names_written(run, before)}
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

    def _names_written(self, run: ModelRun, before: Frame) -> list[str]:
        """The names of the variables that the model_fn writes in a training step, from an abstract run of one.

        Args:
          before: the frame before any run, in which no default name is taken.
        """
        names: list[str] = []

        def tower(start: State, batch: PyTree) -> tuple[None, None]:
            inside = before.fresh(**start._asdict(), initializing=False)
            names.extend(run.on(batch, inside, differentiate=False).writes.names)
            return None, None

        in_one_tower = tower_map(tower, self.devices[:1])
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            in_one_tower(self.start_of(run.frame), run.batch)  # whoever turns jit off wants to look at values
        else:
            jax.eval_shape(in_one_tower, self.start_of(run.frame), run.batch)
        return names

    def train(self, run: ModelRun) -> EstimatorSpec:
        frame = run.frame
        block = _checked_block(frame, len(self.devices))
        optimizers = {name: state for name, state in frame.slots.items() if name != SLOTS}
        frames: list[Frame] = []

        def tower(shared: tuple[State, BlockSyncState], given: tuple[_Local, PyTree]) -> tuple[PyTree, PyTree]:
            # Split as a batch is, what a tower has of its own comes as one row.
            local = jax.tree.map(lambda x: x[0], given[0])
            step, after = self._local_step(run, *shared, local, given[1])
            frames.append(after)
            return (step.bare, step.variables, step.outer), (step.local, step.of_rows, step.merged_later)

        shared = self.start_of(frame)._replace(slots={}), block._replace(copies={}, own={})
        local = _Local(block.copies, block.own, optimizers)
        (bare, variables, outer), of_towers = tower_map(tower, self.devices)(shared, (local, run.batch))
        local, of_rows, merged_later = of_towers
        frame.adopt_names(frames[-1])
        run.leave(variables, {})
        merges: dict[str, Callable[[Any], Any]] = {
            "loss": self._loss,
            "eval_metric_ops": self._metrics,
            "reported": self._reports,
        }
        deferred = {name: Deferred(merged_later[name], merge) for name, merge in merges.items()}
        merged = {name: each.merge(each.parts) for name, each in deferred.items()}
        frame.deferred = {name: (merged[name], deferred[name]) for name in merged}
        steps, since = block.steps + 1, block.since + 1
        since = jnp.where(self._ends_block(steps, since), 0, since)
        slots = {**local.slots, SLOTS: BlockSyncState(local.copies, local.own, outer, steps, since)}
        train_op = dataclasses.replace(bare.train_op or TrainOp(), slots=slots)
        rows = of_rows.merge(len(self.devices))
        return dataclasses.replace(
            bare, predictions=rows.predictions, export_outputs=rows.export_outputs, train_op=train_op, **merged
        )

    def _local_step(
        self, run: ModelRun, state: State, block: BlockSyncState, local: _Local, batch: PyTree
    ) -> tuple[_LocalStep, Frame]:
        """A step of one tower, with the average that may follow.

        Args:
          run: on the rows of all towers.
          state, block: what all towers have in common: without slots, and without copies and variables of their own.
          batch: the tower's rows.

        Returns:
          What the step leaves, and the frame as the run left it.
        """
        share_of_loss = 1 / len(self.devices) if self.mean_loss else 1.0
        scale = len(self.devices) * share_of_loss  # a tower trains as if its rows were the whole batch
        # What was done to the global variables between two blocks, such as a warm start, is where all continue from.
        copies = _replaced_where(block.since == 0, state.variables, local.copies)
        own = _replaced_where(block.steps == 0, state.variables, local.own)
        start = state._replace(variables={**state.variables, **copies, **own}, slots=local.slots)

        def run_from(variables: Variables) -> RunResult:
            at = start._replace(variables=variables)
            return self.run_tower(run, at, batch, scale, average=lambda of_this_tower: of_this_tower)

        def trained_from(variables: Variables) -> RunResult:
            return run_from(variables).scale(scale)

        result = run_from(start.variables)
        _check_written(result.writes.names, {**copies, **own}, self.block_sync.sync)
        trainable = result.frame.declared.trainable
        _check_own(own, [n for n in (*copies, *own) if not trainable[n] and n not in self.block_sync.sync])
        moved, slots = result.scale(scale).apply_updates(start, at=trained_from)
        warmup = self.block_sync.warmup_steps
        is_warmup = block.steps + 1 == warmup if warmup else None
        average = BlockAverage(self.block_sync, self.ops, result, is_warmup)
        changing = [*copies, *own]
        after = BlockState(
            {name: state.variables[name] for name in changing},
            block.outer,
            {name: moved[name] for name in changing},
            slots,
        )
        # Each step ends a block, so that no branch is needed, nor the copies that a branch makes.
        if self.block_sync.block_steps == 1 and not warmup:
            after = average(after)
        else:
            after = jax.lax.cond(self._ends_block(block.steps + 1, block.since + 1), average, lambda same: same, after)
        copies, own = ({name: after.copies[name] for name in some} for some in (copies, own))
        spec = result.scale(share_of_loss).spec
        step = _LocalStep(
            bare=spec.replace_unchecked(
                predictions=None,
                loss=None,
                train_op=TrainOp(moves=(spec.train_op or TrainOp()).moves),
                eval_metric_ops={},
                export_outputs=None,
                reported={},
            ),
            variables=after.variables,
            outer=after.outer,
            local=_Local(copies, own, after.slots),
            of_rows=PerPart(predictions=spec.predictions, export_outputs=spec.export_outputs),
            merged_later={"loss": spec.loss, "eval_metric_ops": spec.eval_metric_ops, "reported": spec.reported},
        )
        return step, result.frame

    def _ends_block(self, steps: jax.Array, since: jax.Array) -> jax.Array:
        """Returns whether towers are averaged after `steps` steps, `since` of them since the last average.

        A state that comes in mid-block from a model with longer blocks is averaged at its next step.
        """
        warmup = self.block_sync.warmup_steps
        at_the_end_of_a_block = (steps > warmup) & (since >= self.block_sync.block_steps)
        return at_the_end_of_a_block | (steps == warmup) if warmup else at_the_end_of_a_block

    # What becomes of values with the towers as their first dimension. It is communication, so it happens after the last
    # step of a program.

    def _gather(self, parts: PyTree) -> PyTree:
        return self.placement.gather(parts)

    def _loss(self, losses: jax.Array) -> jax.Array:
        return self._gather(losses).sum(axis=0)

    def _metrics(self, metrics: PyTree) -> PyTree:
        return PerPart(metrics=self._gather(metrics)).merge(len(self.devices)).metrics

    def _reports(self, reported: PyTree) -> PyTree:
        return PerPart(reported=self._gather(reported)).merge(len(self.devices)).reported


def _replaced_where(condition: jax.Array, variables: Variables, copies: Variables) -> Variables:
    """The variables instead of their copies, where the condition holds."""
    return update_if(condition, lambda copies: {name: variables[name] for name in copies}, copies)


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
            "To continue with another number of towers, start from its variables (`warm_start_from`)."
        )
    return block


def _check_written(assigned: Sequence[str], copies: Variables, sync: Sequence[str]) -> None:
    unknown = sorted(set(assigned) - copies.keys())
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


def _check_own(own: Variables, names: list[str]) -> None:
    if own.keys() != set(names):
        raise ValueError(
            f"Each tower keeps {sorted(names)} for itself, but in the state {sorted(own)}: it was initialized by "
            "another `BlockSync(sync=...)`. Give the same one, or start from its variables (`warm_start_from`)."
        )
