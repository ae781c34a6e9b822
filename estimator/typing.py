"""The types of what a model_fn and its state are made of."""

from estimator.core._placement import Read, Step
from estimator.core._typing import Features, Gradients, Labels, Partitions, PyTree, Shardings, Slots, Tree, Variables

__all__ = [
    "Features",
    "Gradients",
    "Labels",
    "Partitions",
    "PyTree",
    "Read",
    "Shardings",
    "Slots",
    "Step",
    "Tree",
    "Variables",
]
