"""The outputs that a model_fn offers for export; writes and reads exported models."""

from typing import TYPE_CHECKING

from estimator.core._export_output import (
    DEFAULT_SIGNATURE,
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = ["ClassificationOutput", "DEFAULT_SIGNATURE", "ExportOutput", "PredictOutput", "RegressionOutput"]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__)
