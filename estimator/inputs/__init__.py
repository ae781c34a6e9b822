"""Ready-made input functions, and helpers to write others."""

from typing import TYPE_CHECKING

from estimator.porting._missing_names import names_loaded_later as _names_loaded_later

__all__ = ["csv_input_fn", "numpy_input_fn", "pad_batches", "pandas_input_fn", "tfrecord_input_fn"]

if TYPE_CHECKING:
    from estimator.inputs._csv import csv_input_fn
    from estimator.inputs._numpy import numpy_input_fn
    from estimator.inputs._padding import pad_batches
    from estimator.inputs._pandas import pandas_input_fn
    from estimator.inputs._tfrecord import tfrecord_input_fn
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__,
        {
            "_csv": "csv_input_fn",
            "_numpy": "numpy_input_fn",
            "_padding": "pad_batches",
            "_pandas": "pandas_input_fn",
            "_tfrecord": "tfrecord_input_fn",
        },
    )
