"""Metrics, as in `tf.metrics`: labels first, weights last, a mergeable state out.

Each function takes one batch and returns a `Metric`: a pytree of float32 sums. States of other
batches and of other towers are merged, and `result()` is taken once at the end.
"""

from typing import TYPE_CHECKING

from estimator.metrics._metric import Metric
from estimator.porting._missing_names import names_loaded_later as _names_loaded_later

__all__ = [
    "Metric",
    "accuracy",
    "auc",
    "false_negatives",
    "false_positives",
    "mean",
    "mean_absolute_error",
    "mean_iou",
    "mean_per_class_accuracy",
    "mean_squared_error",
    "precision",
    "precision_at_thresholds",
    "recall",
    "recall_at_k",
    "recall_at_thresholds",
    "root_mean_squared_error",
    "true_negatives",
    "true_positives",
]

if TYPE_CHECKING:
    from estimator.metrics._classes import mean_iou, mean_per_class_accuracy, recall_at_k
    from estimator.metrics._means import (
        accuracy,
        mean,
        mean_absolute_error,
        mean_squared_error,
        root_mean_squared_error,
    )
    from estimator.metrics._positives import (
        false_negatives,
        false_positives,
        precision,
        recall,
        true_negatives,
        true_positives,
    )
    from estimator.metrics._thresholds import auc, precision_at_thresholds, recall_at_thresholds
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__,
        {
            "_classes": "mean_iou mean_per_class_accuracy recall_at_k",
            "_means": "accuracy mean mean_absolute_error mean_squared_error root_mean_squared_error",
            "_positives": "false_negatives false_positives precision recall true_negatives true_positives",
            "_thresholds": "auc precision_at_thresholds recall_at_thresholds",
        },
        f"; it has {', '.join(__all__)}. One of your own is a subclass of "
        "`est.metrics.Metric`, or any pytree with `merge` and `compute`.",
    )
