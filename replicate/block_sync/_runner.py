"""Towers that train on their own copies of the variables, and are averaged once per block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from estimator import EstimatorSpec, Hook, ModeKeys, State, TrainOp
from estimator.replication import Frame, ModelRun, PerPart, update_if
from estimator.typing import Features, Labels, PyTree, Slots, Steps, Variables
from replicate.block_sync._averaging import SLOTS, BlockSyncState, EndOfStep, averaged_slots
from replicate.block_sync._block_sync import BlockSync
from replicate.placement._mirrored import MirroredPlacement
from replicate.runner._runner import SyncRunner
from replicate.towers._map import TOWER_AXIS, in_towers, map_own, num_towers, tower_map
from replicate.towers._split_batch import split_rows


class UnfinishedBlockHook(Hook):
    """Logs at the end of training how many of its steps are in no average yet."""

    def next_step(self, step: int) -> None:
        return None

    def end(self, context: Any) -> None:
        if context.error is None and jax.process_index() == 0:
            since = int(context.state.slots[SLOTS].since)
            if since:
                logging.warning(
                    "%d step%s of the current block %s not averaged yet: evaluation, prediction and export use the "
                    "variables from before them. Further training continues within the block.",
                    *((since, "s", "are") if since > 1 else (1, "", "is")),
                )


class LocalCopies(MirroredPlacement):
    """Copies and slots with the towers as their first dimension, cut along it; all else on every device.

    Args:
      towers: the device of each.
      block_sync, mean_loss: as in `BlockSyncRunner`.
    """

    def __init__(self, towers: Sequence[jax.Device], block_sync: BlockSync, mean_loss: bool) -> None:
        super().__init__(tuple(dict.fromkeys(towers)))
        self.towers_per_process *= len(towers) // len(self.devices)
        self._towers = towers
        self._mean_loss = mean_loss
        steps = block_sync.block_steps
        self.homes = "averaged after blocks of " + ("steps" if callable(steps) else f"{steps} step" + "s" * (steps > 1))

    def describe(self) -> str:
        return (
            "Each tower's optimizers run on its own gradients and change its own copy of the variables: after the last "
            "step of a block the copies are averaged, and the outer optimizer moves the variables."
        )

    def state(self, like: Any) -> Any:
        mirrored, cut = super().state(like), NamedSharding(self._mesh, PartitionSpec(TOWER_AXIS))
        slots: Slots = dict.fromkeys(like.slots, cut)
        if SLOTS in slots:
            slots[SLOTS] = BlockSyncState(cut, cut, mirrored, mirrored, mirrored)  # type: ignore[arg-type]
        return like._replace(variables=mirrored, slots=slots, global_step=mirrored, key=mirrored)

    def batch(self, rows: int) -> jax.sharding.Sharding | None:
        return None if in_towers() else super().batch(rows)

    def map_steps(self, steps: Steps, stacked: bool = False) -> Steps:
        def tower(shared: tuple[State, BlockSyncState, PyTree], given: PyTree) -> tuple[PyTree, PyTree]:
            state, block, bounds = shared
            copies, own, slots, batch = given
            # What was done to the global variables between two blocks, such as a warm start, is where all continue.
            copies = _replaced_where(block.since == 0, state.variables, copies)
            own = _replaced_where(block.steps == 0, state.variables, own)
            block = block._replace(copies=_select(state.variables, copies), own=_select(state.variables, own))
            start = state._replace(variables={**state.variables, **copies, **own}, slots={**slots, SLOTS: block})
            after, specs = steps(start, *batch, *bounds)
            block = after.slots[SLOTS]
            variables = {**after.variables, **block.copies, **block.own}
            copies, own = _select(after.variables, copies), _select(after.variables, own)
            rest = block._replace(copies={}, own={})
            return (variables, rest, after.global_step), (copies, own, _select(after.slots, slots), specs)

        def call(state: State, features: Features, labels: Labels, *bounds: Any) -> tuple[State, PyTree]:
            block = _checked_block(state, len(self._towers))
            slots = {name: own for name, own in state.slots.items() if name != SLOTS}
            batch = split_rows((features, labels), len(self._towers), stacked)
            shared = state._replace(slots={}), block._replace(copies={}, own={}), bounds
            given = block.copies, block.own, slots, batch
            (variables, block, step), (copies, own, slots, specs) = map_own(tower, self._towers)(shared, given)
            merged = jax.tree.map(self._merge_each, specs, is_leaf=lambda node: isinstance(node, EstimatorSpec))
            slots[SLOTS] = block._replace(copies=copies, own=own)
            return State(variables, slots, step, state.key), merged

        return call

    # What becomes of values with the towers as their first dimension. It is communication, so it happens after the last
    # step of a program.

    def _merge_each(self, spec: EstimatorSpec) -> EstimatorSpec:
        """Merges the spec of a step, or the stacked specs of several."""
        assert spec.loss is not None  # in training there is one
        return self._merge(spec) if spec.loss.ndim == 1 else jax.vmap(self._merge, in_axes=1)(spec)

    def _merge(self, spec: EstimatorSpec) -> EstimatorSpec:
        whole = self.gather(spec.replace_unchecked(predictions=None, export_outputs=None))
        parts = PerPart(spec.predictions, whole.eval_metric_ops, spec.export_outputs, whole.reported)
        loss = jax.tree.map(lambda x: x.mean(0) if self._mean_loss else x.sum(0), whole.loss)
        report = jax.tree.map(lambda x: x[0], whole.train_op)
        return parts.merge(len(self._towers)).join(whole.replace_unchecked(loss=loss, train_op=report))


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
        self._check_sync(frame, assigned)

        def for_each_tower(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (len(self.devices), *x.shape))

        copies, slots = jax.tree.map(for_each_tower, ({**trained, **assigned}, dict(frame.slots)))
        own = {name: copies.pop(name) for name in assigned if name not in self.block_sync.sync}
        with jax.numpy_dtype_promotion("standard"):  # as for optimizers in a model_fn
            outer = self.block_sync.outer_optimizer.init(trained)
        frame.slots.update(slots | {SLOTS: BlockSyncState(copies, own, outer, jnp.int32(0), jnp.int32(0))})
        return dataclasses.replace(spec, training_hooks=(*spec.training_hooks, UnfinishedBlockHook()))

    def _check_sync(self, frame: Frame, assigned: Variables) -> None:
        def is_slot(name: str) -> bool:
            alone = dataclasses.replace(self.block_sync, sync=(name,), sync_slots=None)
            return bool(averaged_slots(alone, dict(frame.slots), frame.variables))

        slots = [name for name in self.block_sync.sync if is_slot(name)]
        unknown = [name for name in self.block_sync.sync if name not in assigned and name not in slots]
        if unknown:
            raise ValueError(
                f"`BlockSync(sync={list(self.block_sync.sync)})` names {unknown}, but what the model_fn assigns in "
                f"training is {sorted(assigned)}, and no floats in the slots of {sorted(frame.slots)} have such a "
                "name. Trainable variables are averaged without being listed."
            )
        if slots and self.block_sync.reset_slots:
            raise ValueError(
                f"`BlockSync(sync={list(self.block_sync.sync)}, reset_slots=True)` averages the slots {slots}, and "
                "initializes them again at the same moment. Leave out one of them."
            )

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
        """A step of the tower that this runs in, within `LocalCopies.map_steps`."""
        frame = run.frame
        block: BlockSyncState = frame.slots[SLOTS]
        # A tower trains as if its rows were the whole batch.
        scale = 1.0 if self.mean_loss else float(num_towers())
        run = dataclasses.replace(run, rows=run.rows * num_towers())
        result = self.run_tower(run, self.start_of(frame), run.batch, scale, lambda of_this_tower: of_this_tower)
        frame.adopt_names(result.frame.declared)
        trainable = result.frame.declared.trainable
        whole = {**block.copies, **block.own}
        _check_written(result.writes.names, whole, self.block_sync.sync)
        _check_own(block.own, [n for n in whole if not trainable[n] and n not in self.block_sync.sync])
        run.leave(result.writes.applied_to(frame.variables), result.gradients.by_slots)
        updates = (result.scale(scale).spec.train_op or TrainOp()).updates
        end = EndOfStep(self.block_sync, self.ops, result)
        return result.spec.replace_unchecked(train_op=TrainOp(updates, after=(end,)))


def _select(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _replaced_where(condition: jax.Array, variables: Variables, copies: Variables) -> Variables:
    """The variables instead of their copies, where the condition holds."""
    return update_if(condition, lambda copies: _select(variables, copies), copies)


def _checked_block(state: State, towers: int) -> BlockSyncState:
    block: BlockSyncState | None = state.slots.get(SLOTS)
    if block is None:
        raise ValueError(
            f"The state has no slots {SLOTS!r}, only {sorted(state.slots)}. Initialize it in mode 'train' by the "
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
    missing = [name for name in sync if name in copies and name not in assigned]
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
