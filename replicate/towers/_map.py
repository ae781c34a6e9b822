"""The towers: one function mapped over devices, and the collectives among them.

The only module that knows how the mapping is done. Inside an outer `jax.jit`, `jax.pmap` is inlined as a `shard_map`,
which is its fast form: no Python wrapper around every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from estimator.typing import PyTree
from replicate.towers._split_batch import split_rows

TOWER_AXIS = "tower"
"""Name of the axis over the towers, for `flax.linen.BatchNorm(axis_name=TOWER_AXIS)` and jax's collectives.

Bound in every run of a replicated model_fn, on one device too; not in a model_fn that is not replicated.
"""

PART_AXIS = "part"
"""Name of the axis over the devices of a tower, where towers have several."""

_OverRows = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def tower_map(fn: _OverRows, devices: Sequence[Any]) -> _OverRows:
    """Runs `fn(shared, batch) -> (same, own)` once per device, side by side.

    Args:
      fn: gets `shared` as it is and its own rows of `batch`; returns what is the same in all towers, and its own.
      devices: one per tower, or as many of them in a tuple. With a single tower the function is called as it is, with
        the axis of one tower bound. If all are the same device, it runs the towers together, as an axis of its arrays.

    Returns:
      A function of `shared` and a batch whose rows divide by the towers; what comes back as `own` has the towers as
      its first dimension.
    """
    if len(devices) == 1:
        return lone_tower(fn, devices)
    mapped = map_own(fn, devices)
    return lambda shared, batch: mapped(shared, split_rows(batch, len(devices)))


def map_own(fn: _OverRows, devices: Sequence[Any]) -> _OverRows:
    """The same for arrays that have the towers as their first dimension already, instead of the rows of a batch."""
    if len(devices) == 1:
        alone = lone_tower(fn, devices)
        return lambda shared, given: alone(shared, jax.tree.map(lambda x: x[0], given))
    if isinstance(devices[0], tuple):
        return _of_parts(fn, devices)
    if len(set(devices)) == 1:
        return _on_one_device(fn, len(devices), batch_axis=0)
    if len({device.process_index for device in devices}) > 1:  # to which a `jax.pmap` inside a `jax.jit` does not reach
        return _over_mesh(fn, tower_mesh(devices))

    def call(shared: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
        # jax keeps the function for ever, and with it would keep the run that it is a part of, with all its tracers.
        held = [fn]
        mapped = jax.pmap(
            lambda *args: held[0](*args), axis_name=TOWER_AXIS, in_axes=(None, 0), out_axes=(None, 0), devices=devices
        )
        try:
            return mapped(shared, given)
        finally:
            held.clear()

    return call


def lone_tower(fn: _OverRows, devices: Sequence[Any]) -> _OverRows:
    """Runs `fn(shared, batch) -> (same, own)` on a whole batch, as a single tower would, in a program of all `devices`.

    Towers of several devices do it each by itself. Otherwise XLA would cut the rows over the towers, because the
    results are joined with the results of several towers. If that cut is uneven, XLA's scatters count the padding, or
    lose rows, since it is over a part of the mesh (seen up to jax 0.12; `test_wide_towers_law.py`).

    Args:
      fn: as for `tower_map`.
      devices: of all towers in the program.
    """
    # Binds the axis and nothing else: a vmap over no argument leaves the operations of `fn` as they are.
    alone = _on_one_device(fn, towers=1, batch_axis=None)
    if len(devices) == 1 or not isinstance(devices[0], tuple):
        return alone
    whole = PartitionSpec()
    return jax.shard_map(
        alone, mesh=tower_mesh(devices), in_specs=whole, out_specs=whole, axis_names={TOWER_AXIS}, check_vma=False
    )


def _of_parts(fn: _OverRows, devices: Sequence[Any]) -> _OverRows:
    """The same for towers of several devices.

    Only the axis over the towers is mapped; within a tower XLA cuts the work as variables and `est.spread` tell.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            f"Towers of {len(devices[0])} devices (`devices_per_tower`) run in compiled programs only, and "
            "`jax.disable_jit` is on. Leave out `devices_per_tower` to look at values: the numbers are the same."
        )
    return _over_mesh(fn, tower_mesh(devices))


