"""The average at the end of a block, as one tower computes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, keystr

from estimator import State, TrainOp, VariableAggregation
from estimator.replication import RunResult, update_if
from estimator.typing import PyTree, Slots, Variables
from replicate.block_sync._block_sync import BlockSync
from replicate.cross_tower_ops import CrossTowerOps
from replicate.towers._map import num_towers, tower_index

SLOTS = "block_sync"
"""The entry of `State.slots` that is not an optimizer's."""


class BlockSyncState(NamedTuple):
    """The state of towers that train on their own between two synchronizations, beside their optimizers' slots.

    While they train, `State.variables` are the tower's own, and the values here, of the same names, the global ones.

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


class _Averaged(NamedTuple):
    """What an average over towers changes.

    Attributes:
      variables: the global ones that change within a block, by name.
      outer: the state of the outer optimizer.
      copies: this tower's values of the same variables.
      slots: this tower's own.
    """

    variables: Variables
    outer: PyTree
    copies: Variables
    slots: Slots


# Compared and hashed by identity: it is in the structure of a train_op, and the fields have dicts, which have no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class EndOfStep:
    """Averages the towers' copies after a step that ends a block, and moves the global variables; a `TrainOp.after`.

    Attributes:
      block_sync: how it is done.
      ops: takes the sum over towers.
      result: of the step.
    """

    block_sync: BlockSync
    ops: CrossTowerOps
    result: RunResult

    def __call__(self, state: State) -> State:
        block: BlockSyncState = state.slots[SLOTS]
        whole = {**block.copies, **block.own}
        slots = {name: own for name, own in state.slots.items() if name != SLOTS}
        copies = {name: state.variables[name] for name in whole}
        steps, since = block.steps + 1, block.since + 1
        ends = self.block_sync.ends_block(steps, since)
        warmup = self.block_sync.warmup_steps
        average = functools.partial(self._average, steps == warmup if warmup else None)
        after = _Averaged(whole, block.outer, copies, slots)
        # If each step ends a block, no branch is needed, nor the copies that a branch makes.
        if self.block_sync.block_steps == 1 and not warmup:
            after = average(after)
        else:
            after = jax.lax.cond(ends, average, lambda same: same, after)
        old = {**state.variables, **whole}
        moved: Variables = {}
        for move in _train_op(self.result).moves:
            moved |= move.apply(old, {**old, **after.variables})
        copies, own = ({name: after.variables[name] for name in some} for some in block[:2])
        now = BlockSyncState(copies, own, after.outer, steps, jnp.where(ends, 0, since))
        return state._replace(variables={**state.variables, **moved, **after.copies}, slots={**after.slots, SLOTS: now})

    def _average(self, is_warmup: jax.Array | None, before: _Averaged) -> _Averaged:
        addends = {
            name: self._addend(name, copy, before.variables[name], is_warmup)
            for name, copy in sorted(before.copies.items())
        }
        slots, structure = jax.tree.flatten(before.slots)
        averaged = averaged_slots(self.block_sync, before.slots, self.result.frame.declared.trainable)
        _, (sums, means) = self.ops.sum_step([], (addends, {i: slots[i] / num_towers() for i in averaged}))
        trained = [name for name in sums if self.result.frame.declared.trainable[name]]
        moved, outer = self._outer_step(before, {name: sums[name] for name in trained}, is_warmup)
        added = {n: jax.tree.map(jnp.add, before.variables[n], sums[n]) for n in sums if self._is_added(n)}
        variables = {**sums, **added, **moved}
        stays = {n: copy for n, copy in before.copies.items() if n not in trained and n not in self.block_sync.sync}
        copies = {**variables, **stays}
        new = jax.tree.unflatten(structure, [means.get(i, slot) for i, slot in enumerate(slots)])
        if self.block_sync.reset_slots:
            new = self.result.with_new_slots(new, copies)
        if averaged or self.block_sync.reset_slots:
            # After the warm-up, which is the end of no block, a tower's momenta continue, as in Caffe2.
            new = _choose(is_warmup, before.slots, new)
        return _Averaged(variables, outer, copies, new)

    def _is_added(self, name: str) -> bool:
        """Returns whether what all towers add to a variable, which they do not assign, is added to the global one."""
        writes = self.result.writes
        return name in self.block_sync.sync and name in writes.added and name not in writes.assigned

    def _addend(self, name: str, copy: PyTree, old: PyTree, is_warmup: jax.Array | None) -> PyTree:
        """This tower's addend to the sum for a variable."""
        place = tower_index(), num_towers()
        first = VariableAggregation.ONLY_FIRST_TOWER.addend(name, copy, *place)
        if self.result.frame.declared.trainable[name]:
            # The outer optimizer uses the difference from the global value as a gradient: the sum over towers is the
            # mean difference.
            differences = jax.tree.map(lambda x, y: (x - y) / num_towers(), old, copy)
            return _choose(is_warmup, first, differences)
        if self._is_added(name):
            return jax.tree.map(jnp.subtract, copy, old)
        if name in self.block_sync.sync:
            return self.result.frame.declared.aggregation[name].addend(name, copy, *place)
        return first

    def _changes(self, name: str) -> bool:
        """Returns whether a step may change a trained variable: one that no loss depends on stays as it is."""
        result = self.result
        has_gradient = any(name in gradients for gradients in result.gradients.by_slots.values())
        return has_gradient or name in result.writes.names or bool(_train_op(result).moves)

    def _outer_step(self, before: _Averaged, sums: Variables, is_warmup: jax.Array | None) -> tuple[Variables, PyTree]:
        """The trained global variables after it, and the state of the outer optimizer."""
        old = {name: before.variables[name] for name in sums}

        def update(start: tuple[Variables, PyTree]) -> tuple[PyTree, PyTree]:
            updates, outer = self.block_sync.outer_optimizer.update(sums, start[1], start[0])
            return optax.apply_updates(start[0], updates), outer

        with jax.numpy_dtype_promotion("standard"):  # as for optimizers in a model_fn
            moved, outer = update_if(None, update, (old, before.outer))
        moved = {name: value if self._changes(name) else old[name] for name, value in moved.items()}
        return _choose(is_warmup, (sums, before.outer), (moved, outer))


def _train_op(result: RunResult) -> TrainOp:
    return result.spec.train_op or TrainOp()


def _choose(is_warmup: jax.Array | None, one: PyTree, other: PyTree) -> PyTree:
    return other if is_warmup is None else optax.tree.where(is_warmup, one, other)


def averaged_slots(block_sync: BlockSync, slots: Slots, variables: Collection[str]) -> list[int]:
    """The positions, in `jax.tree.leaves(slots)`, of the slots that are averaged.

    Args:
      variables: the names of all of the model's.
    """
    names = [name for name in block_sync.sync if name not in variables]

    def is_averaged(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        name = keystr(path, simple=True, separator="/")
        is_named = any(f"{name}/".startswith(f"{each}/") for each in names)
        is_of_variable = any(isinstance(key, DictKey) and key.key in variables for key in path[1:])
        is_asked_for = is_named or (block_sync.sync_slots is not None and is_of_variable)
        return is_asked_for and jnp.issubdtype(leaf.dtype, jnp.inexact)

    leaves, _ = jax.tree_util.tree_flatten_with_path(slots)
    return [i for i, (path, leaf) in enumerate(leaves) if is_averaged(path, leaf)]
