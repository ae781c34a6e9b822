"""Metrics of a prediction among several classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import check_order, unsign_zeros
from estimator.metrics._arrays import agree, arrange, divide, known_classes, spread, sum_by
from estimator.metrics._means import Mean, weighted_mean
from estimator.metrics._metric import Metric


class MeanOverClasses(Mean):
    """The plain mean, over classes, of a weighted mean for each; a class without rows counts as 0.

    Attributes:
      total, count: as in `Mean`, shape `[classes]`. Their quotients are the metric's second part, `metric[1]`, as in
        TensorFlow.
    """

    def _parts(self) -> tuple[Any, Any]:
        return self.result(), super().result()

    def result(self) -> Any:
        return super().result().mean()


class MeanIoU(Metric):
    """The mean, over the classes that occur, of intersection over union.

    Attributes:
      confusion: sums of weights by label (rows) and prediction (columns), `[classes, classes]`; the metric's second
        part, `metric[1]`, as in TensorFlow.
      misses: sums of weights by label where the prediction is none of the classes, `[classes]`.
    """

    confusion: jax.Array
    misses: jax.Array

    def _parts(self) -> tuple[Any, Any]:
        return self.result(), self.confusion

    def result(self) -> Any:
        hits = self.confusion.diagonal()
        union = self.confusion.sum(axis=0) + self.confusion.sum(axis=1) + self.misses - hits
        return divide(divide(hits, union).sum(), (union != 0).sum().astype(union.dtype))


def mean_iou(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weights: ArrayLike | None = None,
    name: str | None = None,
) -> MeanIoU:
    """The mean, over the classes that occur, of `hits / (labelled + predicted - hits)`.

    In a model_fn its second part, `mean_iou(...)[1]`, is the batch's confusion matrix, sums of weights by label (rows)
    and prediction (columns), as in TensorFlow.

    >>> mean_iou(jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 1, 1]), num_classes=3).result().item()
    0.5833333...

    Args:
      labels, predictions: integers in `[0, num_classes)`, equal shapes, but for a last 1 that only
        one has. A row with a label out of range is left out; another prediction out of range is wrong.
      num_classes: number of classes.
      weights, name: as in `mean`.

    Raises:
      ValueError: if shapes do not fit.
    """
    labels, predictions, weights = arrange("mean_iou", labels, predictions, weights)
    labels, labelled = known_classes(labels, num_classes)
    predictions, predicted = known_classes(predictions, num_classes)
    weights = jnp.where(labelled, weights, 0)
    sums = sum_by(labels * num_classes + predictions, jnp.where(predicted, weights, 0), num_classes**2)
    misses = sum_by(labels, jnp.where(predicted, 0, weights), num_classes)
    return MeanIoU(sums.reshape(num_classes, num_classes), misses)


def mean_per_class_accuracy(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weights: ArrayLike | None = None,
    name: str | None = None,
) -> MeanOverClasses:
    """The mean, over all `num_classes` classes, of the accuracy on the rows of that class.

    As in TensorFlow, a class without rows counts as 0.

    >>> labels, predictions = jnp.array([0, 0, 0, 1]), jnp.array([0, 0, 1, 1])
    >>> mean_per_class_accuracy(labels, predictions, num_classes=2).result().item()
    0.8333333...

    Args:
      labels: integers in `[0, num_classes)`. A row with a label out of range is left out.
      predictions: shape of `labels`, but for a last 1; cast to their dtype.
      num_classes: number of classes.
      weights, name: as in `mean`.

    Raises:
      ValueError: if shapes do not fit.
    """
    caller = "mean_per_class_accuracy"
    labels, predictions, weights = arrange(caller, labels, predictions, weights)
    # Compared in the dtype of the labels, as in `accuracy`, before they are cast to classes.
    hits = agree(labels, predictions)
    labels, known = known_classes(labels, num_classes)
    weights = jnp.where(known, weights, 0)
    return MeanOverClasses(
        total=sum_by(labels, jnp.where(hits, weights, 0), num_classes), count=sum_by(labels, weights, num_classes)
    )


def recall_at_k(
    labels: ArrayLike,
    predictions: ArrayLike,
    k: int,
    class_id: int | None = None,
    weights: ArrayLike | None = None,
    name: str | None = None,
) -> Mean:
    """The fraction of the labels that are among the `k` classes of the highest scores.

    >>> scores = jnp.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
    >>> recall_at_k(jnp.array([2, 2]), scores, k=2).result().item()
    0.5

    Args:
      labels: integers, shape `[...]`, or `[..., num_labels]` where rows have several; a label that
        is repeated in a row counts once. A label out of range is never a hit.
      predictions: scores, shape `[..., classes]`.
      k: the number of classes to consider; of equal scores the lower class comes first.
      class_id: the class whose labels count; all if None.
      weights: one per row, as in `mean`, for values of shape `[...]`.
      name: as in `mean`.

    Raises:
      TypeError: `class_id` is not an integer, or labels and predictions have changed places.
      ValueError: if shapes do not fit, or `k` is not between 1 and the number of classes.
    """
    if class_id is not None and (isinstance(class_id, bool) or not isinstance(class_id, int)):
        raise TypeError(f"`recall_at_k` takes one class as `class_id`; got {class_id!r}. Write `weights=`.")
    labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
    check_order("recall_at_k", labels, predictions, "predictions")
    rows, num_classes = predictions.shape[:-1], predictions.shape[-1]
    if not 1 <= k <= num_classes:
        raise ValueError(f"`recall_at_k` got k={k} for predictions of {num_classes} classes.")
    if labels.ndim == predictions.ndim - 1:
        labels = labels[..., None]
    if labels.shape[:-1] != rows:
        raise ValueError(
            f"`recall_at_k` got labels of shape {labels.shape} and predictions of shape "
            f"{predictions.shape}. Labels must be classes of shape {rows}, or {rows} and one more "
            "dimension where a row has several."
        )
    top = jax.lax.top_k(unsign_zeros(predictions), k)[1]
    hits = (labels[..., :, None].astype(jnp.int32) == top[..., None, :]).any(-1)
    # As in TensorFlow, the labels of a row are a set: of equal ones only the first counts.
    equal = labels[..., :, None] == labels[..., None, :]
    counts = ~jnp.tril(equal, -1).any(-1)
    if class_id is not None:
        counts &= labels == class_id
    counted = jnp.where(counts, spread("recall_at_k", weights, rows, "rows")[..., None], 0)
    return weighted_mean(hits, counted)
