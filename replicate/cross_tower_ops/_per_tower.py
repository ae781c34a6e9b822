"""Values outside of programs that have one array per tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from estimator import IndexedSlices
from replicate.towers._devices import find_devices

_ARRAYS = jax.Array | np.ndarray | np.generic | int | float | complex | IndexedSlices

Value = Any  # a jax.Array, or IndexedSlices of them: what one tower has


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class PerTower:
    """One array per tower, each on its tower's device, as TensorFlow's `PerDevice`: an ordered mapping, immutable.

    Iteration gives the arrays, in the order of `devices`. It is a pytree of them: `jax.tree.map` works on every
    tower's array where it is.

    >>> x = PerTower({"/cpu:0": np.ones(2, np.float32), "/cpu:1": np.zeros(2, np.float32)})
    >>> x
    PerTower({cpu:0: float32[2], cpu:1: float32[2]})
    >>> print(x.get("/cpu:0"), jax.tree.map(lambda array: array + 5, x).get("/cpu:1"))
    [1. 1.] [5. 5.]

    Attributes:
      devices: of the arrays that are here, in tower order.
      towers: the devices of all towers; more than `devices` where the value spans processes.
    """

    devices: tuple[jax.Device, ...]
    towers: tuple[jax.Device, ...]
    _arrays: tuple[Value, ...]

    def __init__(
        self, values: Mapping[jax.Device | str, Value] | Sequence[Value], towers: Sequence[jax.Device] | None = None
    ) -> None:
        """Puts one array on each device.

        Args:
          values: a dict of devices, or their names such as "/cpu:0", to arrays; one that is elsewhere, or of numpy,
            is put on its device. Or a list of jax arrays that are on different devices. All of one shape and dtype;
            or all `est.IndexedSlices` for one shape, with any number of rows each.
          towers: the devices of all towers, for a value that spans processes: each process gives the arrays of its
            own devices, and the same towers in the same order. None means the devices of `values`.

        Raises:
          TypeError: `values` is neither, or holds something else than arrays.
          ValueError: there are no values, two are on one device, or they differ in shape or dtype; a device is
            unknown or another process's; a list holds an array on several devices; or the towers do not fit.
        """
        by_device = _by_device(values)
        if towers is not None:
            # Each process has the arrays of its own towers only.
            mine = [device for device in towers if device.process_index == jax.process_index()]
            if set(mine) != set(by_device) or len(set(towers)) < len(towers):
                raise ValueError(
                    f"`PerTower` got arrays on {_names(by_device)}, yet as towers {_names(towers)}, of which "
                    f"{_names(mine)} are in this process. Name each tower once, and give an array for each of these."
                )
            # In the order of the towers, in which values are reduced.
            by_device = {device: by_device[device] for device in mine}
        arrays = tuple(_put(value, device) for device, value in by_device.items())
        _check_alike(by_device, arrays)
        self._set(tuple(by_device), tuple(by_device if towers is None else towers), arrays)

    def get(self, device: jax.Device | str) -> Value:
        """The array on a device, given as it is or by its name.

        Raises:
          ValueError: there is none on it.
        """
        local = local_device("PerTower.get", device)
        if local not in self.devices:
            raise ValueError(f"`get`: there is no array on {device!r}, only on {_names(self.devices)}.")
        return self._arrays[self.devices.index(local)]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        parts = (f"{device}: {_kind(value)}" for device, value in zip(self.devices, self._arrays, strict=True))
        return f"{type(self).__name__}({{{', '.join(parts)}}})"

    def tree_flatten(self) -> tuple[tuple[Value, ...], Any]:
        return self._arrays, (self.devices, self.towers)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Sequence[Value]) -> Self:
        """Unchecked, for arrays that are known to fit."""
        devices, towers = aux
        # Not by `__init__`, whose checks would fail: jax's transformations unflatten with leaves that are not arrays.
        new = object.__new__(cls)
        new._set(devices, towers, tuple(arrays))
        return new

    def _set(self, devices: tuple[jax.Device, ...], towers: tuple[jax.Device, ...], arrays: tuple[Value, ...]) -> None:
        for name, value in (("devices", devices), ("towers", towers), ("_arrays", arrays)):
            object.__setattr__(self, name, value)


@jax.tree_util.register_pytree_node_class
class Mirrored(PerTower):
    """Equal copies of one array on several devices, as TensorFlow's class of this name.

    `broadcast` and `reduce` return them. The constructor does not check that the copies are equal, which would move
    all of them to the host.

    >>> x = Mirrored({"/cpu:0": np.ones(2), "/cpu:1": np.ones(2)})
    >>> print(x.value, np.sum(x))
    [1. 1.] 2.0
    """

    @property
    def value(self) -> Value:
        """The copy on the first device."""
        return self._arrays[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype, copy=copy)


def has_slices(value: PerTower) -> bool:
    """Returns whether the value is row-sparse."""
    return isinstance(next(iter(value)), IndexedSlices)


def local_device(caller: str, device: Any) -> jax.Device:
    """A device of this process."""
    [local] = find_devices([device])
    if local.process_index != jax.process_index():
        raise ValueError(
            f"`{caller}` got {device!r}, a device of process {local.process_index}; this is process "
            f"{jax.process_index()}. Each process gives its own devices only."
        )
    return local


def destination_devices(caller: str, destinations: Any) -> tuple[jax.Device, ...]:
    """The devices of this process that `destinations` names."""
    if isinstance(destinations, PerTower):
        return destinations.devices
    if isinstance(destinations, str | jax.Device):
        destinations = [destinations]
    if not isinstance(destinations, list | tuple):
        raise TypeError(
            f"`{caller}` takes as destinations a device, the name of one, a list of them, or a PerTower whose devices "
            f"are meant; got {destinations!r}."
        )
    if not destinations:
        raise ValueError(f"`{caller}` got no destinations; name at least one device.")
    devices = tuple(local_device(caller, device) for device in destinations)
    if len(set(devices)) < len(devices):
        raise ValueError(f"`{caller}` takes each device once in destinations; got {destinations!r}.")
    return devices


def as_per_tower(caller: str, value: Any) -> PerTower:
    """The value itself, or, as TensorFlow takes it, an array on a device as the value of one tower."""
    _check_outside(caller, value)
    if isinstance(value, PerTower) and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return value
    if isinstance(value, jax.Array | IndexedSlices):
        return PerTower([value])
    raise TypeError(
        f"`{caller}` got a value of type {type(value).__name__}, which is on no device. Give a "
        "`PerTower({device: array, ...})`, or one jax array."
    )


def _by_device(values: Any) -> dict[jax.Device, Value]:
    if not isinstance(values, Mapping | list | tuple):
        raise TypeError(
            f"`PerTower` takes a dict of devices to arrays, or a list of arrays on different devices; got {values!r}."
        )
    arrays = list(values.values() if isinstance(values, Mapping) else values)
    _check_outside("PerTower", arrays)
    named = values if isinstance(values, Mapping) else map(_device_of, arrays)
    devices = [local_device("PerTower", device) for device in named]
    if not devices:
        raise ValueError("`PerTower` needs at least one array; got none.")
    if len(set(devices)) < len(devices):
        raise ValueError(f"`PerTower` takes one array per device; got several on one of {_names(devices)}.")
    for value in arrays:
        if not isinstance(value, _ARRAYS):
            raise TypeError(
                f"`PerTower` takes one array for each tower; got {value!r}. For a tree of arrays, make one PerTower of "
                "each leaf, and use `batch_reduce`."
            )
    return dict(zip(devices, arrays, strict=True))


def _device_of(value: Any) -> jax.Device:
    leaves = jax.tree.leaves(value)
    if not leaves or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        raise TypeError(
            f"`PerTower` got {value!r} in a list, which is on no device. Give a dict, `PerTower({{device: array}})`."
        )
    # The arrays of `IndexedSlices` must be on one device, too.
    devices = set().union(*(leaf.devices() for leaf in leaves))
    if len(devices) > 1:
        raise ValueError(
            f"`PerTower` got an array that is on {len(devices)} devices. Give one for each device, such as "
            "`[shard.data for shard in array.addressable_shards]`."
        )
    return devices.pop()


def _put(value: Value, device: jax.Device) -> Value:
    def put(x: Any) -> jax.Array:
        # jax may move an uncommitted array to another device, so that it must be put here.
        is_there = isinstance(x, jax.Array) and x.committed and x.devices() == {device}
        return x if is_there else jax.device_put(x, device)

    return jax.tree.map(put, value)


def _check_outside(caller: str, value: Any) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        raise TypeError(f"`{caller}` is for values outside of programs; within one, arrays are on no device yet.")


def _check_alike(devices: Iterable[jax.Device], arrays: Sequence[Value]) -> None:
    for value in arrays:
        if isinstance(value, IndexedSlices):
            value.check("PerTower")
    if len({_kind(value) for value in arrays}) > 1:
        parts = (f"{_kind(value)} on {device}" for device, value in zip(devices, arrays, strict=True))
        raise ValueError(f"`PerTower` takes arrays of one shape and dtype; got {', '.join(parts)}.")


def _kind(value: Value) -> str:
    """The type and shape, in which the arrays of all towers must agree."""
    if isinstance(value, IndexedSlices):
        return f"IndexedSlices of {value.values.dtype}{list(value.dense_shape)} with {value.indices.dtype} indices"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else repr(value)


def _names(devices: Iterable[jax.Device]) -> str:
    return ", ".join(map(str, devices))
