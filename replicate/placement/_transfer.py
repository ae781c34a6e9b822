"""Arrays moved between devices, many small ones together: a transfer costs some 50 us however small it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicate.towers._packing import SMALL, pack, unpack


def transfer(arrays: Sequence[jax.Array], targets: Sequence[Any], lead: int = 0) -> list[jax.Array]:
    """`jax.device_put` of each array to its target, with one transfer for all small arrays of one kind.

    >>> there = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    >>> moved = transfer([jnp.ones(2), jnp.zeros((2, 2))], [there, there])
    >>> [array.shape for array in moved], moved[0].sharding == there
    ([(2,), (2, 2)], True)

    Args:
      arrays: on any devices, or of numpy.
      targets: a sharding for each.
      lead: the number of leading dimensions that all arrays have in common, such as one over the towers, along which
        they may be sharded.
    """
    moved: list[Any] = list(arrays)
    groups: dict[Any, list[int]] = {}
    for i, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        source = getattr(array, "sharding", None)  # a numpy array has none
        if source != target:  # else it is there already
            is_packed = array.nbytes < SMALL and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
            groups.setdefault((source, target, array.dtype) if is_packed else i, []).append(i)
    alone = [i for mine in groups.values() if len(mine) == 1 for i in mine]
    for i, array in zip(alone, jax.device_put([arrays[i] for i in alone], [targets[i] for i in alone]), strict=True):
        moved[i] = array
    for mine in groups.values():
        if len(mine) > 1:
            packed = jax.device_put(_pack([arrays[i] for i in mine], lead), targets[mine[0]])
            parts = _unpack(packed, tuple(arrays[i].shape[lead:] for i in mine))
            for i, array in zip(mine, parts, strict=True):
                moved[i] = array
    return moved


_pack = jax.jit(pack, static_argnums=1)
_unpack = jax.jit(unpack, static_argnums=1)
