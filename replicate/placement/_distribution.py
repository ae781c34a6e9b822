"""Where the variables of a replicated model_fn live."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import DictKey

from estimator.core._partitioning import PART_AXIS
from estimator.core._placement import Placement
from replicate.placement._parameter_server import ParameterServer
from replicate.towers._devices import find_devices
from replicate.towers._map import TOWER_AXIS, tower_mesh


class VariableDistribution(enum.StrEnum):
    """How variables and optimizer slots are spread over the towers' devices.

    The numbers are the same for all; a checkpoint of one is read under any other. With one tower, and no variable
    device of its own, all are the same.

    Attributes:
      MIRRORED: a copy on every tower's device; gradients are summed by one all-reduce. The fastest where it fits.
      SHARDED: each variable and its slots are cut over the towers along their first dimension that divides; what
        has none is mirrored. Towers gather the variables at each step, the optimizer runs on the pieces. For
        models whose slots do not fit on every device.
      SHARED_LOCAL_PARAMETER_SERVER: one copy, on the variable device. Towers get the variables from there at each
        step; their gradients are gathered and summed, and the optimizer runs, there.
      SHARED_ROUND_ROBIN: one copy of each variable, the n-th that the model_fn creates on device n modulo towers,
        where its gradient is summed and its slots are.
    """

    MIRRORED = "mirrored"
    SHARDED = "sharded"
    SHARED_LOCAL_PARAMETER_SERVER = "shared_local_parameter_server"
    SHARED_ROUND_ROBIN = "shared_round_robin"


class OneDevice(Placement):
    """Everything on one given device."""

    def __init__(self, device: jax.Device) -> None:
        self._sharding = SingleDeviceSharding(device)

    def state(self, like: Any) -> Any:
        del like
        return self._sharding

    def batch(self, rows: int) -> Any:
        del rows
        return self._sharding


class Replicated(Placement):
    """A copy of the state on every device, and of each batch only a tower's rows."""

    kind = "mirrored"

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = tower_mesh(devices)
        processes = len({device.process_index for device in devices})
        self.spans_processes = processes > 1
        self.towers_per_process = len(devices) // processes

    def state(self, like: Any) -> Any:
        del like
        return NamedSharding(self._mesh, PartitionSpec())

    def batch(self, rows: int) -> Any:
        axis = TOWER_AXIS if rows % self._mesh.shape[TOWER_AXIS] == 0 else None
        return NamedSharding(self._mesh, PartitionSpec(axis))

    def from_processes(self, batch: Any, stacked: bool = False) -> Any:
        if not self.spans_processes:
            return batch
        axes = (None, TOWER_AXIS) if stacked else (TOWER_AXIS,)
        rows = {x.shape[len(axes) - 1] for x in jax.tree.leaves(batch) if not _is_global(x)}
        if any(n % self.towers_per_process for n in rows):
            raise ValueError(
                f"Batch size {max(rows)} needs to be divisible by the number of towers, which is "
                f"{self.towers_per_process} in each process. Drop the remainder in input_fn (`drop_remainder=True`), "
                "or choose another batch size."
            )
        return _global(batch, NamedSharding(self._mesh, PartitionSpec(*axes)))

    def gathered(self, tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self._mesh, PartitionSpec()))

    def whole_in_each(self, tree: Any) -> Any:
        return self.gathered(tree) if self.spans_processes else tree

    def in_all_processes(self, batch: Any) -> Any:
        return _global(batch, NamedSharding(self._mesh, PartitionSpec())) if self.spans_processes else batch

    def to_update(self, train_op: Any) -> Any:
        """Summed gradients as every device has them.

        The barrier keeps XLA from compiling the optimizer's arithmetic together with what was before, differently
        for mirrored and cut variables: it makes the two equal bit by bit.
        """
        return self.gathered(jax.lax.optimization_barrier(train_op))


class Sharded(Replicated):
    """Every array of the state cut over the devices, where it can be."""

    kind = "sharded"

    def state(self, like: Any) -> Any:
        return jax.tree.map(self._cut, like)

    def _cut(self, array: Any) -> NamedSharding:
        for axis, size in enumerate(array.shape):
            if size % self._mesh.size == 0:
                return NamedSharding(self._mesh, PartitionSpec(*[None] * axis, TOWER_AXIS))
        return NamedSharding(self._mesh, PartitionSpec())


class ModelParallel(Replicated):
    """Towers of several devices: over those of a tower some arrays are cut, and every tower has the same."""

    def __init__(
        self, towers: Sequence[tuple[jax.Device, ...]], partitions: dict[tuple[Any, ...], int] | None = None
    ) -> None:
        self._towers = towers
        self._mesh = tower_mesh(towers)
        self._partitions = partitions or {}
        self.parts = len(towers[0])
        self.towers_per_process = len(towers)

    def with_partitions(self, partitions: dict[tuple[Any, ...], int]) -> ModelParallel:
        return ModelParallel(self._towers, partitions)

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


def _is_global(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable)


def _global(batch: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: x if _is_global(x) else _from_local(x, sharding), batch)


def _from_local(x: Any, sharding: NamedSharding) -> jax.Array:
    x = np.asarray(x)
    x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    shape = x.shape if sharding.is_fully_replicated else None
    return jax.make_array_from_process_local_data(sharding, x, shape)


def place(
    distribution: VariableDistribution,
    devices: Sequence[Any],
    variable_device: jax.Device | str | None = None,
) -> Placement:
    """The placement for a distribution over the towers' devices, one per tower or a tuple of them."""
    distribution = VariableDistribution(distribution)
    wide = isinstance(devices[0], tuple)
    if wide and distribution != VariableDistribution.MIRRORED:
        raise ValueError(
            f"variable_distribution={str(distribution)!r} was given with devices_per_tower={len(devices[0])}. Towers "
            "of several devices have VariableDistribution.MIRRORED: what `est.get_variable(..., partition=...)` cuts "
            "is cut over the devices of each tower. Leave out one of them."
        )
    if distribution.startswith("shared") and len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"variable_distribution={str(distribution)!r} keeps variables on devices of one process, which the towers "
            "of others do not reach. Use MIRRORED, or SHARDED, which cuts variables over all of them."
        )
    towers: Placement
    if wide:
        towers = ModelParallel(devices)
    else:
        towers = OneDevice(devices[0]) if len(devices) == 1 else Replicated(devices)
    if distribution == VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER:
        home = _variable_device(devices, variable_device)
        return towers if list(devices) == [home] else ParameterServer(towers, [home])
    if variable_device is not None:
        raise ValueError(
            f"variable_device={variable_device!r} was given with variable_distribution={str(distribution)!r}, which "
            "has none. It is for VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER; leave out one of them."
        )
    if wide or len(devices) == 1 or distribution == VariableDistribution.MIRRORED:
        return towers
    if distribution == VariableDistribution.SHARDED:
        return Sharded(devices)
    return ParameterServer(towers, devices)


def _variable_device(devices: Sequence[jax.Device], given: jax.Device | str | None) -> jax.Device:
    if given is not None:
        return find_devices([given])[0]
    return devices[0] if len(devices) == 1 else jax.local_devices(backend="cpu")[0]
