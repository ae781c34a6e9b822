"""Runs one model_fn on every local device: the batch is split, gradients are summed, results are merged.

This file is the table of contents; every name has its explanation where it is defined.
"""

from typing import TYPE_CHECKING

from estimator.replication import initialize_distributed
from estimator.replication import names_missing_in as _names_missing_in
from replicate import cross_tower_ops
from replicate._caffe2_names import NAMES as _CAFFE2_NAMES
from replicate._replicate_model_fn import replicate_model_fn
from replicate._strategies import (
    CollectiveAllReduceStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
)
from replicate.block_sync._block_sync import BlockSync, bmuf
from replicate.explain import explain
from replicate.placement._distribution import VariableDistribution
from replicate.runner._tower_optimizer import TowerOptimizer
from replicate.towers._collectives import cross_tower_mean, cross_tower_sum
from replicate.towers._map import TOWER_AXIS, num_towers, tower_index

__all__ = [
    "TOWER_AXIS",
    "BlockSync",
    "CollectiveAllReduceStrategy",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "TowerOptimizer",
    "VariableDistribution",
    "bmuf",
    "cross_tower_mean",
    "cross_tower_ops",
    "cross_tower_sum",
    "explain",
    "initialize_distributed",
    "num_towers",
    "replicate_model_fn",
    "tower_index",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__, others=_CAFFE2_NAMES)
