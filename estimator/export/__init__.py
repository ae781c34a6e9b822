"""The outputs that a model_fn offers for export; writes and reads exported models."""

from estimator.core._export_output import (
    DEFAULT_SIGNATURE,
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)

__all__ = ["ClassificationOutput", "DEFAULT_SIGNATURE", "ExportOutput", "PredictOutput", "RegressionOutput"]
