"""Variables that are cut over the devices of a tower, where towers have several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from estimator.replication import PART_AXIS
from replicate.placement._mirrored import MeshPlacement


class ModelParallelPlacement(MeshPlacement):
    """Towers of several devices: some arrays are cut over the devices of a tower, and every tower has the same."""

    kind = "mirrored"

    def __init__(
        self, towers: Sequence[tuple[jax.Device, ...]], partitions: dict[tuple[Any, ...], int] | None = None
    ) -> None:
        super().__init__(towers)
        self._towers = towers
        self._partitions = partitions or {}
        self.parts = len(towers[0])
        self.towers_per_process = len(towers)

    def with_partitions(self, partitions: dict[tuple[Any, ...], int]) -> ModelParallelPlacement:
        return ModelParallelPlacement(self._towers, partitions)

    def state(self, like: Any) -> Any:
        return jax.tree_util.tree_map_with_path(self._home, like)

    def _home(self, path: Any, leaf: Any) -> NamedSharding:
        """Slots are cut as their variable: what optax keeps for it has its name, and its path, on the way."""
        starts = [i for i, key in enumerate(path) if isinstance(key, DictKey)]
        axes = [self._partitions.get((path[i].key, *path[i + 1 :])) for i in starts]
        axis = next((axis for axis in axes if axis is not None), None)
        if axis is None or axis >= leaf.ndim or leaf.shape[axis] % self.parts:  # such as a factored slot
            return NamedSharding(self._mesh, PartitionSpec())
        return NamedSharding(self._mesh, _cut_at(axis))

    def placed(self, tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, self.state(tree))

    def to_update(self, train_op: Any) -> Any:
        return train_op  # whose gradients are cut already, where their variables are

    def to_merge(self, metrics: Any) -> Any:
        return self.gathered(metrics)  # what merges them may be a scatter: see `lone_tower`

    def cut(self, x: jax.Array, axis: int) -> jax.Array:
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
