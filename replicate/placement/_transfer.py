"""Arrays moved between devices, many small ones together: a transfer costs some 50 us however small it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator.typing import PyTree
from replicate.towers._packing import SMALL, by_dtype, pack, unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Arrays of a pytree, small ones of one dtype in a vector; a pytree itself, so that programs take and return it.

    >>> packed = Packed.of({"a": jnp.ones(2), "b": jnp.zeros((2, 2))})
    >>> [vector.shape for vector in packed.vectors], packed.tree()["b"].shape
    ([(6,)], (2, 2))

    Attributes:
      vectors: what to move.
    """

    vectors: list[jax.Array]
    _groups: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    _shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    _structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: PyTree, lead: int = 0) -> Packed:
        """
        Args:
          tree: of arrays.
          lead: the number of leading dimensions that all arrays have in common, such as one over the towers, along
            which they may be sharded.
        """
        arrays, structure = jax.tree.flatten(tree)
        is_small = [x.nbytes < SMALL and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in arrays]
        small, others = ([i for i, is_so in enumerate(is_small) if is_so == kind] for kind in (True, False))
        groups = [*by_dtype(arrays, small), *([i] for i in others)]
        vectors = [arrays[g[0]] if len(g) == 1 else pack([arrays[i] for i in g], lead) for g in groups]
        return cls(vectors, tuple(map(tuple, groups)), tuple(x.shape[lead:] for x in arrays), structure)

    def tree(self) -> PyTree:
        """The pytree again."""
        arrays: list[Any] = [None] * len(self._shapes)
        for vector, group in zip(self.vectors, self._groups, strict=True):
            parts = [vector] if len(group) == 1 else unpack(vector, [self._shapes[i] for i in group])
            for i, array in zip(group, parts, strict=True):
                arrays[i] = array
        return jax.tree.unflatten(self._structure, arrays)


def packed_by_source(arrays: Sequence[jax.Array], target: Any) -> list[Packed]:
    """The arrays on a target, packed by sharding: dicts of them by their positions."""
    # Only arrays on the same devices are packed: a program runs on one set of them.
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault(getattr(array, "sharding", None), []).append(i)  # a numpy array has none
    parcels = [(_pack if len(mine) > 1 else Packed.of)({i: arrays[i] for i in mine}) for mine in groups.values()]
    return jax.device_put(parcels, target)


def transfer(arrays: Sequence[jax.Array], target: Any) -> list[jax.Array]:
    """`jax.device_put` of each array, with one transfer for all small arrays of one kind.

    >>> there = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    >>> moved = transfer([jnp.ones(2), jnp.zeros((2, 2))], there)
    >>> [array.shape for array in moved], moved[0].sharding == there
    ([(2,), (2, 2)], True)
    """
    moved = list(arrays)
    away = [i for i, array in enumerate(arrays) if getattr(array, "sharding", None) != target]
    if len(away) == 1:
        moved[away[0]] = jax.device_put(arrays[away[0]], target)
    elif away:
        parcels = packed_by_source([arrays[i] for i in away], target)
        for i, array in joined_parcels(_unpack(parcels)).items():
            moved[away[i]] = array
    return moved


def joined_parcels(trees: list[dict[int, jax.Array]]) -> dict[int, jax.Array]:
    return {i: array for tree in trees for i, array in tree.items()}


@jax.jit
def _pack(arrays: dict[int, jax.Array]) -> Packed:
    return Packed.of(arrays)


@jax.jit
def _unpack(parcels: list[Packed]) -> list[PyTree]:
    return [packed.tree() for packed in parcels]
