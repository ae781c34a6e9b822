"""Variables that are cut over the devices of a tower, where towers have several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from estimator import State
from estimator.typing import Partitions, PyTree, Shardings, Tree
from replicate.placement._mirrored import MeshPlacement
from replicate.towers._map import PART_AXIS


class ModelParallelPlacement(MeshPlacement):
    """Towers of several devices: some arrays are cut over the devices of a tower, and every tower has the same."""

    def __init__(self, towers: Sequence[tuple[jax.Device, ...]], partitions: Partitions | None = None) -> None:
        super().__init__(towers)
        self._towers = towers
        self._partitions = partitions or {}
        self.parts = len(towers[0])
        self.towers_per_process = len(towers)
        if self._partitions:
            self.homes = f"mirrored, {len(self._partitions)} of them cut over the devices of a tower"

    def with_partitions(self, partitions: Partitions) -> ModelParallelPlacement:
        return ModelParallelPlacement(self._towers, partitions)

    def state(self, like: State) -> Shardings:
        return self._homes(like)

    def _homes(self, tree: PyTree) -> Shardings:
        return jax.tree_util.tree_map_with_path(self._home, tree)

    def _home(self, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Slots are cut as their variable: what optax keeps for it has its name, and its path, on the way."""
        starts = [i for i, key in enumerate(path) if isinstance(key, DictKey)]
        axes = [self._partitions.get((path[i].key, *path[i + 1 :])) for i in starts]
        axis = next((axis for axis in axes if axis is not None), None)
        if axis is None or axis >= leaf.ndim or leaf.shape[axis] % self.parts:  # such as a factored slot
            return NamedSharding(self._mesh, PartitionSpec())
        return NamedSharding(self._mesh, _cut_at(axis))

    def place(self, tree: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(tree, self._homes(tree))

    def to_update(self, train_op: Tree) -> Tree:
        return train_op  # whose gradients are cut already, where their variables are

    def to_merge(self, metrics: Tree) -> Tree:
        return self.gather(metrics)  # a merge may use a scatter: see `lone_tower`

    def shard(self, x: jax.Array, axis: int) -> jax.Array:
        """An array, cut over the devices of the tower where its dimension divides by them.

        XLA could cut it unevenly, but ends the process, or counts the padding, at some scatters of such arrays.
        """
        if x.shape[axis] % self.parts:
            return x
        # Within several towers jax knows the mesh, of which one axis is mapped; a single one is not mapped.
        inside = PART_AXIS in jax.sharding.get_abstract_mesh().axis_names
        return jax.lax.with_sharding_constraint(
            x, _cut_at(axis) if inside else NamedSharding(self._mesh, _cut_at(axis))
        )


def _cut_at(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, PART_AXIS)
