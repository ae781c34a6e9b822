"""The synchronisation at the end of a block, as one tower takes part in it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator import TrainOp, VariableAggregation
from estimator.core._frame import Frame, open_frame
from estimator.core._train_op import Update
from estimator.core._typing import PyTree
from estimator.optim._loss_scale import LossScaleState, select
from estimator.optim._optimizer import is_per_variable
from replicate.block_sync._block_sync import BlockSync
from replicate.cross_tower_ops import CrossTowerOps
from replicate.runner._merge import share, total
from replicate.towers._map import num_towers, tower_index


class BlockState(NamedTuple):
    """What a synchronisation changes.

    Attributes:
      variables: the global ones that change within a block, by name.
      outer: the state of the outer optimizer.
      copies: this tower's values of the same variables.
      slots: this tower's own.
    """

    variables: dict[str, PyTree]
    outer: PyTree
    copies: dict[str, PyTree]
    slots: dict[str, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class BlockAverage:
    """A synchronisation; to be called on what is there before it, in a tower.

    Attributes:
      block_sync: how it is done.
      ops: takes the sum over towers.
      frame: as the step left it: for the traits of the variables, and for optimizers that ask for the step.
      train_op: of the step before.
      added_only: the names of the variables that the model_fn adds to without assigning them.
      is_warmup: bool scalar, whether this is the end of the warm-up; None: there is none.
    """

    block_sync: BlockSync
    ops: CrossTowerOps
    frame: Frame
    train_op: TrainOp
    added_only: frozenset[str]
    is_warmup: jax.Array | None

    def __call__(self, before: BlockState) -> BlockState:
        addends = {
            name: self._addend(name, copy, before.variables[name]) for name, copy in sorted(before.copies.items())
        }
        _, sums = total([], addends, self.ops)
        # A sum of booleans is an integer.
        sums = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, before.variables)
        trained = [name for name in sums if self.frame.trainable[name]]
        moved, outer = self._outer_step(before, {name: sums[name] for name in trained})
        added = {n: jax.tree.map(jnp.add, before.variables[n], sums[n]) for n in sums if self._is_added(n)}
        variables = {**sums, **added, **moved}
        stays = {n: copy for n, copy in before.copies.items() if n not in trained and n not in self.block_sync.sync}
        copies = {**variables, **stays}
        slots = before.slots
        if self.block_sync.reset_slots:
            slots = {**slots, **{u.slots: self._renewed(u, slots[u.slots], copies) for u in self.train_op.updates}}
        return BlockState(variables, outer, copies, slots)

    def _is_added(self, name: str) -> bool:
        return name in self.added_only and name in self.block_sync.sync

    def _addend(self, name: str, copy: PyTree, old: PyTree) -> PyTree:
        """What this tower gives to the sum for a variable."""
        first = share(name, copy, VariableAggregation.ONLY_FIRST_TOWER, tower_index(), num_towers())
        if self.frame.trainable[name]:
            differences = jax.tree.map(lambda x, y: (x - y) / num_towers(), old, copy)
            return self._if_warmup(first, differences)
        if self._is_added(name):
            return jax.tree.map(jnp.subtract, copy, old)
        if name in self.block_sync.sync:
            return share(name, copy, self.frame.aggregation[name], tower_index(), num_towers())
        return first

    def _outer_step(self, before: BlockState, sums: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        """The trained global variables after it, and the state of the outer optimizer."""
        old = {name: before.variables[name] for name in sums}
        with jax.numpy_dtype_promotion("standard"):  # as for optimizers in a model_fn
            updates, outer = self.block_sync.outer_optimizer.update(sums, before.outer, old)
            moved = optax.apply_updates(old, updates)
            outer = _of_dtypes(before.outer, outer)
        return self._if_warmup((sums, before.outer), (moved, outer))

    def _if_warmup(self, one: PyTree, other: PyTree) -> PyTree:
        return other if self.is_warmup is None else select(self.is_warmup, one, other)

    def _renewed(self, update: Update, state: PyTree, variables: dict[str, PyTree]) -> PyTree:
        """An optimizer's state where all that belongs to variables starts anew."""
        params = {name: variables[name] for name in update.var_list}
        frame = self.frame.fresh(reuse=True, trainable=self.frame.trainable)
        with open_frame(frame), jax.numpy_dtype_promotion("standard"):
            fresh = update.optimizer.transformation.init(params)
        if isinstance(state, LossScaleState):
            return state._replace(inner=_of_dtypes(state.inner, _with_fresh_slots(state.inner, fresh, params)))
        return _of_dtypes(state, _with_fresh_slots(state, fresh, params))


def _of_dtypes(like: PyTree, tree: PyTree) -> PyTree:
    """Optimizers may compute a state of other dtypes than the one they start with; then no loop can carry it."""
    return jax.tree.map(lambda x, y: y if y.dtype == x.dtype else y.astype(x.dtype), like, tree)


def _with_fresh_slots(state: PyTree, fresh: PyTree, params: dict[str, PyTree]) -> PyTree:
    """An optax state whose parts that hold values per variable, and numbers beside them too, are `fresh`'s."""

    def is_slot(node: Any) -> bool:
        return (
            isinstance(node, dict)
            and bool(node)
            and all(name in params and is_per_variable(value, params[name]) for name, value in node.items())
        )

    def has_slots(node: Any) -> bool:
        fields = node if isinstance(node, tuple) and hasattr(node, "_fields") else ()
        return is_slot(node) or any(is_slot(field) for field in fields)

    def renewed(old: Any, new: Any) -> Any:
        if is_slot(old):
            return new
        if not has_slots(old):
            return old
        fields = zip(old, new, strict=True)
        return type(old)(*(y if hasattr(x, "dtype") else _with_fresh_slots(x, y, params) for x, y in fields))

    return jax.tree.map(renewed, state, fresh, is_leaf=has_slots)
