"""Finds copies of one array, on several devices, that are not the same any more."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from estimator.core._typing import PyTree
from estimator.multihost._process_group import CALLS


class ReplicaMismatchError(RuntimeError):
    """Copies of a variable or slot, which should be the same on several devices, differ."""


def check_replicas(step: int, **trees: PyTree) -> None:
    """Compares the copies that arrays have on several devices, bit by bit, by a checksum of each.

    Each device computes the checksums of its own copies, and only these travel. A copy is what several of an
    array's `addressable_shards` hold of the same index: a sharded array has none, nor has one on a single device.
    The processes of a group all call this.

    >>> check_replicas(7, variable={"w": jnp.ones(3)}, slot={})

    Args:
      step: for the message.
      **trees: pytrees of `jax.Array`s, by what an array in them is called.

    Raises:
      ReplicaMismatchError: copies differ.
    """
    sums: _Sums = collections.defaultdict(list)
    here = _sum_copies(trees)
    for of_process in CALLS.group.all_gather(list(here.items())):
        for (name, part), of_devices in of_process:
            sums[name, part] += of_devices
    wrong: list[str] = []
    for (name, _), of_devices in sums.items():
        usual = collections.Counter(value for _, value in of_devices).most_common(1)[0][0]
        if odd := [device for device, value in of_devices if value != usual]:
            like = next(device for device, value in of_devices if value == usual)
            wrong.append(f"The copy of the {name} on device {', '.join(odd)} differs from that on {like}")
    if wrong:
        n = len(wrong) - 1
        others = f" {n} more {'array differs' if n == 1 else 'arrays differ'}." if n else ""
        raise ReplicaMismatchError(
            f"{wrong[0]}, at step {step}.{others} Nothing is saved from here on; a checkpoint saved since the check "
            "before may hold the wrong copy. Copies drift apart by a fault of the hardware, or by code that does not "
            "compute the same on every device, such as a callback to Python."
        )


_Sums = dict[tuple[str, str], list[tuple[str, int]]]  # by name and part of an array: of each device, the checksum


def _sum_copies(trees: dict[str, PyTree]) -> _Sums:
    """Computes checksums of the copies that devices of this process hold of arrays on several devices of all."""
    sums: _Sums = {}
    for devices, copies in _list_copies(trees).items():
        replicated = NamedSharding(Mesh(np.array(devices), ("copy",)), PartitionSpec())
        arrays = [jax.make_array_from_single_device_arrays(c[0].shape, replicated, c) for _, c in copies]
        # Computed from replicated arrays, the result counts as replicated too: each device has it of its own copies.
        on_device = {shard.device: shard.data for shard in _compute_checksums(arrays).addressable_shards}
        table = np.stack([np.asarray(on_device[device]) for device in devices])  # [devices, arrays]
        for (part, _), column in zip(copies, table.T.tolist(), strict=True):
            sums[part] = [(_describe(device), value) for device, value in zip(devices, column, strict=True)]
    return sums


_Copies = list[tuple[tuple[str, str], list[jax.Array]]]


def _list_copies(trees: dict[str, PyTree]) -> dict[tuple[jax.Device, ...], _Copies]:
    """Lists the copies in this process of arrays that have several, with name and part, by the devices they are on."""
    by_devices: dict[tuple[jax.Device, ...], _Copies] = collections.defaultdict(list)
    for kind, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = f"{kind} {jax.tree_util.keystr(path, simple=True, separator='/')!r}"
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            by_index: dict[str, list[jax.Array]] = collections.defaultdict(list)
            for shard in leaf.addressable_shards:
                by_index[str(shard.index)].append(shard.data)
            spans = not leaf.is_fully_addressable
            for part, copies in by_index.items():
                if len(copies) > 1 or spans:
                    by_devices[tuple(copy.device for copy in copies)].append(((name, part), copies))
    return by_devices


@jax.jit
def _compute_checksums(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_compute_checksum(array) for array in arrays])


def _compute_checksum(array: jax.Array) -> jax.Array:
    """The sum of a hash of each word of the array's bits and its position: it changes with any word."""
    if jax.dtypes.itemsize_bits(array.dtype) < 8:
        array = array.astype(jnp.float32)  # holds all their values
    bits = array.ravel().view(jnp.uint8 if array.dtype.itemsize % 4 else jnp.uint32).astype(jnp.uint32)
    words = bits + jax.lax.iota(jnp.uint32, bits.size) * np.uint32(0x9E3779B9)
    # The finalizer of MurmurHash3, by which no two words become the same.
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> np.uint32(16)), dtype=jnp.uint32)


def _describe(device: jax.Device) -> str:
    of = f" of process {device.process_index}" if jax.process_count() > 1 else ""
    return f"{device.platform}:{device.id}{of}"
