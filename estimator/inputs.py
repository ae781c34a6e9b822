"""Ready-made input functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.experimental.sparse import JAXSparse

__all__ = ["numpy_input_fn"]

Arrays = dict[Any, np.ndarray]


def numpy_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    *,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Callable[[], Iterator[Any]]:
    """Returns an input_fn that cuts arrays into batches.

    As in TensorFlow, `shuffle` has to be given, batches run on over the end of an epoch, and the
    last, smaller batch is kept. Unlike there, every epoch is a permutation of its own of all rows,
    `seed` repeats it, and all arguments are checked at once, not when the input_fn is called.

    >>> input_fn = numpy_input_fn({"x": np.arange(5)}, np.arange(5) * 10, 2, shuffle=False)
    >>> for features, labels in input_fn():
    ...     print(features["x"], labels)
    [0 1] [ 0 10]
    [2 3] [20 30]
    [4] [40]

    Args:
      x: features, an array of shape `(n, ...)` or a dict of such arrays.
      y: labels, an array of shape `(n, ...)`, a dict of such arrays, or None.
      batch_size: rows of a batch, at least 1.
      num_epochs: how often the rows are gone through; None: forever.
      shuffle: whether to permute the rows anew in each epoch.
      seed: what the permutations follow from: with one, every call of the input_fn has the same
        order; with None, every call has another.
      drop_remainder: whether to leave out the last batch where it is smaller than `batch_size`.

    Returns:
      An input_fn without arguments. Each call starts anew and gives an iterator of features (where
      `y` is None) or of `(features, labels)`, in arrays or dicts as `x` and `y` are; of shape
      `(batch_size, ...)`. Without `shuffle` they may be views of the arrays given.

    Raises:
      TypeError: `x` is neither an array nor a dict.
      ValueError: `shuffle` is no bool, there are no rows, `x` and `y` share a key, their lengths
        differ, or `batch_size` or `num_epochs` is below 1.
    """
    if not isinstance(shuffle, bool):
        raise ValueError(
            "shuffle must be provided and explicitly set as boolean (it is recommended to set it "
            f"as True for training); got {shuffle!r}."
        )
    _check_positive("batch_size", batch_size)
    if num_epochs is not None:
        _check_positive("num_epochs", num_epochs)
    features = _as_arrays("x", x)
    labels = {} if y is None else _as_arrays("y", y)
    n = _common_length(features, labels)
    if isinstance(x, dict) and isinstance(y, dict) and (duplicates := sorted(x.keys() & y.keys())):
        raise ValueError(
            f"{len(duplicates)} duplicate keys are found in both x and y: {duplicates}. Rename them in one of the two."
        )

    def input_fn() -> Iterator[Any]:
        rows = (
            _shuffled(n, batch_size, num_epochs, np.random.default_rng(seed))
            if shuffle
            else _in_order(n, batch_size, num_epochs)
        )
        for index, size in rows:
            if size < batch_size and drop_remainder:
                return
            batch = _take(features, index, isinstance(x, dict))
            yield batch if y is None else (batch, _take(labels, index, isinstance(y, dict)))

    return input_fn


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an int >= 1; got {value!r}.")


def _as_arrays(name: str, value: Any) -> Arrays:
    """The arrays of a dict by their keys; a lone array under the key None."""
    if not isinstance(value, dict) and not hasattr(value, "shape"):
        raise TypeError(
            f"{name} must be a dict or array; got {type(value).__name__}. Make one array of it by `np.asarray`."
        )
    if isinstance(value, dict) and not value:
        hint = "use None instead" if name == "y" else "give at least one feature"
        raise ValueError(f"{name} cannot be an empty dict, {hint}.")
    arrays = value if isinstance(value, dict) else {None: value}
    for key, array in arrays.items():
        if isinstance(array, JAXSparse):
            raise TypeError(
                f"{name if key is None else f'{name}[{key!r}]'} is sparse ({type(array).__name__}), and numpy cannot "
                "cut it into batches. Let your own input_fn yield a jax.experimental.sparse.BCOO for each batch."
            )
    return {key: np.asarray(array) for key, array in arrays.items()}


def _common_length(features: Arrays, labels: Arrays) -> int:
    lengths = {array.shape[:1] for array in (*features.values(), *labels.values())}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "Length of tensors in x and y is mismatched. All arrays must have the same number of "
            f"rows; got shapes in x: {_shapes(features)}, shapes in y: {_shapes(labels)}."
        )
    [(n,)] = lengths
    if n == 0:
        raise ValueError(f"x cannot be an empty array; got shapes in x: {_shapes(features)}.")
    return n


def _shapes(arrays: Arrays) -> str:
    return ", ".join(f"{array.shape}" if key is None else f"{key!r}: {array.shape}" for key, array in arrays.items())


def _take(arrays: Arrays, index: Any, is_dict: bool) -> Any:
    return {key: array[index] for key, array in arrays.items()} if is_dict else arrays[None][index]


def _in_order(n: int, batch_size: int, num_epochs: int | None) -> Iterator[tuple[Any, int]]:
    """Yields (index of the rows, number of rows); within an epoch a slice, which copies nothing."""
    total = None if num_epochs is None else n * num_epochs
    for begin in itertools.count(0, batch_size):
        end = begin + batch_size if total is None else min(begin + batch_size, total)
        if end <= begin:
            return
        first, size = begin % n, end - begin
        if first + size <= n:
            yield slice(first, first + size), size
        else:
            yield np.arange(first, first + size) % n, size


def _shuffled(n: int, batch_size: int, num_epochs: int | None, rng: np.random.Generator) -> Iterator[tuple[Any, int]]:
    """Yields (index of the rows, number of rows), one permutation after the other."""
    rest = np.empty((0,), int)
    for _ in itertools.count() if num_epochs is None else range(num_epochs):
        rest = np.concatenate([rest, rng.permutation(n)])
        whole = len(rest) - len(rest) % batch_size
        for begin in range(0, whole, batch_size):
            yield rest[begin : begin + batch_size], batch_size
        rest = rest[whole:]
    if len(rest):
        yield rest, len(rest)
