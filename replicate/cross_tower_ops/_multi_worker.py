"""Sums over towers by an algorithm for each range of sizes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from replicate.cross_tower_ops._algorithms import all_reduce, check_algorithm
from replicate.cross_tower_ops._all_reduce import AllReduce
from replicate.towers._packing import at_least, pack, split_vector


class _Spec(NamedTuple):
    """The algorithm for arrays of up to `limit` bytes, and the number of pieces into which a pack is cut."""

    algorithm: str
    shards: int
    limit: int


class MultiWorkerAllReduce(AllReduce):
    """Sums arrays by an algorithm that depends on their size; TensorFlow's `MultiWorkerAllReduce`.

    The arrays of each range of sizes are packed by themselves, as by `AllReduce`.

    >>> ops = MultiWorkerAllReduce([("tree", 1, 4096), ("ring/psum", 2, None)], num_packs=1)

    Args:
      all_reduce_spec: tuples (algorithm, shards, limit in bytes), with rising limits; the last has none (None or -1).
        Or one tuple, or the name of an algorithm. By default there is one shard and no limit.
      num_packs: see `AllReduce`; here 0, as in TensorFlow, so that each array is summed by itself.
      agg_small_grads_max_bytes: see `AllReduce`.
      agg_small_grads_max_group: see `AllReduce`.

    Raises:
      TypeError: `all_reduce_spec` is neither a name nor a tuple nor a list of tuples.
      ValueError: there is no such algorithm, shards are less than 1, limits do not rise, the last entry has one, or
        both ways of packing are requested.
    """

    def __init__(
        self,
        all_reduce_spec: Sequence[Any] = ("psum/psum", 2, -1),
        num_packs: int = 0,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        super().__init__(
            num_packs=num_packs,
            agg_small_grads_max_bytes=agg_small_grads_max_bytes,
            agg_small_grads_max_group=agg_small_grads_max_group,
        )
        self._spec = _check_spec(all_reduce_spec)

    def _sum(self, arrays: list[jax.Array]) -> list[jax.Array]:
        sums = list(arrays)
        # -1: an empty array belongs to the first range.
        for spec, smaller in zip(self._spec, [-1, *(spec.limit for spec in self._spec)], strict=False):
            positions = [i for i, array in enumerate(arrays) if smaller < array.nbytes <= spec.limit]
            mine = [arrays[i] for i in positions]
            # Several collectives instead of a large one, which can run at the same time.
            packs = [split_vector(vector, spec.shards) for vector in self._packer.pack(mine)]
            totals = [pack([all_reduce(shard, spec.algorithm) for shard in shards]) for shards in packs]
            for i, total in zip(positions, self._packer.unpack(totals, mine), strict=True):
                sums[i] = total
        return sums


def _check_spec(all_reduce_spec: Any) -> list[_Spec]:
    entries: Any = (all_reduce_spec,) if isinstance(all_reduce_spec, str) else all_reduce_spec
    if isinstance(entries, tuple) and entries and isinstance(entries[0], str):
        entries = [entries]
    is_list = isinstance(entries, list | tuple) and entries
    if not is_list or not all(isinstance(entry, tuple) and 1 <= len(entry) <= 3 for entry in entries):
        raise TypeError(
            "`MultiWorkerAllReduce` takes tuples (algorithm, shards, limit in bytes) as all_reduce_spec, such as "
            f'[("tree", 1, 4096), ("ring", 2, None)]; got {all_reduce_spec!r}.'
        )
    specs = []
    for name, *numbers in entries:
        shards, limit = (*(numbers or [1]), None)[:2]
        check_algorithm("MultiWorkerAllReduce", name)
        at_least(1, "MultiWorkerAllReduce", "shards", shards)
        limit = sys.maxsize if limit in (None, -1) else limit
        specs.append(_Spec(name, shards, at_least(1, "MultiWorkerAllReduce", "limit", limit)))
    limits = [spec.limit for spec in specs]
    if limits != sorted(set(limits)) or limits[-1] != sys.maxsize:
        raise ValueError(
            "The limits in the all_reduce_spec of `MultiWorkerAllReduce` must rise, and the last entry must have none "
            f"(None or -1), so that there is an algorithm for every size; got {all_reduce_spec!r}."
        )
    return specs
