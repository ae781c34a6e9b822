"""The types of what a model_fn and its state are made of."""

from estimator.core._model_fn import ModelFn
from estimator.core._placement import Read, Step, Steps
from estimator.core._typing import (
    Features,
    Forward,
    Gradients,
    Labels,
    Partitions,
    PyTree,
    Shardings,
    Slots,
    Tree,
    Variables,
)

__all__ = [
    "Features",
    "Forward",
    "Gradients",
    "Labels",
    "ModelFn",
    "Partitions",
    "PyTree",
    "Read",
    "Shardings",
    "Slots",
    "Step",
    "Steps",
    "Tree",
    "Variables",
]
