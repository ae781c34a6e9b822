"""Ready-made input functions, and helpers to write others."""

from typing import TYPE_CHECKING

from estimator.inputs._csv import csv_input_fn
from estimator.inputs._numpy import numpy_input_fn
from estimator.inputs._padding import pad_batches
from estimator.inputs._pandas import pandas_input_fn
from estimator.porting._tensorflow_names import names_missing_in as _names_missing_in

__all__ = ["csv_input_fn", "numpy_input_fn", "pad_batches", "pandas_input_fn"]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__)
