"""Sums and copies over towers: the algorithms, and the choice among them."""

from typing import TYPE_CHECKING

from estimator.replication import names_missing_in as _names_missing_in
from replicate.cross_tower_ops._all_reduce import AllReduce, CollectiveAllReduce
from replicate.cross_tower_ops._auto import choose_the_best
from replicate.cross_tower_ops._base import CrossTowerOps, ReduceOp
from replicate.cross_tower_ops._multi_worker import MultiWorkerAllReduce
from replicate.cross_tower_ops._per_tower import Mirrored, PerTower
from replicate.cross_tower_ops._reduction_to_one_device import ReductionToOneDevice, add_n
from replicate.towers._packing import AggregateSmallTensorPacker, ConcatAndSplitPacker

__all__ = [
    "AggregateSmallTensorPacker",
    "AllReduce",
    "CollectiveAllReduce",
    "ConcatAndSplitPacker",
    "CrossTowerOps",
    "Mirrored",
    "MultiWorkerAllReduce",
    "PerTower",
    "ReduceOp",
    "ReductionToOneDevice",
    "add_n",
    "choose_the_best",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(
        __name__,
        others={
            "AllReduceCrossDeviceOps": "`AllReduce(algorithm)`",
            "AllReduceCrossTowerOps": "`AllReduce(algorithm)`",
            "CrossDeviceOps": "`CrossTowerOps`",
            "HierarchicalCopyAllReduce": '`AllReduce("hierarchical")`',
            "NcclAllReduce": '`AllReduce("psum")`',
            "PerDevice": "`PerTower`",
            "ReductionToOneDeviceCrossTowerOps": "`ReductionToOneDevice(reduce_to_device, accumulation_fn)`",
        },
    )
