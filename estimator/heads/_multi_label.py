"""The head for several classes, any number per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import optax.losses
from jax.typing import ArrayLike

from estimator import metrics as metrics_lib
from estimator.core._argument_checks import as_int
from estimator.core._export_output import ExportOutput
from estimator.heads._head import Predictions
from estimator.heads._one_task import (
    OneTaskHead,
    checked_thresholds,
    checked_vocabulary,
    classification_outputs,
    curve_metrics,
    nan_where,
    threshold_metrics,
)
from estimator.losses import Reduction
from estimator.metrics import Metric


class MultiLabelHead(OneTaskHead):
    """The head of a multi-label classifier: each example is in any number of the classes.

    The loss of an example is the sigmoid cross entropy, averaged over the classes.

    >>> import estimator as est, jax.numpy as jnp
    >>> head = est.MultiLabelHead(n_classes=2, classes_for_class_based_metrics=[1])
    >>> logits, labels = jnp.array([[0.0, 3.0], [0.0, -3.0]]), jnp.array([[1, 1], [0, 0]])
    >>> print(f"{head.loss(labels, logits):.4f}")  # (0.6931 + 0.0486) / 2
    0.3709
    >>> sorted(head.metrics(labels, logits))
    ['auc', 'auc/class1', 'auc_precision_recall', 'auc_precision_recall/class1', 'average_loss',
     'probability_mean/class1']

    Predictions: "logits" and "probabilities", both of shape `(batch, n_classes)`. Metrics: average_loss, auc and
    auc_precision_recall of all classes together; accuracy, precision and recall at each threshold, named as in
    `est.BinaryClassHead`; and the metrics of single classes shown above, named by the vocabulary if there is one.

    Args:
      n_classes: at least 2.
      weight_column, label_vocabulary, loss_reduction, loss_fn, name: as for `est.BinaryClassHead`; the vocabulary has
        `n_classes` names.
      thresholds: thresholds of the probabilities, for metrics.
      classes_for_class_based_metrics: the classes with separate metrics: ids, or names of the vocabulary.

    Labels are 0 or 1, of shape `(batch, n_classes)`: an array, or a `jax.experimental.sparse.BCOO`. The loss of
    an example with other labels is NaN. Of strings makes them
    `est.feature_column.encode_labels(labels, label_vocabulary, many_hot=True)`, in input_fn.
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., jax.Array] | None = None,
        classes_for_class_based_metrics: Sequence[int | str] | None = None,
        name: str | None = None,
    ) -> None:
        n_classes = as_int("MultiLabelHead", "n_classes", n_classes)
        if n_classes < 2:
            raise ValueError(f"n_classes must be > 1 for multi-label classification. Given: {n_classes}.")
        super().__init__(n_classes, n_classes, 1, weight_column, loss_reduction, loss_fn, name)
        self._thresholds = checked_thresholds(thresholds)
        self._label_vocabulary = checked_vocabulary(label_vocabulary, n_classes)
        own = () if classes_for_class_based_metrics is None else classes_for_class_based_metrics
        self._own_metrics = tuple(map(self._class_id, own))

    def _class_id(self, id_or_name: int | str) -> int:
        classes: Sequence[int | str] | None = range(self.logits_dimension)
        if isinstance(id_or_name, str):
            classes = self._label_vocabulary
        if classes is None or id_or_name not in classes:
            raise ValueError(
                "All classes_for_class_based_metrics must be in range [0, n_classes), or in label_vocabulary. Given: "
                f"{id_or_name!r}, with n_classes={self.logits_dimension} and label_vocabulary={self._label_vocabulary}."
            )
        return classes.index(id_or_name)

    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
        # As in TensorFlow, the loss of an example is the mean over classes: one label out of range makes it NaN.
        return nan_where((labels < 0) | (labels > 1), losses).mean(axis=-1, keepdims=True)

    def _predictions(self, logits: jax.Array) -> Predictions:
        return {"logits": logits, "probabilities": jax.nn.sigmoid(logits)}

    def _metrics(self, labels: jax.Array, logits: jax.Array, weights: ArrayLike) -> dict[str, Metric]:
        probabilities = jax.nn.sigmoid(logits)
        metrics = {
            **curve_metrics(labels, probabilities, weights),
            **threshold_metrics(labels, probabilities, weights, self._thresholds),
        }
        for i in self._own_metrics:
            name = self._label_vocabulary[i] if self._label_vocabulary else f"class{i}"
            # A slice keeps the last dimension, for the weights.
            mine, probability = labels[..., i : i + 1], probabilities[..., i : i + 1]
            metrics[f"probability_mean/{name}"] = metrics_lib.mean(probability, weights)
            for curve, metric in curve_metrics(mine, probability, weights).items():
                metrics[f"{curve}/{name}"] = metric
        return metrics

    def export_outputs(self, predictions: Predictions) -> dict[str, ExportOutput]:
        return classification_outputs(predictions, self._label_vocabulary, self.logits_dimension)
