"""How values are summed and copied over towers: the algorithms, and what chooses among them."""

from replicate.cross_tower_ops._all_reduce import AllReduce
from replicate.cross_tower_ops._cross_tower_ops import CrossTowerOps, ReduceOp
from replicate.cross_tower_ops._packers import AggregateSmallTensorPacker, ConcatAndSplitPacker

__all__ = [
    "AggregateSmallTensorPacker",
    "AllReduce",
    "ConcatAndSplitPacker",
    "CrossTowerOps",
    "ReduceOp",
]
