"""Metrics of a probability cut at several thresholds: precision, recall, area under a curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator.metrics._arrays import arrange, divide, namespace, sum_by
from estimator.metrics._means import Mean
from estimator.metrics._metric import Metric

_CURVES = ("ROC", "PR")
_SUMMATION_METHODS = ("trapezoidal", "careful_interpolation", "minoring", "majoring")


class MeanAtThresholds(Mean):
    """A weighted mean for each of several thresholds.

    Attributes:
      total, count: as in `Mean`, shape `[thresholds]`.
      thresholds: the thresholds.
    """

    thresholds: tuple[float, ...] = dataclasses.field(metadata={"static": True})


class AreaUnderCurve(Metric):
    """The area under a curve that is known at several thresholds.

    Attributes:
      true_positives, false_positives, true_negatives, false_negatives: sums of weights at each
        threshold, thresholds ascending; float32, shape `[num_thresholds]`.
      curve, summation_method: as in `auc`.
    """

    true_positives: jax.Array
    false_positives: jax.Array
    true_negatives: jax.Array
    false_negatives: jax.Array
    curve: str = dataclasses.field(metadata={"static": True})
    summation_method: str = dataclasses.field(metadata={"static": True})

    def result(self) -> Any:
        if self.curve == "PR" and self.summation_method == "careful_interpolation":
            return self._interpolated_area()
        epsilon = 1e-6  # TensorFlow's
        true, false = self.true_positives, self.false_positives
        recall = (true + epsilon) / (true + self.false_negatives + epsilon)
        if self.curve == "ROC":
            x, y = false / (false + self.true_negatives + epsilon), recall
        else:
            x, y = recall, (true + epsilon) / (true + false + epsilon)
        # Negated, since x falls as the thresholds rise.
        return (-self._heights(y) * (x[1:] - x[:-1])).sum()

    def _heights(self, y: Any) -> Any:
        """The height taken for each interval between two thresholds."""
        xp = namespace(y)
        if self.summation_method == "minoring":
            return xp.minimum(y[:-1], y[1:])
        if self.summation_method == "majoring":
            return xp.maximum(y[:-1], y[1:])
        return (y[:-1] + y[1:]) / 2

    def _interpolated_area(self) -> Any:
        """The area under precision over recall, after Davis and Goadrich, 2006.

        Between two thresholds true positives are taken to be linear in all positives P, so that
        precision is `slope + intercept / P`; its integral over recall has a closed form.
        """
        xp = namespace(self.true_positives)
        true, positives = self.true_positives, self.true_positives + self.false_positives
        gained = true[:-1] - true[1:]
        # Positives only fall as thresholds rise; but sums of float32 weights are rounded.
        slope = divide(gained, xp.maximum(positives[:-1] - positives[1:], 0))
        intercept = true[1:] - slope * positives[1:]
        ratio = divide(positives[:-1], positives[1:])
        logarithm = xp.log(xp.where(ratio > 0, ratio, 1))
        relevant = true[1:] + self.false_negatives[1:]
        return divide(slope * (gained + intercept * logarithm), relevant).sum()


def precision_at_thresholds(
    labels: ArrayLike,
    predictions: ArrayLike,
    thresholds: Sequence[float],
    weights: ArrayLike | None = None,
    name: str | None = None,
) -> MeanAtThresholds:
    """The precision of `predictions > threshold` for each threshold.

    >>> p = jnp.array([0.2, 0.4, 0.6, 0.8])
    >>> precision_at_thresholds(jnp.array([0, 1, 0, 1]), p, [0.1, 0.5, 0.7]).result().tolist()
    [0.5, 0.5, 1.0]

    Args:
      labels: what is not zero is positive; shape of `predictions`, but for a last 1.
      predictions: probabilities, of any shape. The metric is NaN if one is not in [0, 1], such as a logit.
      thresholds: plain numbers.
      weights, name: as in `mean`.

    Raises:
      ValueError: if shapes do not fit.
    """
    caller = "precision_at_thresholds"
    thresholds = tuple(map(float, thresholds))
    true, false, _, _ = _confusion_at(caller, labels, predictions, thresholds, weights)
    return MeanAtThresholds(total=true, count=true + false, thresholds=thresholds)


def recall_at_thresholds(
    labels: ArrayLike,
    predictions: ArrayLike,
    thresholds: Sequence[float],
    weights: ArrayLike | None = None,
    name: str | None = None,
) -> MeanAtThresholds:
    """The recall of `predictions > threshold` for each threshold.

    >>> p = jnp.array([0.2, 0.4, 0.6, 0.8])
    >>> recall_at_thresholds(jnp.array([0, 1, 0, 1]), p, [0.1, 0.5, 0.9]).result().tolist()
    [1.0, 0.5, 0.0]

    Args and errors are as in `precision_at_thresholds`.
    """
    caller = "recall_at_thresholds"
    thresholds = tuple(map(float, thresholds))
    true, _, _, missed = _confusion_at(caller, labels, predictions, thresholds, weights)
    return MeanAtThresholds(total=true, count=true + missed, thresholds=thresholds)


def auc(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike | None = None,
    num_thresholds: int = 200,
    curve: str = "ROC",
    summation_method: str = "trapezoidal",
    name: str | None = None,
) -> AreaUnderCurve:
    """The area under the ROC or the precision-recall curve, approximated as in TensorFlow.

    >>> score = auc(jnp.array([0, 0, 1, 1]), jnp.array([0.1, 0.4, 0.35, 0.8]))
    >>> round(score.result().item(), 4)
    0.75

    Args:
      labels: what is not zero is positive; shape of `predictions`, but for a last 1.
      predictions: probabilities. The area is NaN if one is not in [0, 1], such as a logit; TensorFlow raised an error.
      weights, name: as in `mean`.
      num_thresholds: number of points of the curve, evenly spaced, the ends just beyond 0 and 1.
      curve: "ROC" or "PR".
      summation_method: "trapezoidal", "minoring", "majoring" or "careful_interpolation", which is
        the right one for "PR" and the trapezoidal one for "ROC".

    Raises:
      ValueError: if shapes do not fit, or an option is unknown.
    """
    if curve not in _CURVES:
        raise ValueError(f"`auc` got curve={curve!r}; the known ones are {_CURVES}.")
    if summation_method not in _SUMMATION_METHODS:
        raise ValueError(f"`auc` got summation_method={summation_method!r}; the known ones are {_SUMMATION_METHODS}.")
    if num_thresholds < 2:
        raise ValueError(f"`auc` got num_thresholds={num_thresholds}; it takes 2 at least.")
    inner = [i / (num_thresholds - 1) for i in range(1, num_thresholds - 1)]
    # Just outside, so that probabilities of exactly 0 and 1 lie between the ends, as in TensorFlow.
    thresholds = (-1e-7, *inner, 1 + 1e-7)
    counts = _confusion_at("auc", labels, predictions, thresholds, weights)
    return AreaUnderCurve(*counts, curve=curve, summation_method=summation_method)


def _confusion_at(
    caller: str, labels: ArrayLike, predictions: ArrayLike, thresholds: tuple[float, ...], weights: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """True positives, false positives, true negatives, false negatives; each [thresholds].

    They are NaN where a prediction that counts is outside [0, 1], or NaN; TensorFlow raised an error.
    """
    labels, predictions, weights = arrange(caller, labels, predictions, weights)
    predictions = predictions.astype(jnp.float32)
    in_range = ((predictions >= 0) & (predictions <= 1) | (weights == 0)).all()
    # One pass over the rows, which sums up those between two thresholds; [thresholds + 1, 2].
    ordered, places = np.unique(np.asarray(thresholds, np.float32), return_inverse=True)
    below = jnp.searchsorted(ordered, predictions)  # the number of thresholds that a prediction is above
    sums = sum_by(2 * below + labels.astype(bool).astype(below.dtype), weights, 2 * (ordered.size + 1)).reshape(-1, 2)
    # A compiled program cannot raise an error: NaN in every sum shows in the result, whatever is merged with it.
    sums = jnp.where(in_range, sums, jnp.nan)
    negative, positive = jnp.cumsum(sums, 0)[:-1][places].T, jnp.cumsum(sums[::-1], 0)[::-1][1:][places].T
    return positive[1], positive[0], negative[0], negative[1]
