"""What TensorFlow has in `tf.estimator.experimental`, under the same names."""

from estimator._early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from estimator.hooks import InMemoryEvaluatorHook

__all__ = [
    "InMemoryEvaluatorHook",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]