def tower_mesh(devices: Sequence[Any]) -> Mesh:
    """The mesh of the towers' devices, with a second axis where towers have several."""
    axes = (TOWER_AXIS, PART_AXIS) if isinstance(devices[0], tuple) else (TOWER_AXIS,)
    return Mesh(np.array(devices), axes)


def _over_mesh(fn: _OverRows, mesh: Mesh) -> _OverRows:
    def tower(shared: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
        same, own = fn(shared, jax.tree.map(lambda x: x[0], given))
        return same, jax.tree.map(lambda x: jnp.asarray(x)[None], own)

    specs = PartitionSpec(), PartitionSpec(TOWER_AXIS)
    return jax.shard_map(tower, mesh=mesh, in_specs=specs, out_specs=specs, axis_names={TOWER_AXIS}, check_vma=False)


def map_pieces(
    fn: Callable[[Sequence[jax.Array]], list[jax.Array]], axes: Sequence[int], mesh: Mesh
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Runs `fn(pieces) -> same` on each tower's pieces of arrays.

    Args:
      axes: the dimension along which each array is cut over the towers.
    """
    specs = [PartitionSpec(*[None] * axis, TOWER_AXIS) for axis in axes]
    return jax.shard_map(fn, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)


def _on_one_device(fn: _OverRows, towers: int, batch_axis: int | None) -> _OverRows:
    def call(shared: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        # The leaves are mapped, as by `jax.pmap`: `jax.vmap` has a meaning of its own for sparse arrays.
        leaves, structure = jax.tree.flatten(batch)

        def tower(shared: PyTree, leaves: list[jax.Array]) -> tuple[PyTree, PyTree]:
            return fn(shared, jax.tree.unflatten(structure, leaves))

        mapped = jax.vmap(tower, in_axes=(None, batch_axis), axis_size=towers, axis_name=TOWER_AXIS)
        same, own = mapped(shared, leaves)
        return jax.tree.map(lambda x: x[0], same), own

    return call


def in_towers() -> bool:
    """Returns whether the code runs inside a tower."""
    try:
        jax.lax.axis_size(TOWER_AXIS)
    except NameError:  # jax's answer where no such axis is bound
        return False
    return True


def num_towers() -> int:
    """The number of towers that run side by side; 1 outside of towers.

    >>> num_towers()
    1
    """
    return jax.lax.axis_size(TOWER_AXIS) if in_towers() else 1


def are_on_one_device() -> bool:
    """Returns whether several towers run together on one device, where `axis_index_groups` are not supported."""
    return num_towers() > 1 and TOWER_AXIS not in jax.sharding.get_abstract_mesh().axis_names


def tower_index() -> jax.Array:
    """The number of this tower, an int32 scalar; 0 outside of towers.

    >>> print(tower_index())
    0
    """
    return jax.lax.axis_index(TOWER_AXIS) if num_towers() > 1 else jnp.int32(0)


def one_sum(x: jax.Array) -> jax.Array:
    if PART_AXIS in jax.sharding.get_abstract_mesh().axis_names and x.dtype in _WIDER:
        return jax.lax.psum(x.astype(_WIDER[x.dtype]), TOWER_AXIS).astype(x.dtype)
    return jax.lax.psum(x, TOWER_AXIS)


# XLA sums these as the wider ones, the first on CPUs, the others on GPUs. In a mesh that is mapped in part it ends the
# process at the attempt ("Invalid binary instruction opcode copy", up to jax 0.12), so there the sums begin that way.
_WIDER = {
    jnp.dtype(jnp.bfloat16): jnp.float32,
    jnp.dtype(jnp.int16): jnp.int32,
    jnp.dtype(jnp.uint16): jnp.uint32,
}
