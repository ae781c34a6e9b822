"""Many arrays as one vector, and back: a collective, like a transfer, has a cost of its own, however small it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

SMALL = 2**16
"""Bytes from which on an array goes by itself, since packing copies it, where it is gathered or moved. Sums are packed
as `replicate.cross_tower_ops` says."""


def by_dtype(arrays: Sequence[jax.Array], positions: Iterable[int]) -> list[list[int]]:
    """The positions, in their order, of the arrays of each dtype."""
    groups: dict[jnp.dtype, list[int]] = {}
    for i in positions:
        groups.setdefault(arrays[i].dtype, []).append(i)
    return list(groups.values())


def pack(arrays: Sequence[jax.Array], lead: int = 0) -> jax.Array:
    """The arrays, of one dtype, one after the other in the last dimension.

    >>> pack([jnp.ones((2, 1, 2)), jnp.zeros((2, 1))], lead=1).shape
    (2, 3)

    Args:
      lead: the number of leading dimensions, which all have in common, that stay.
    """
    flat = [x.reshape((*x.shape[:lead], -1)) for x in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=lead)


def unpack(packed: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The arrays again; leading dimensions of `packed` come before each shape.

    >>> [x.shape for x in unpack(jnp.ones((2, 3)), [(1, 2), (1,)])]
    [(2, 1, 2), (2, 1)]
    """
    sizes = [math.prod(shape) for shape in shapes]
    ends = itertools.accumulate(sizes)
    lead = packed.shape[:-1]
    return [
        packed[..., end - size : end].reshape((*lead, *shape))
        for size, end, shape in zip(sizes, ends, shapes, strict=True)
    ]
