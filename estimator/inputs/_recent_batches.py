"""Batches of the last steps, to look into when the loss of one is NaN."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jax.tree_util import tree_leaves

from estimator.core._batch import describe_nan
from estimator.core._typing import PyTree

_MOST_BYTES = 1 << 27  # of large batches only the last few are kept


class RecentBatches:
    """The batches of the steps whose losses are not known yet, and the one before them.

    >>> import numpy as np
    >>> recent = RecentBatches(step=0)
    >>> recent.add([({"x": np.float32([[1], [np.nan]])}, None)])
    >>> recent.describe_nan(1)
    "In the batch of step 1, features['x'] holds 1 NaN, in row 1"

    Args:
      step: the last one that was made before.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._most: int | None = None  # the number of batches to keep
        # The number of the first step, and the batches, of each program.
        self._programs: collections.deque[tuple[int, Sequence[tuple[PyTree, PyTree]]]] = collections.deque()

    def add(self, pairs: Sequence[tuple[PyTree, PyTree]]) -> None:
        """Takes the batches of the next program, a step each."""
        # The first batch stands for all: to measure each would cost a small step time.
        if self._most is None:
            self._most = _MOST_BYTES // max(1, sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(pairs[0])))
        self._programs.append((self._step + 1, pairs))
        self._step += len(pairs)
        while self._programs and self._step - self._programs[0][0] >= self._most:
            self._programs.popleft()

    def forget_until(self, step: int) -> None:
        """Drops the programs that were over before this step."""
        while self._programs and self._programs[0][0] + len(self._programs[0][1]) <= step:
            self._programs.popleft()

    def describe_nan(self, step: int) -> str:
        """The NaN and infinities in the batch of a step, or else of the one before, which may show in its gradients
        only; nothing if there are none, or the batch is not known any more."""
        for number in (step, step - 1):
            for first, pairs in self._programs:
                if 0 <= number - first < len(pairs) and (found := describe_nan(*pairs[number - first])):
                    return f"In the batch of step {number}, {found}"
        return ""
