"""Ready-made input functions."""

from estimator.inputs._numpy import numpy_input_fn
from estimator.inputs._pandas import pandas_input_fn

__all__ = ["numpy_input_fn", "pandas_input_fn"]
