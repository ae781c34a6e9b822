"""What every way of summing over towers has in common."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence

import jax


class ReduceOp(enum.StrEnum):
    """How the values of several towers become one.

    Attributes:
      SUM: their sum.
      MEAN: their sum divided by the number of towers, of all processes.
    """

    SUM = "sum"
    MEAN = "mean"


class CrossTowerOps(abc.ABC):
    """A way of summing over towers, for `replicate_model_fn(..., cross_tower_ops=...)` and for values outside."""

    @abc.abstractmethod
    def sum_in_towers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The sum over towers of each array, the same in all of them; to be called inside the towers.

        Args:
          values: in the order in which they are used; any shapes and dtypes, the same in all towers.
        """
