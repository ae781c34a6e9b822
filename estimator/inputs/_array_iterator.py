"""Iterates over the rows of arrays in batches; the iteration can be resumed at any position."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Arrays = np.ndarray | dict[Any, np.ndarray]
Index = slice | np.ndarray  # of rows


@dataclasses.dataclass(frozen=True)
class Order:
    """The order and the batches in which to read rows: arguments of `numpy_input_fn`, checked on construction."""

    batch_size: int
    num_epochs: int | None
    shuffle: bool
    seed: int | None
    drop_remainder: bool

    def __post_init__(self) -> None:
        if not isinstance(self.shuffle, bool):
            raise ValueError(
                "shuffle must be provided and explicitly set as boolean (it is recommended to set it "
                f"as True for training); got {self.shuffle!r}."
            )
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("num_epochs", 1 if self.num_epochs is None else self.num_epochs, 1),
            ("seed", 0 if self.seed is None else self.seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} must be an int >= {least}; got {value!r}.")


class RowBatches(Iterator[Any]):
    """Batches of `n` rows. The position is a dict of ints; another iterator can resume from it, with any batch size.

    The permutation of an epoch depends on the seed and the epoch only, so no earlier row has to be read again.

    >>> first = RowBatches(4, Order(3, 2, True, None, False), list)
    >>> batch, state, rest = next(first), first.get_state(), list(first)
    >>> other = RowBatches(4, Order(3, 2, True, None, False), list)
    >>> other.set_state(state)
    >>> list(other) == rest
    True

    Args:
      n: the number of rows.
      order: their order and the batches.
      take: returns a batch for the indices of its rows, a slice or an array of ints.
      owner: kept as long as rows are taken.
    """

    def __init__(self, n: int, order: Order, take: Callable[[Index], Any], owner: object = None) -> None:
        self._n, self._order, self._take, self._owner = n, order, take, owner
        self._seed = secrets.randbits(63) if order.seed is None else int(order.seed)
        self._total = math.inf if order.num_epochs is None else n * order.num_epochs
        self._count = 0  # of rows yielded so far, over all epochs
        # The counts between which a batch is a slice.
        self._epoch_start: int = 0
        self._epoch_stop: float = 0
        self._permuted: tuple[int, np.ndarray] | None = None  # the epoch last used, and its order

    def __next__(self) -> Any:
        first = self._count
        stop = first + self._order.batch_size
        if stop <= self._epoch_stop:  # by far the most batches where nothing is shuffled
            self._count = stop
            return self._take(slice(first - self._epoch_start, stop - self._epoch_start))  # copies nothing
        if stop > self._total:
            stop = first if self._order.drop_remainder else int(self._total)
            if stop == first:
                raise StopIteration
        index = self._index(stop - first)
        self._count = stop
        if not self._order.shuffle:
            self._epoch_start = stop // self._n * self._n
            self._epoch_stop = min(self._epoch_start + self._n, self._total)
        return self._take(index)

    def get_state(self) -> dict[str, int]:
        """The position: the epoch, the row in it, the number of rows, and the seed if it shuffles."""
        epoch, offset = divmod(self._count, self._n)
        state = {"epoch": epoch, "offset": offset, "rows": self._n}
        return {**state, "seed": self._seed} if self._order.shuffle else state

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from a position of `get_state`, with the seed of that iterator."""
        own = self.get_state()
        if not isinstance(state, dict) or state.keys() != own.keys() or state["rows"] != self._n:
            raise ValueError(
                f"The position {state!r} is not one of this input, whose position is now {own!r}. Resume with the "
                "same number of rows and the same `shuffle`, or start the input from the beginning."
            )
        self._count = int(state["epoch"]) * self._n + int(state["offset"])
        self._seed = int(state.get("seed", self._seed))
        self._epoch_start = self._epoch_stop = 0
        self._permuted = None

    def _index(self, size: int) -> Index:
        epoch, first = divmod(self._count, self._n)
        if not self._order.shuffle:
            rows = slice(first, first + size)
            return rows if rows.stop <= self._n else np.arange(first, rows.stop) % self._n
        parts = []
        while size:
            parts.append(self._permutation(epoch)[first : first + size])
            size -= len(parts[-1])
            epoch, first = epoch + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._permuted is None or self._permuted[0] != epoch:
            # It depends on seed and epoch only: a position of a few numbers can resume in the middle of any epoch.
            self._permuted = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._n)
        return self._permuted[1]


def rows_input_fn(
    features: Arrays, labels: Arrays | None, order: Order, owner: object = None
) -> Callable[[], RowBatches]:
    """An input_fn whose calls each read the rows from the beginning; it yields only features if `labels` is None.

    Args:
      owner: of the memory of the arrays, where that is another object.

    Raises:
      ValueError: the arrays differ in their numbers of rows, or have none.
    """
    n = _common_length(features, {} if labels is None else labels)
    of_features = _rows_of(features)
    if labels is None:
        return lambda: RowBatches(n, order, of_features, owner)
    of_labels = _rows_of(labels)
    return lambda: RowBatches(n, order, lambda index: (of_features(index), of_labels(index)), owner)


def _rows_of(arrays: Arrays) -> Callable[[Index], Arrays]:
    if not isinstance(arrays, dict):
        return arrays.__getitem__
    items = arrays.items()
    return lambda index: {key: array[index] for key, array in items}


def _common_length(x: Arrays, y: Arrays) -> int:
    lengths = {array.shape[:1] for arrays in (x, y) for array in _as_list(arrays)}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "Length of tensors in x and y is mismatched. All arrays must have the same number of "
            f"rows; got shapes in x: {_shapes(x)}, shapes in y: {_shapes(y)}."
        )
    [(n,)] = lengths
    if n == 0:
        raise ValueError(f"x cannot be an empty array; got shapes in x: {_shapes(x)}.")
    return n


def _as_list(arrays: Arrays) -> list[np.ndarray]:
    return list(arrays.values()) if isinstance(arrays, dict) else [arrays]


def _shapes(arrays: Arrays) -> str:
    if not isinstance(arrays, dict):
        return f"{arrays.shape}"
    return ", ".join(f"{key!r}: {array.shape}" for key, array in arrays.items())
