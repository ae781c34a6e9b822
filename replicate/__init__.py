"""Runs one model_fn on every local device: the batch is split, gradients are summed, results are merged.

This file is the table of contents; every name has its explanation where it is defined.
"""

from replicate import cross_tower_ops
from replicate._block_sync import BlockSync, bmuf
from replicate._distribution import VariableDistribution
from replicate._initialize_distributed import initialize_distributed
from replicate._replicate import replicate_model_fn
from replicate._tower_optimizer import TowerOptimizer
from replicate._towers import (
    TOWER_AXIS,
    cross_tower_mean,
    cross_tower_sum,
    num_towers,
    tower_index,
)
from replicate.explain import explain

__all__ = [
    "TOWER_AXIS",
    "BlockSync",
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
