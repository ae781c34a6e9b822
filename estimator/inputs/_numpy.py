"""Batches cut from numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from estimator.core._bcoo import is_jax_sparse
from estimator.inputs._array_iterator import Arrays, Order, RowBatches, rows_input_fn


def numpy_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    *,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Callable[[], RowBatches]:
    """Returns an input_fn that cuts arrays into batches.

    As in TensorFlow, `shuffle` is required, a batch may have rows of two epochs, and the
    last, smaller batch is kept. Unlike there, every epoch is another permutation of all rows,
    `seed` makes it reproducible, and arguments are checked at once, not when the input_fn is called.

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
      num_epochs: how many times to read the rows; forever if None.
      shuffle: whether each epoch has another permutation of the rows.
      seed: the seed of the permutations: with one, every call of the input_fn has the same order;
        with None, every call has another.
      drop_remainder: whether to leave out the last batch if it is smaller than `batch_size`.

    Returns:
      An input_fn without parameters. Each call returns a new iterator over features (if `y` is
      None) or `(features, labels)`, arrays or dicts like `x` and `y`, of shape `(batch_size, ...)`.
      Without `shuffle` they may be views of `x` and `y`; training copies them. The iterator has
      `get_state()` and `set_state(state)`, so that training resumes within an epoch, in the same order.

    Raises:
      TypeError: `x` is neither an array nor a dict.
      ValueError: `shuffle` is not a bool, there are no rows, an array `x` has no elements, `x` and
        `y` share a key, their lengths differ, `batch_size` or `num_epochs` is not an int >= 1, or
        `seed` not an int >= 0.
    """
    order = Order(batch_size, num_epochs, shuffle, seed, drop_remainder)  # type: ignore[arg-type]  # checks it
    features, labels = _as_arrays("x", x), None if y is None else _as_arrays("y", y)
    input_fn = rows_input_fn(features, labels, order)
    if isinstance(x, dict) and isinstance(y, dict) and (duplicates := sorted(x.keys() & y.keys())):
        raise ValueError(
            f"{len(duplicates)} duplicate keys are found in both x and y: {duplicates}. Rename them in one of the two."
        )
    return input_fn


def _as_arrays(name: str, value: Any) -> Arrays:
    if not isinstance(value, dict) and not hasattr(value, "shape"):
        raise TypeError(
            f"{name} must be a dict or array; got {type(value).__name__}. Make one array of it by `np.asarray`."
        )
    if isinstance(value, dict) and not value:
        hint = "use None instead" if name == "y" else "give at least one feature"
        raise ValueError(f"{name} cannot be an empty dict, {hint}.")
    if name == "x" and not isinstance(value, dict) and not np.size(value):
        raise ValueError(f"x cannot be an empty array; got shape {value.shape}.")
    arrays = value if isinstance(value, dict) else {None: value}
    for key, array in arrays.items():
        # `np.asarray` would turn it into an array of one object.
        if is_jax_sparse(array):
            raise TypeError(
                f"{name if key is None else f'{name}[{key!r}]'} is sparse ({type(array).__name__}), and numpy cannot "
                "cut it into batches. Let your own input_fn yield a jax.experimental.sparse.BCOO for each batch."
            )
    # No copy: the rows of each batch are copied.
    return {key: np.asarray(array) for key, array in value.items()} if isinstance(value, dict) else np.asarray(value)
