"""The types of what a model_fn and its state are made of."""

from estimator.core._placement import Read, Step
from estimator.core._typing import Gradients, Partitions, PyTree, Shardings, Slots, Tree, Variables

__all__ = ["Gradients", "Partitions", "PyTree", "Read", "Shardings", "Slots", "Step", "Tree", "Variables"]
