"""How values are summed and copied over towers: the algorithms, and what chooses among them."""

from replicate.cross_tower_ops._cross_tower_ops import CrossTowerOps, ReduceOp

__all__ = [
    "CrossTowerOps",
    "ReduceOp",
]
