"""Ready-made input functions, and helpers to write others."""

from estimator.inputs._numpy import numpy_input_fn
from estimator.inputs._padding import pad_batches
from estimator.inputs._pandas import pandas_input_fn

__all__ = ["numpy_input_fn", "pad_batches", "pandas_input_fn"]
