"""Names of TensorFlow's `tf.estimator.experimental`."""

from typing import TYPE_CHECKING

from estimator._early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from estimator.hooks import InMemoryEvaluatorHook
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = [
    "InMemoryEvaluatorHook",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__)
