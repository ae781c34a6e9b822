"""The head for two classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax.losses
from jax.typing import ArrayLike

from estimator import metrics as metrics_lib
from estimator.core._export_output import ExportOutput, RegressionOutput
from estimator.heads._head import Predictions
from estimator.heads._one_task import (
    OneTaskHead,
    all_class_ids,
    check_encoded,
    checked_thresholds,
    checked_vocabulary,
    classification_outputs,
    curve_metrics,
    nan_where,
    threshold_metrics,
)
from estimator.losses import Reduction
from estimator.metrics import Metric
from estimator.metrics._arrays import divide, namespace
from estimator.metrics._means import Mean
from estimator.variables._class_names import ClassNames


class BinaryClassHead(OneTaskHead):
    """The head of a binary classifier with one logit; the loss is sigmoid cross entropy.

    >>> import estimator as est, jax.numpy as jnp
    >>> head = est.BinaryClassHead(weight_column="w")
    >>> logits, labels = jnp.array([[2.0], [-1.0]]), jnp.array([1, 1])
    >>> print(f"{head.loss(labels, logits, {'w': jnp.array([1.0, 0.0])}):.4f}")  # 0.1269 / 2
    0.0635
    >>> print(head.predictions(logits, ["class_ids"])["class_ids"].ravel())
    [1 0]
    >>> metrics = head.metrics(labels, logits, {"w": jnp.array([1.0, 3.0])})
    >>> metrics["accuracy"].result().item()
    0.25

    Predictions, for logits of shape `(batch, 1)`: "logits", "logistic" (the probability of class 1) and "class_ids" of
    that shape, "probabilities" and "all_class_ids" of shape `(batch, 2)`; and "classes", which `predict` yields as
    strings: the names of the class ids by `label_vocabulary`, or the ids as strings, "0" or "1". A compiled program has
    no strings, so within the model_fn they are integers. In exports the signature "predict" has them as strings, and
    "all_classes", the names of all classes, besides.

    Metrics: average_loss, accuracy, precision, recall, prediction/mean, label/mean, accuracy_baseline (of always
    predicting the more frequent class), auc, auc_precision_recall, and for each threshold
    accuracy/positive_threshold_0.5, precision/... and recall/....

    Args:
      weight_column: the feature with weights of shape `(batch,)` or `(batch, 1)`; if None, all are 1.
      thresholds: further thresholds of the probability of class 1, besides 0.5, for metrics.
      label_vocabulary: the names of the two classes. Labels are strings then, which input_fn replaces by
        `est.feature_column.encode_labels(labels, label_vocabulary)`; other integers are refused, as in TensorFlow.
      loss_reduction: any `est.Reduction` except NONE.
      loss_fn: function of `labels, logits` and, optionally, `features, loss_reduction` that returns the losses of all
        examples, shape `(batch, 1)`, instead of the cross entropy.
      name: the name of the head; required within `est.MultiHead`.

    Labels are in [0, 1], of shape `(batch,)` or `(batch, 1)`. The loss of other labels is NaN.
    """

    def __init__(
        self,
        weight_column: str | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., jax.Array] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(1, 1, 1, weight_column, loss_reduction, loss_fn, name)
        self._thresholds = checked_thresholds(thresholds)
        self._label_vocabulary = checked_vocabulary(label_vocabulary, 2)

    def _labels_of_kind(self, labels: jax.Array) -> jax.Array:
        check_encoded(self._kind, labels, self._label_vocabulary)
        return super()._labels_of_kind(labels)

    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
        # A label of 2 or -1 has a finite loss, with which a model would train without an error.
        return nan_where((labels < 0) | (labels > 1), losses)

    def _predictions(self, logits: jax.Array) -> Predictions:
        # The softmax of (0, x) is (1 - sigmoid(x), sigmoid(x)): as in TensorFlow, two columns from one logit.
        two_class_logits = jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)
        return {
            "logits": logits,
            "logistic": jax.nn.sigmoid(logits),
            "probabilities": jax.nn.softmax(two_class_logits),
            "class_ids": _class_ids(logits),
            "classes": ClassNames(_class_ids(logits), self._label_vocabulary),
            "all_class_ids": all_class_ids(logits, 2),
        }

    def _metrics(self, labels: jax.Array, logits: jax.Array, weights: ArrayLike) -> dict[str, Metric]:
        class_ids, logistic = _class_ids(logits), jax.nn.sigmoid(logits)
        label_mean = metrics_lib.mean(labels, weights)
        return {
            "accuracy": metrics_lib.accuracy(labels, class_ids, weights),
            "precision": metrics_lib.precision(labels, class_ids, weights),
            "recall": metrics_lib.recall(labels, class_ids, weights),
            "prediction/mean": metrics_lib.mean(logistic, weights),
            "label/mean": label_mean,
            "accuracy_baseline": _AccuracyBaseline(label_mean.total, label_mean.count),
            **curve_metrics(labels, logistic, weights),
            **threshold_metrics(labels, logistic, weights, self._thresholds),
        }

    def export_outputs(self, predictions: Predictions) -> dict[str, ExportOutput]:
        # As in TensorFlow, the probability is exported as a regression, too.
        value = RegressionOutput(predictions["logistic"])
        return classification_outputs(predictions, self._label_vocabulary, 2, regression=value)


class _AccuracyBaseline(Mean):
    """The accuracy of always predicting the more frequent of two classes; it has the states of the labels' mean."""

    def result(self) -> Any:
        xp = namespace(self.total)
        return divide(xp.maximum(self.total, self.count - self.total), self.count)


def _class_ids(logits: jax.Array) -> jax.Array:
    # The probability is above one half.
    return (logits > 0).astype(jnp.int32)
