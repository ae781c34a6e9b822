"""What a model_fn offers for export, and what writes and reads it."""

from estimator.core._export_output import (
    DEFAULT_SIGNATURE,
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)

__all__ = ["ClassificationOutput", "DEFAULT_SIGNATURE", "ExportOutput", "PredictOutput", "RegressionOutput"]
