"""Sums over towers in chunks of N arrays."""

from __future__ import annotations

import sys

from replicate.cross_tower_ops._all_reduce import AllReduce
from replicate.cross_tower_ops._packers import at_least


class CollectiveAllReduce(AllReduce):
    """Sums arrays by XLA's own all-reduce, one for each N arrays of a dtype; TensorFlow's class of this name.

    As there, row-sparse gradients (`est.IndexedSlices`) are refused.

    >>> ops = CollectiveAllReduce(all_reduce_merge_scope=8)

    Args:
      all_reduce_merge_scope: N, the number of arrays in an all-reduce.

    Raises:
      ValueError: `all_reduce_merge_scope` is not an integer of at least 1.
    """

    takes_slices = False

    def __init__(self, all_reduce_merge_scope: int = 32) -> None:
        at_least(1, "CollectiveAllReduce", "all_reduce_merge_scope", all_reduce_merge_scope)
        super().__init__(
            num_packs=0, agg_small_grads_max_bytes=sys.maxsize, agg_small_grads_max_group=all_reduce_merge_scope
        )
