"""Reports values of a model_fn for TensorBoard, by functions named as in `tf.summary`."""

from typing import TYPE_CHECKING

from estimator.porting._missing_names import names_missing_in as _names_missing_in
from estimator.summary._ops import histogram, image, scalar

__all__ = ["histogram", "image", "scalar"]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__)
