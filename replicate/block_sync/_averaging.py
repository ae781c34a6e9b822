"""The average at the end of a block, as one tower computes it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator import VariableAggregation
from estimator.replication import RunResult
from estimator.typing import PyTree, Slots, Variables
from replicate.block_sync._block_sync import BlockSync
from replicate.cross_tower_ops import CrossTowerOps
from replicate.towers._map import num_towers, tower_index


class BlockState(NamedTuple):
    """The state that an average over towers changes.

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


# Compared and hashed by identity: `lax.cond` hashes its branches, and the fields have dicts, which have no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class BlockAverage:
    """Averages the towers' copies and moves the global variables; to be called in a tower.

    Attributes:
      block_sync: how it is done.
      ops: takes the sum over towers.
      result: of the step before.
      is_warmup: bool scalar, whether this is the end of the warm-up; None: there is none.
    """

    block_sync: BlockSync
    ops: CrossTowerOps
    result: RunResult
    is_warmup: jax.Array | None

    def __call__(self, before: BlockState) -> BlockState:
        addends = {
            name: self._addend(name, copy, before.variables[name]) for name, copy in sorted(before.copies.items())
        }
        _, sums = self.ops.sum_step([], addends)
        trained = [name for name in sums if self.result.frame.declared.trainable[name]]
        moved, outer = self._outer_step(before, {name: sums[name] for name in trained})
        added = {n: jax.tree.map(jnp.add, before.variables[n], sums[n]) for n in sums if self._is_added(n)}
        variables = {**sums, **added, **moved}
        stays = {n: copy for n, copy in before.copies.items() if n not in trained and n not in self.block_sync.sync}
        copies = {**variables, **stays}
        slots = before.slots
        if self.block_sync.reset_slots:
            slots = self.result.with_new_slots(slots, copies)
        return BlockState(variables, outer, copies, slots)

    def _is_added(self, name: str) -> bool:
        """Returns whether what all towers add to a variable, which they do not assign, is added to the global one."""
        writes = self.result.writes
        return name in self.block_sync.sync and name in writes.added and name not in writes.assigned

    def _addend(self, name: str, copy: PyTree, old: PyTree) -> PyTree:
        """This tower's addend to the sum for a variable."""
        place = tower_index(), num_towers()
        first = VariableAggregation.ONLY_FIRST_TOWER.addend(name, copy, *place)
        if self.result.frame.declared.trainable[name]:
            # The outer optimizer uses the difference from the global value as a gradient: the sum over towers is the
            # mean difference.
            differences = jax.tree.map(lambda x, y: (x - y) / num_towers(), old, copy)
            return self._if_warmup(first, differences)
        if self._is_added(name):
            return jax.tree.map(jnp.subtract, copy, old)
        if name in self.block_sync.sync:
            return self.result.frame.declared.aggregation[name].addend(name, copy, *place)
        return first

    def _outer_step(self, before: BlockState, sums: Variables) -> tuple[PyTree, PyTree]:
        """The trained global variables after it, and the state of the outer optimizer."""
        old = {name: before.variables[name] for name in sums}
        with jax.numpy_dtype_promotion("standard"):  # as for optimizers in a model_fn
            updates, outer = self.block_sync.outer_optimizer.update(sums, before.outer, old)
            moved = optax.apply_updates(old, updates)
            outer = _of_dtypes(before.outer, outer)
        return self._if_warmup((sums, before.outer), (moved, outer))

    def _if_warmup(self, one: PyTree, other: PyTree) -> PyTree:
        return other if self.is_warmup is None else optax.tree.where(self.is_warmup, one, other)


def _of_dtypes(like: PyTree, tree: PyTree) -> PyTree:
    """An optimizer may compute a state of other dtypes than the one it starts with, which no loop could carry."""
    return jax.tree.map(lambda x, y: y if y.dtype == x.dtype else y.astype(x.dtype), like, tree)
