"""Variables on every tower's device: a copy on each, or each array cut over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from estimator import State
from estimator.replication import Placement
from estimator.typing import Shardings, Tree
from replicate.towers._collectives import gather_cut
from replicate.towers._map import TOWER_AXIS, tower_mesh
from replicate.towers._packing import SMALL
from replicate.towers._split_batch import rows_of_tower


class OneDevicePlacement(Placement):
    """Everything on one given device, of one tower or several."""

    def __init__(self, device: jax.Device, towers: int = 1) -> None:
        self.towers_per_process = towers
        self._sharding = SingleDeviceSharding(device)

    @property
    def devices(self) -> Sequence[jax.Device]:
        return tuple(self._sharding.device_set)

    def state(self, like: State) -> Shardings:
        return self._sharding

    def batch(self, rows: int) -> jax.sharding.Sharding | None:
        return self._sharding


class MeshPlacement(Placement):
    """Arrays over a mesh of the towers' devices: a copy of the state on each, and of a batch a tower's rows.

    Args:
      devices: one per tower, or a tuple of them.
    """

    homes = "mirrored"

    def __init__(self, devices: Sequence[Any]) -> None:
        self._mesh = tower_mesh(devices)

    @property
    def devices(self) -> Sequence[jax.Device]:
        return tuple(self._mesh.devices.flat)

    def describe(self) -> str:
        return (
            "All towers have the variables and slots: the optimizers run on the sums of the gradients in every tower "
            "alike, so that all copies stay equal."
        )

    def state(self, like: State) -> Shardings:
        return NamedSharding(self._mesh, PartitionSpec())

    def batch(self, rows: int) -> jax.sharding.Sharding | None:
        # If rows do not divide, each device has all of them: evaluation splits them itself.
        axis = TOWER_AXIS if rows % self._mesh.shape[TOWER_AXIS] == 0 else None
        return NamedSharding(self._mesh, PartitionSpec(axis))

    def gather(self, tree: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self._mesh, PartitionSpec()))


class MirroredPlacement(MeshPlacement):
    """A copy of the state on every tower's device, in one process or several."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        super().__init__(devices)
        processes = len({device.process_index for device in devices})
        self.spans_processes = processes > 1
        self.towers_per_process = len(devices) // processes

    def from_processes(self, batch: Tree, stacked: bool = False) -> Tree:
        axes = (None, TOWER_AXIS) if stacked else (TOWER_AXIS,)
        rows = {x.shape[len(axes) - 1] for x in jax.tree.leaves(batch) if not _is_global(x)}
        for n in rows:
            rows_of_tower(n, self.towers_per_process, each_process=True)
        return _global(batch, NamedSharding(self._mesh, PartitionSpec(*axes)))

    def whole_in_each(self, tree: Tree) -> Tree:
        return self.gather(tree) if self.spans_processes else tree

    def in_all_processes(self, batch: Tree) -> Tree:
        return _global(batch, NamedSharding(self._mesh, PartitionSpec())) if self.spans_processes else batch

    def to_update(self, train_op: Tree) -> Tree:
        """Summed gradients as every device has them.

        The barrier keeps XLA from compiling the optimizer's arithmetic together with what was before, differently
        for mirrored and cut variables: it makes the two equal bit by bit.
        """
        return self.gather(jax.lax.optimization_barrier(train_op))


class ShardedPlacement(MirroredPlacement):
    """Every array of the state cut over the devices, where it can be."""

    homes = "sharded"

    def describe(self) -> str:
        return (
            "Variables and slots are cut over the towers, which gather the variables before they compute: the "
            "optimizers run on the sums of the gradients, on each device for its pieces."
        )

    def state(self, like: State) -> Shardings:
        return jax.tree.map(lambda array: NamedSharding(self._mesh, _spec(self._axis(array))), like)

    def to_read(self, variables: Tree) -> Tree:
        """Small arrays are gathered together; others each by a collective that XLA inserts."""
        leaves, structure = jax.tree.flatten(variables)
        axes = [self._axis(leaf) for leaf in leaves]
        most = SMALL * self._mesh.size
        small = {i: axis for i, axis in enumerate(axes) if axis is not None and leaves[i].nbytes < most}
        wholes = gather_cut([leaves[i] for i in small], list(small.values()), self._mesh)
        for i, whole in zip(small, wholes, strict=True):
            leaves[i] = whole
        return jax.tree.unflatten(structure, leaves)

    def _axis(self, array: Any) -> int | None:
        """The dimension along which an array is cut, or None."""
        return next((axis for axis, size in enumerate(array.shape) if size % self._mesh.size == 0), None)


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TOWER_AXIS)


def _is_global(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable)


def _global(batch: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(lambda x: x if _is_global(x) else _from_local(x, sharding), batch)


def _from_local(x: Any, sharding: NamedSharding) -> jax.Array:
    x = np.asarray(x)
    # As in `jnp.asarray`: 64-bit dtypes of numpy would need another program.
    x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    shape = x.shape if sharding.is_fully_replicated else None
    return jax.make_array_from_process_local_data(sharding, x, shape)
