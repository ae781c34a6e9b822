"""Many arrays as fewer vectors, and back: a collective, like a transfer, has a cost of its own, however small it is.

Arrays of different dtypes never share a vector. What is to be summed is packed in the reverse order of its use: the
backward pass ends at the first variable, so that the first vector may be on its way before the last gradient is known.
"""

from __future__ import annotations

import abc
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
    """Inverse of `pack`; leading dimensions of `packed` come before each shape.

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


class Packer(abc.ABC):
    """Packs arrays into vectors, and unpacks them; keeps nothing from one call to the next."""

    num_packs = 1  # the vectors that a group is cut into

    @abc.abstractmethod
    def groups(self, arrays: Sequence[jax.Array]) -> list[list[int]]:
        """The positions of the arrays that share vectors, by group."""

    def pack(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Vectors that hold all elements of the arrays."""
        vectors = (pack([arrays[i] for i in group]) for group in self.groups(arrays))
        return [piece for vector in vectors for piece in split_vector(vector, self.num_packs)]

    def unpack(self, packs: Iterable[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Inverse of `pack`.

        Args:
          packs: as many and as long as `pack` returned them.
          arrays: what was packed, for the shapes.
        """
        unpacked, left = list(arrays), iter(packs)
        for group in self.groups(arrays):
            size = sum(arrays[i].size for i in group)
            vector = pack(list(itertools.islice(left, _pieces(size, self.num_packs))))
            for i, array in zip(group, unpack(vector, [arrays[i].shape for i in group]), strict=True):
                unpacked[i] = array
        return unpacked


class ConcatAndSplitPacker(Packer):
    """All arrays of a dtype in one vector, which is cut into nearly equal pieces, as TensorFlow's packer of this name.

    >>> packer = ConcatAndSplitPacker(num_packs=2)
    >>> arrays = [jnp.ones((2, 2)), jnp.zeros(1)]
    >>> packs = packer.pack(arrays)
    >>> [str(pack) for pack in packs]
    ['[0. 1. 1.]', '[1. 1.]']
    >>> [array.shape for array in packer.unpack(packs, arrays)]
    [(2, 2), (1,)]

    Args:
      num_packs: the number of pieces; fewer where there are fewer elements.

    Raises:
      ValueError: `num_packs` is not an integer of at least 1.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = at_least(1, "ConcatAndSplitPacker", "num_packs", num_packs)

    def groups(self, arrays: Sequence[jax.Array]) -> list[list[int]]:
        return by_dtype(arrays, reversed(range(len(arrays))))


class AggregateSmallTensorPacker(Packer):
    """Small arrays that follow one another in groups, others alone, as TensorFlow's packer of this name.

    >>> packer = AggregateSmallTensorPacker(max_bytes=8, max_group=2)
    >>> arrays = [jnp.ones(1), jnp.zeros(2), jnp.ones(1), jnp.zeros(3)]
    >>> [str(pack) for pack in packer.pack(arrays)]
    ['[0. 0. 0.]', '[1. 0. 0.]', '[1.]']

    Args:
      max_bytes: the size up to which an array is small; 0 leaves every array alone.
      max_group: the number of arrays in a group at most.

    Raises:
      ValueError: `max_bytes` is not an integer of at least 0, or `max_group` not one of at least 1.
    """

    def __init__(self, max_bytes: int = 1 << 20, max_group: int = 16) -> None:
        self.max_bytes = at_least(0, "AggregateSmallTensorPacker", "max_bytes", max_bytes)
        self.max_group = at_least(1, "AggregateSmallTensorPacker", "max_group", max_group)

    def groups(self, arrays: Sequence[jax.Array]) -> list[list[int]]:
        def is_small(i: int) -> bool:
            return arrays[i].nbytes <= self.max_bytes

        groups: list[list[int]] = []
        # In reverse order: the gradients of the last layers are ready first, and so are their packs.
        for mine in by_dtype(arrays, reversed(range(len(arrays)))):
            for small, run in itertools.groupby(mine, is_small):
                positions, size = list(run), self.max_group if small else 1
                groups.extend(positions[begin : begin + size] for begin in range(0, len(positions), size))
        return groups


def split_vector(vector: jax.Array, pieces: int) -> list[jax.Array]:
    """Splits a vector into nearly equal pieces; fewer where there are fewer elements."""
    count = _pieces(vector.size, pieces)
    return [vector] if count == 1 else jnp.array_split(vector, count)


def at_least(least: int, caller: str, name: str, value: int) -> int:
    """The value, if it is an integer of at least `least`; else raises a ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{caller}` needs an integer of at least {least} as `{name}`; got {value!r}.")
    return value


def _pieces(size: int, pieces: int) -> int:
    return max(1, min(size, pieces))
