"""Outputs that a model_fn offers for export, in named groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

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
      outputs: batch-major arrays by name, in a dict or a NamedTuple; a single array is "output", as in TensorFlow.
    """

    outputs: dict[str, Any]

    def __post_init__(self) -> None:
        if hasattr(self.outputs, "_asdict"):
            object.__setattr__(self, "outputs", self.outputs._asdict())
        if not isinstance(self.outputs, dict):
            object.__setattr__(self, "outputs", {"output": self.outputs})


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class ClassificationOutput(ExportOutput):
    """Scores, classes, or both.

    No compiled program holds strings, so they cannot be computed from a batch as in TensorFlow, where `classes` has
    a string for every score. Names of classes are given once, for all examples; they stay on the host, the same in
    all towers.

    >>> import jax, jax.numpy as jnp
    >>> @jax.jit
    ... def compute(scores):
    ...     return ClassificationOutput(scores, classes=["cat", "dog"])
    >>> output = compute(jnp.ones((3, 2)))
    >>> output.scores.shape, output.classes.tolist()
    ((3, 2), ['cat', 'dog'])

    Attributes:
      scores: float array of shape `(batch, classes)`.
      classes: integer array of shape `(batch,)` or `(batch, classes)`; or the names of the columns of `scores`, an
        array or list of strings of shape `(classes,)`, which becomes a numpy array.

    Raises:
      ValueError: there is neither of both, or there are names of another shape, or without scores.
    """

    scores: Any = None
    classes: Any = None

    def __post_init__(self) -> None:
        if self.scores is None and self.classes is None:
            raise ValueError("`ClassificationOutput` needs `scores`, `classes` or both; got neither.")
        if _are_strings(self.classes):
            # By way of a list, which turns an array of objects into one of strings.
            names = np.array(np.asarray(self.classes).tolist())
            if names.ndim != 1 or np.shape(self.scores)[-1:] != names.shape:
                scores = "no scores" if self.scores is None else f"scores of shape {np.shape(self.scores)}"
                raise ValueError(
                    f"`ClassificationOutput` got strings of shape {names.shape} as classes, with {scores}. Strings are "
                    "the names of the columns of scores, shape (classes,), the same for every example. "
                    "Return classes that depend on the example as integers."
                )
            object.__setattr__(self, "classes", names)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        # A tuple: jax compares and hashes what is static, which arrays do not allow.
        names = tuple(self.classes.tolist()) if _are_strings(self.classes) else None
        classes = None if names else self.classes
        key = jax.tree_util.GetAttrKey
        return ((key("scores"), self.scores), (key("classes"), classes)), names

    @classmethod
    def tree_unflatten(cls, names: tuple[Any, ...] | None, children: tuple[Any, ...]) -> ClassificationOutput:
        # Unchecked: jax also rebuilds outputs around placeholders.
        output = object.__new__(cls)
        object.__setattr__(output, "scores", children[0])
        object.__setattr__(output, "classes", np.array(names) if names else children[1])
        return output


def _are_strings(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        value = value.ravel().tolist()
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, str | bytes) for item in value)
    return isinstance(value, np.ndarray) and value.dtype.kind in "SU"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegressionOutput(ExportOutput):
    """One value per example.

    Attributes:
      value: float array of shape `(batch,)` or `(batch, k)`.
    """

    value: Any
