"""What a model_fn offers for export: named groups of outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

DEFAULT_SIGNATURE = "serving_default"


class ExportOutput:
    """Base of what `EstimatorSpec.export_outputs` may hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PredictOutput(ExportOutput):
    """Any outputs by name.

    >>> import jax.numpy as jnp
    >>> sorted(PredictOutput({"score": jnp.ones(3)}).outputs)
    ['score']

    Attributes:
      outputs: batch-major arrays by name; a single array is named "output", as in TensorFlow.
    """

    outputs: dict[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.outputs, dict):
            object.__setattr__(self, "outputs", {"output": self.outputs})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassificationOutput(ExportOutput):
    """Scores, classes, or both.

    Attributes:
      scores: float array of shape `(batch, classes)`.
      classes: array of shape `(batch,)` or `(batch, classes)`.
    """

    scores: Any = None
    classes: Any = None

    def __post_init__(self) -> None:
        if self.scores is None and self.classes is None:
            raise ValueError("`ClassificationOutput` needs `scores`, `classes` or both; got neither.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegressionOutput(ExportOutput):
    """One value per example.

    Attributes:
      value: float array of shape `(batch,)` or `(batch, k)`.
    """

    value: Any
