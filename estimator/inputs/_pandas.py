"""Batches cut from pandas data frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from estimator.feature_column._data_frame import column_arrays
from estimator.feature_column._encode import encode, encode_labels
from estimator.inputs._array_iterator import Order, RowBatches, rows_input_fn


def pandas_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    *,
    target_column: str = "target",
    columns: Iterable[Any] | None = None,
    label_vocabulary: Sequence[str] | None = None,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Callable[[], RowBatches]:
    """Returns an input_fn that cuts a data frame into batches; features are a dict of its columns.

    As in TensorFlow, the index is not a feature, and later changes of `x` and `y` by pandas do not matter: nothing is
    copied before there is one. Strings become integers once, at this call, by `columns` and `label_vocabulary`.

    >>> import pandas as pd
    >>> x = pd.DataFrame({"age": [30, 40, 50], "height": [1.7, 1.8, 1.6]}, index=["a", "b", "c"])
    >>> y = pd.Series([0, 1, 0], index=["a", "b", "c"])
    >>> features, labels = next(pandas_input_fn(x, y, batch_size=2, shuffle=False)())
    >>> features["age"], features["height"], labels
    (array([30, 40]), array([1.7, 1.8]), array([0, 1]))

    Args:
      x: features, a `DataFrame` of n rows.
      y: labels, a `Series` or a `DataFrame` of the same index, or None.
      batch_size, num_epochs, shuffle, seed, drop_remainder: as for `numpy_input_fn`.
      target_column: the name of the labels, for ports. As in TensorFlow it must not be a column of `x`; it has no other
        effect.
      columns: all feature columns of the model, for `est.feature_column.encode`, which refuses strings that none
        of them reads. If None, `x` stays as it is.
      label_vocabulary: the names of the classes, where `y` is a `Series` of them; as the classifier or head has it.

    Returns:
      An input_fn without parameters. Each call returns a new iterator over features, a dict of arrays of shape
      `(batch_size,)` by column (if `y` is None), or over `(features, labels)`; labels are an array for a `Series`, a
      dict for a `DataFrame`. Without `shuffle` they may be views that cannot be written to; training copies them. The
      iterator has `get_state()` and `set_state(state)`.

    Raises:
      TypeError: pandas is not installed, `x` is not a `DataFrame`, `y` neither a `Series` nor a `DataFrame`, or
        `target_column` not a string.
      ValueError: `shuffle` is not a bool, `target_column` is a column of `x`, two columns have one name, the indexes of
        `x` and `y` differ, there are no rows or columns, or a number is out of its range; or as `encode` and
        `encode_labels` do.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise TypeError(
            "pandas_input_fn should not be called without pandas installed. Install it (`pip install pandas`), or give "
            "a dict of arrays to numpy_input_fn."
        ) from error
    order = Order(batch_size, num_epochs, shuffle, seed, drop_remainder)  # type: ignore[arg-type]  # checks it
    if not isinstance(target_column, str):
        raise TypeError(f"target_column must be a string type; got {target_column!r}.")
    if not isinstance(x, pd.DataFrame):
        raise TypeError(f"x must be a pandas DataFrame; got {type(x).__name__}. For arrays there is numpy_input_fn.")
    # pandas 3 copies the memory of a frame when it changes what another one, such as this, has too; pandas 2 copies it
    # here, unless its option `copy_on_write` is set.
    x = x.copy(deep=None)
    features = column_arrays("x", x) if columns is None else encode(x, columns)
    if y is None:
        return rows_input_fn(features, None, order, x)
    if not isinstance(y, pd.Series | pd.DataFrame):
        raise TypeError(f"y must be a pandas Series or DataFrame; got {type(y).__name__}.")
    if target_column in x:
        raise ValueError(
            f"Cannot use name {target_column} for target column: DataFrame already has a column with that name: "
            f"{list(x.columns)}. Give another target_column, or leave that column out of x."
        )
    # Rows are paired by position: different indices mean that one of the two was sorted or filtered.
    # Two plain indexes are equal at once, without their rows.
    if not (x.index.equals(y.index) or np.array_equal(x.index, y.index)):
        raise ValueError(
            f"Index for x and y are mismatched. Give rows in the same order; got index for x: {x.index}, "
            f"index for y: {y.index}."
        )
    y = y.copy(deep=None)
    labels = column_arrays("y", y) if isinstance(y, pd.DataFrame) else y.to_numpy()
    if label_vocabulary is not None:
        if isinstance(labels, dict):
            raise TypeError(
                f"label_vocabulary is for y as a Series; got a DataFrame of the columns {list(labels)}. Give one of "
                "them, or encode each before by `est.feature_column.encode_labels`."
            )
        labels = encode_labels(labels, label_vocabulary)
    return rows_input_fn(features, labels, order, (x, y))
