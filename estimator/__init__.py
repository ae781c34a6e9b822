"""An Estimator for JAX: write one `model_fn(features, labels, mode, params)`, and get the loop around it.

This file is the table of contents; every name has its explanation where it is defined.
"""

from estimator import export, inputs, losses, metrics
from estimator._embedding import embedding_lookup
from estimator._estimator import Estimator
from estimator._indexed_slices import IndexedSlices
from estimator._lazy import lazy
from estimator._modes import ModeKeys
from estimator._optimizer import Optimizer, TrainOp, group
from estimator._random import global_step, make_rng
from estimator._run_config import RunConfig
from estimator._spec import EstimatorSpec
from estimator._train import NanLossDuringTrainingError
from estimator._transform import Model, State, transform
from estimator._variables import (
    AUTO_REUSE,
    VariableAggregation,
    assign,
    assign_add,
    get_variable,
    read_variable,
    variable_scope,
)
from estimator.losses import Reduction

__all__ = [
    "AUTO_REUSE",
    "Estimator",
    "EstimatorSpec",
    "IndexedSlices",
    "ModeKeys",
    "Model",
    "NanLossDuringTrainingError",
    "Optimizer",
    "Reduction",
    "RunConfig",
    "State",
    "TrainOp",
    "VariableAggregation",
    "assign",
    "assign_add",
    "embedding_lookup",
    "export",
    "get_variable",
    "global_step",
    "group",
    "inputs",
    "lazy",
    "losses",
    "make_rng",
    "metrics",
    "read_variable",
    "transform",
    "variable_scope",
]
