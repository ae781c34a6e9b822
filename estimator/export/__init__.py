"""The outputs that a model_fn offers for export; writes and reads exported models."""

from typing import TYPE_CHECKING

from estimator.core._export_output import (
    DEFAULT_SIGNATURE,
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from estimator.porting._missing_names import names_loaded_later as _names_loaded_later

__all__ = [
    "ClassificationOutput",
    "DEFAULT_SIGNATURE",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
]

if TYPE_CHECKING:
    from estimator.export._serving import build_parsing_serving_input_receiver_fn, build_raw_serving_input_receiver_fn
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__, {"_serving": "build_parsing_serving_input_receiver_fn build_raw_serving_input_receiver_fn"}
    )
