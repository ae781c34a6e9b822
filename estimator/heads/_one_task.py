"""The base of heads of one task: checks logits, labels and weights, and computes the loss."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator import metrics as metrics_lib
from estimator.core._argument_checks import hide_absent
from estimator.core._bcoo import is_sparse
from estimator.core._export_output import DEFAULT_SIGNATURE, ClassificationOutput, ExportOutput, PredictOutput
from estimator.core._typing import Features
from estimator.feature_column._column import ID_DTYPE
from estimator.heads._head import (
    Head,
    Labels,
    Logits,
    Predictions,
    RegularizationLosses,
    add_regularization,
    checked_reduction,
)
from estimator.losses import compute_weighted_loss
from estimator.metrics import Metric
from estimator.variables._class_names import ClassNames


class OneTaskHead(Head):
    """A head with one array of labels and one of weights.

    Args:
      logits_dimension: the size of the last dimension of logits.
      labels_dimension: the size of the last dimension of labels.
      loss_dimension: the size of the last dimension of the losses; if it is 1, an example has one weight.
      weight_column, loss_reduction, loss_fn, name: as for the public heads.
    """

    def __init__(
        self,
        logits_dimension: int,
        labels_dimension: int,
        loss_dimension: int,
        weight_column: str | None,
        loss_reduction: str,
        loss_fn: Callable[..., jax.Array] | None,
        name: str | None,
    ) -> None:
        self._kind = type(self).__name__
        if weight_column is not None and not isinstance(weight_column, str):
            raise TypeError(
                f"`{self._kind}` needs the name of a feature as weight_column; got {weight_column!r} of type "
                f"{type(weight_column).__name__}. For a numeric column write `weight_column=column.key`."
            )
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"`{self._kind}` needs a non-empty string, or None, as name; got {name!r}.")
        self.name = name
        self.logits_dimension = logits_dimension
        self.loss_reduction = checked_reduction(loss_reduction)
        self._labels_dimension = labels_dimension
        self._loss_dimension = loss_dimension
        self._weight_column = weight_column
        self._loss_fn = loss_fn
        # Checked here, since the model_fn runs much later.
        self._loss_fn_args = () if loss_fn is None else _loss_fn_args(loss_fn)

    def loss(
        self,
        labels: Labels,
        logits: Logits,
        features: Features = None,
        mode: str | None = None,
        regularization_losses: RegularizationLosses = None,
    ) -> jax.Array:
        logits = self._checked_logits(logits)
        losses, weights = self._losses_and_weights(self._checked_labels(labels, logits), logits, features)
        loss = compute_weighted_loss(losses, weights, self.loss_reduction)
        return add_regularization(loss, regularization_losses)

    def predictions(self, logits: Logits, keys: Sequence[Hashable] | None = None) -> Predictions:
        predictions = self._predictions(self._checked_logits(logits))
        return predictions if keys is None else checked_selection(predictions, keys)

    def metrics(
        self,
        labels: Labels,
        logits: Logits,
        features: Features = None,
        regularization_losses: RegularizationLosses = None,
    ) -> dict[str, Metric]:
        # Logits first: the expected shape of labels follows from them.
        logits = self._checked_logits(logits)
        labels = self._checked_labels(labels, logits)
        losses, weights = self._losses_and_weights(labels, logits, features)
        # The mean over examples, which is the same for every `loss_reduction`.
        metrics = {"average_loss": metrics_lib.mean(losses, weights), **self._metrics(labels, logits, weights)}
        named = {self._key(key): metric for key, metric in metrics.items()}
        return named | self._regularization_metric(logits.shape[0], regularization_losses)

    @abc.abstractmethod
    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """The losses of the elements, shape `[..., loss_dimension]`."""

    @abc.abstractmethod
    def _predictions(self, logits: jax.Array) -> Predictions: ...

    @abc.abstractmethod
    def _metrics(self, labels: jax.Array, logits: jax.Array, weights: ArrayLike) -> dict[str, Metric]:
        """The metrics besides the average loss, by name; the suffix of the head is added later."""

    def _are_valid(self, logits: jax.Array) -> jax.Array:
        """A bool for each logit: a loss of it, and its gradient, are finite."""
        return jnp.isfinite(logits)

    def _labels_of_kind(self, labels: jax.Array) -> jax.Array:
        """The labels in the dtype that the head computes with."""
        return labels.astype(jnp.float32)

    def _checked_logits(self, logits: Logits) -> jax.Array:
        logits = jnp.asarray(logits)
        if logits.ndim < 2 or logits.shape[-1] != self.logits_dimension:
            raise ValueError(
                f"logits shape must be [D0, D1, ... DN, logits_dimension], which is {self.logits_dimension} for this "
                f"`{self._kind}`; got {logits.shape}."
            )
        # Losses are float32, whatever dtype the model uses: a softmax in bfloat16 has two or three digits.
        return logits.astype(jnp.float32)

    def _checked_labels(self, labels: Labels, logits: jax.Array) -> jax.Array:
        if labels is None:
            raise ValueError(
                f"You must provide labels to `{self._kind}`. Given: None. Suggested troubleshooting steps: check that "
                "your data contains the label, and that input_fn returns (features, labels)."
            )
        if isinstance(labels, Mapping):
            raise TypeError(
                f"`{self._kind}` takes one array of labels; got a dict of {sorted(labels)}. Pick one of them, or give "
                "each to a head of its own by `est.MultiHead`."
            )
        if is_sparse(labels):
            labels = labels.todense()
        # An array of jax holds no strings, and a traced one has no values for numpy.
        if not isinstance(labels, jax.Array) and np.asarray(labels).dtype.kind in "OSU":
            raise TypeError(
                f"`{self._kind}` takes labels of numbers; got strings. Let input_fn replace a class by its position "
                "in label_vocabulary: `est.feature_column.encode_labels(labels, label_vocabulary)`."
            )
        labels = jnp.asarray(labels)
        # Labels of shape (batch,) against logits of shape (batch, 1) would broadcast to a matrix.
        if labels.ndim == logits.ndim - 1:
            labels = labels[..., None]
        expected = (*logits.shape[:-1], self._labels_dimension)
        # Two errors, since the first one names the usual cause, in the words of TensorFlow.
        if labels.ndim >= 1 and labels.shape[-1] != self._labels_dimension:
            raise ValueError(
                f"Mismatched label shape. Expected labels dimension={self._labels_dimension}. Received "
                f"{labels.shape[-1]}: `{self._kind}` got labels of shape {labels.shape} for logits of shape "
                f"{logits.shape}. Check the head's dimensions, and the shape of the labels that input_fn returns."
            )
        if labels.shape != expected:
            raise ValueError(
                f"Mismatched label shape: `{self._kind}` got labels of shape {labels.shape} for logits of shape "
                f"{logits.shape}; expected {expected}."
            )
        return self._labels_of_kind(labels)

    def _losses_and_weights(
        self, labels: jax.Array, logits: jax.Array, features: Features
    ) -> tuple[jax.Array, ArrayLike]:
        weights = self._weights(logits, features)
        labels, logits = hide_absent(weights, labels), hide_absent(weights, logits, self._are_valid(logits))
        if self._loss_fn is None:
            losses = self._losses(labels, logits)
        else:
            arguments = dict(labels=labels, logits=logits, features=features, loss_reduction=self.loss_reduction)
            # As in TensorFlow, called with keywords: a function may have its arguments in any order.
            losses = jnp.asarray(self._loss_fn(**{name: arguments[name] for name in self._loss_fn_args}))
            expected = (*logits.shape[:-1], self._loss_dimension)
            if losses.shape != expected:
                raise ValueError(
                    f"loss_fn must return the losses before any reduction, shape [D0, D1, ... DN, "
                    f"{self._loss_dimension}]; for logits of shape {logits.shape} that is {expected}, but it returned "
                    f"shape {losses.shape}."
                )
            losses = losses.astype(jnp.float32)
        return losses, weights

    def _weights(self, logits: jax.Array, features: Features) -> ArrayLike:
        # With a plain number, towers do not need to average the denominators of their losses.
        if self._weight_column is None:
            return 1.0
        if not isinstance(features, Mapping) or self._weight_column not in features:
            have = sorted(map(str, features)) if isinstance(features, Mapping) else f"of type {type(features).__name__}"
            raise ValueError(
                f"weight_column {self._weight_column!r} of `{self._kind}` is not in features, which are {have}."
            )
        weights = jnp.asarray(features[self._weight_column]).astype(jnp.float32)
        # As with labels, weights may lack the last dimension.
        if weights.ndim == logits.ndim - 1:
            weights = weights[..., None]
        allowed = {(*logits.shape[:-1], 1), (*logits.shape[:-1], self._loss_dimension)}
        if weights.shape not in allowed:
            raise ValueError(
                f"weights shape must be {' or '.join(map(str, [logits.shape[:-1], *sorted(allowed)]))}, for logits of "
                f"shape {logits.shape}; features[{self._weight_column!r}] has shape "
                f"{jnp.shape(features[self._weight_column])}."
            )
        return weights


def nan_where(wrong: jax.Array, losses: jax.Array) -> jax.Array:
    """The losses, NaN for invalid labels.

    A compiled program cannot raise an error, but the NaN check of training detects it; `evaluate` reports it.
    """
    return jnp.where(wrong, jnp.nan, losses)


def checked_selection(predictions: Predictions, keys: Sequence[Hashable] | str) -> Predictions:
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    unknown = [key for key in keys if key not in predictions]
    if unknown:
        strings = " Its strings are the label_vocabulary." if "all_classes" in unknown else ""
        raise ValueError(
            f"Prediction key must be one of the head's, given: {unknown}. Valid prediction keys include "
            f"{list(predictions)}.{strings}"
        )
    return {key: predictions[key] for key in keys}


def check_encoded(kind: str, labels: jax.Array, label_vocabulary: tuple[str, ...] | None) -> None:
    """Raises an error for labels that may not be positions in the vocabulary, such as a 1 that names a class."""
    if label_vocabulary is not None and labels.dtype != ID_DTYPE:
        raise TypeError(
            f"Labels dtype should be string, for `{kind}` with label_vocabulary={list(label_vocabulary)}; got "
            f"{labels.dtype}. Let input_fn return `est.feature_column.encode_labels(labels, label_vocabulary)`, of "
            f"`labels.astype(str)` if numbers are names of classes, or of `labels.astype(np.{ID_DTYPE})` if they are "
            "positions in label_vocabulary."
        )


def checked_vocabulary(label_vocabulary: Sequence[str] | None, n_classes: int) -> tuple[str, ...] | None:
    if label_vocabulary is None:
        return None
    if not isinstance(label_vocabulary, list | tuple):
        raise ValueError(f"label_vocabulary should be a list or tuple. Given type: {type(label_vocabulary).__name__}.")
    if not all(isinstance(name, str) for name in label_vocabulary):
        raise ValueError(f"label_vocabulary should hold the names of classes, strings; got {label_vocabulary!r}.")
    if len(label_vocabulary) != n_classes:
        raise ValueError(
            f'"label_vocabulary" does not have "n_classes" items. len(label_vocabulary)={len(label_vocabulary)}, '
            f"n_classes={n_classes}."
        )
    return tuple(label_vocabulary)


def checked_thresholds(thresholds: Iterable[float] | None) -> tuple[float, ...]:
    thresholds = () if thresholds is None else tuple(thresholds)
    for threshold in thresholds:
        if not 0 < threshold < 1:
            raise ValueError(f"thresholds must be in (0, 1) range; got {threshold!r}.")
    return thresholds


def threshold_metrics(
    labels: jax.Array, probabilities: jax.Array, weights: ArrayLike, thresholds: tuple[float, ...]
) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for threshold in thresholds:
        predicted = (probabilities > threshold).astype(jnp.float32)
        at = f"positive_threshold_{threshold:g}"
        metrics[f"accuracy/{at}"] = metrics_lib.accuracy(labels, predicted, weights)
        metrics[f"precision/{at}"] = metrics_lib.precision(labels, predicted, weights)
        metrics[f"recall/{at}"] = metrics_lib.recall(labels, predicted, weights)
    return metrics


def curve_metrics(labels: jax.Array, probabilities: jax.Array, weights: ArrayLike) -> dict[str, Metric]:
    return {
        "auc": metrics_lib.auc(labels, probabilities, weights),
        # The trapezoidal rule overestimates the area under this curve (Davis and Goadrich, 2006).
        "auc_precision_recall": metrics_lib.auc(
            labels, probabilities, weights, curve="PR", summation_method="careful_interpolation"
        ),
    }


def all_class_ids(logits: jax.Array, n_classes: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(n_classes, dtype=jnp.int32), (*logits.shape[:-1], n_classes))


def classification_outputs(
    predictions: Predictions, label_vocabulary: tuple[str, ...] | None, n_classes: int, **others: ExportOutput
) -> dict[str, ExportOutput]:
    # As in TensorFlow, ids are exported as strings if there is no vocabulary.
    names = list(label_vocabulary or map(str, range(n_classes)))
    classes = ClassificationOutput(predictions["probabilities"], names)
    if "all_class_ids" in predictions:
        predictions = {**predictions, "all_classes": ClassNames(predictions["all_class_ids"], label_vocabulary)}
    return {DEFAULT_SIGNATURE: classes, "classification": classes, **others, "predict": PredictOutput(predictions)}


def _loss_fn_args(loss_fn: Callable[..., jax.Array]) -> tuple[str, ...]:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of labels and logits; got {loss_fn!r}.")
    parameters = inspect.signature(loss_fn).parameters
    for required in ("labels", "logits"):
        if required not in parameters:
            raise ValueError(f"loss_fn must contain argument: {required}. Given arguments: {list(parameters)}.")
    known = ("labels", "logits", "features", "loss_reduction")
    # Arguments with a default are the user's own, as after `functools.partial`.
    unexpected = [name for name, p in parameters.items() if name not in known and p.default is p.empty]
    if unexpected:
        raise ValueError(
            f"loss_fn has unexpected args: {unexpected}. It may have {', '.join(known)}; bind others by "
            "functools.partial or give them defaults."
        )
    return tuple(name for name in known if name in parameters)
