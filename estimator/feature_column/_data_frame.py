"""Columns of pandas data frames, as arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def is_data_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")  # a frame exists only where it is imported
    return pandas is not None and isinstance(value, pandas.DataFrame)


def column_arrays(name: str, frame: Any) -> dict[Any, np.ndarray]:
    """The columns by name; in columns of numbers or bools, a missing value is NaN."""
    if not len(frame.columns):
        raise ValueError(f"{name} must have at least one column; got a DataFrame of shape {frame.shape}.")
    if not frame.columns.is_unique:
        twice = sorted(set(frame.columns[frame.columns.duplicated()]), key=str)
        raise ValueError(f"The columns of {name} must have different names; got several called {twice}. Rename them.")
    return {column: _array(frame[column]) for column in frame.columns}


def _array(series: Any) -> np.ndarray:
    # pandas' nullable dtypes and Arrow's have it: `to_numpy()` makes objects of their numbers where one is missing.
    dtype = getattr(series.dtype, "numpy_dtype", None)
    if dtype is None or dtype.kind not in "biuf":
        return series.to_numpy()
    return series.to_numpy(float, na_value=np.nan) if series.hasnans else series.to_numpy(dtype)
