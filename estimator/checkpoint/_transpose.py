"""Arrays that lie transposed in another library's file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from estimator.checkpoint._named_arrays import ShapeDtype
from estimator.storage._array_files import Kind

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Transpose:
    """The name of an array in a file, whose transpose a variable is.

    PyTorch's layers have their outputs first. A `weight` of `torch.nn.Linear` is the transpose of a kernel of
    `est.layers.dense`; of `torch.nn.Conv2d`, whose axes are outputs, inputs, height and width, it is the kernel of
    `est.layers.conv2d` by the axes (2, 3, 1, 0).

    >>> Transpose("classifier.weight")
    Transpose(name='classifier.weight', axes=None)
    >>> Transpose("conv1.weight", axes=(2, 3, 1, 0)).order(4)
    (2, 3, 1, 0)

    Args:
      name: of the array in the file.
      axes: of the array in the file, in the order that the variable has them, as for `numpy.transpose`; if None, the
        reverse order.

    Raises:
      ValueError: the name is not a string, or empty; the axes are not a permutation.
    """

    name: str
    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"`est.Transpose` needs the name of an array in a file; got {self.name!r}.")
        if self.axes is not None:
            object.__setattr__(self, "axes", tuple(self.axes))  # the class is frozen
            if sorted(self.axes) != list(range(len(self.axes))):
                raise ValueError(
                    f"`est.Transpose({self.name!r})` needs each axis once, such as (2, 3, 1, 0); got {self.axes!r}."
                )

    def order(self, ndim: int) -> tuple[int, ...]:
        """The axes of an array of `ndim` dimensions in the file, in the order that the variable has them.

        Raises:
          ValueError: the array has another number of dimensions than the axes.
        """
        axes = tuple(reversed(range(ndim))) if self.axes is None else tuple(self.axes)
        if len(axes) != ndim:
            raise ValueError(
                f"{self!r} has {len(axes)} axes, and the array {ndim}. Give one for each of its dimensions."
            )
        return axes

    def kind(self, there: ShapeDtype) -> ShapeDtype:
        """The shape and dtype of the variable for those in the file."""
        return Kind(tuple(there.shape[axis] for axis in self.order(len(there.shape))), there.dtype)

    def invert(self, value: np.ndarray) -> np.ndarray:
        """The array in the file for the value of the variable."""
        return value.transpose(np.argsort(self.order(value.ndim)))
