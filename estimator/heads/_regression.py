"""Heads for real numbers, counts and shares."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax.losses
from jax.typing import ArrayLike

from estimator import metrics as metrics_lib
from estimator.core._argument_checks import as_int
from estimator.core._export_output import DEFAULT_SIGNATURE, ExportOutput, PredictOutput, RegressionOutput
from estimator.heads._head import Predictions
from estimator.heads._one_task import OneTaskHead, nan_where
from estimator.losses import Reduction
from estimator.metrics import Metric


class RegressionHead(OneTaskHead):
    """The head of a regression model; the loss is the squared error.

    >>> import estimator as est, jax.numpy as jnp
    >>> head = est.RegressionHead()
    >>> head.loss(jnp.array([1.0, 2.0]), jnp.array([[2.0], [5.0]])).item()
    5.0

    Predictions: "predictions" of shape `(batch, label_dimension)`, and with an `inverse_link_fn` "logits" too.
    Metrics: average_loss, prediction/mean, label/mean.

    Args:
      label_dimension: the number of values per example.
      weight_column: the feature with weights of shape `(batch,)`, `(batch, 1)` or `(batch, label_dimension)`.
      loss_reduction, name: as for `est.BinaryClassHead`.
      loss_fn: likewise; the losses have shape `(batch, label_dimension)`.
      inverse_link_fn: function from logits to predictions; if None, they are the same.

    Labels have shape `(batch, label_dimension)`, or `(batch,)` for `label_dimension=1`.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | None = None,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., jax.Array] | None = None,
        inverse_link_fn: Callable[[jax.Array], jax.Array] | None = None,
        name: str | None = None,
    ) -> None:
        label_dimension = as_int("RegressionHead", "label_dimension", label_dimension)
        if label_dimension < 1:
            raise ValueError(f"Invalid label_dimension {label_dimension}; it must be an int of at least 1.")
        if inverse_link_fn is not None and not callable(inverse_link_fn):
            raise TypeError(
                f"inverse_link_fn must be a function of logits, such as `jnp.exp`; got {inverse_link_fn!r}."
            )
        super().__init__(
            # The dimensions of the logits, the labels and the losses.
            label_dimension,
            label_dimension,
            label_dimension,
            weight_column,
            loss_reduction,
            loss_fn,
            name,
        )
        self._inverse_link_fn = inverse_link_fn

    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        return optax.losses.squared_error(logits, labels)

    def _predictions(self, logits: jax.Array) -> Predictions:
        if self._inverse_link_fn is None:
            return {"predictions": logits}
        return {"predictions": self._inverse_link_fn(logits), "logits": logits}

    def _metrics(self, labels: jax.Array, logits: jax.Array, weights: ArrayLike) -> dict[str, Metric]:
        return {
            "prediction/mean": metrics_lib.mean(self._predictions(logits)["predictions"], weights),
            "label/mean": metrics_lib.mean(labels, weights),
        }

    def export_outputs(self, predictions: Predictions) -> dict[str, ExportOutput]:
        value = RegressionOutput(predictions["predictions"])
        return {DEFAULT_SIGNATURE: value, "regression": value, "predict": PredictOutput(predictions)}


class PoissonRegressionHead(RegressionHead):
    """The head of a model of counts: `exp(logits)` is the mean of a Poisson distribution.

    >>> import estimator as est, jax.numpy as jnp
    >>> head = est.PoissonRegressionHead(compute_full_loss=False)
    >>> head.loss(jnp.array([2]), jnp.array([[0.0]])).item()  # exp(0) - 2 * 0
    1.0

    Args:
      label_dimension, weight_column, loss_reduction, name: as for `est.RegressionHead`.
      compute_full_loss: whether to add the constant part of the loss, log(labels!), by Stirling's approximation.

    Labels are 0 or more; the loss of a negative one is NaN.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | None = None,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        compute_full_loss: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(label_dimension, weight_column, loss_reduction, inverse_link_fn=jnp.exp, name=name)
        self._compute_full_loss = compute_full_loss

    def _are_valid(self, logits: jax.Array) -> jax.Array:
        return jnp.isfinite(jnp.exp(logits))

    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        # Without the logarithm of `labels!`, which does not depend on the logits.
        losses = jnp.exp(logits) - labels * logits
        if self._compute_full_loss:
            # As in TensorFlow, nothing is added up to 1: the approximation is bad there, and its logarithm infinite at
            # 0.
            large = jnp.maximum(labels, 1)
            stirling = large * jnp.log(large) - large + 0.5 * jnp.log(2 * math.pi * large)
            losses = losses + jnp.where(labels > 1, stirling, 0)
        return nan_where(labels < 0, losses)


class LogisticRegressionHead(RegressionHead):
    """The head of a model of shares: `sigmoid(logits)` approximates labels between 0 and 1.

    It has the loss of `est.BinaryClassHead`, and the predictions and metrics of `est.RegressionHead`.

    >>> import estimator as est, jax.numpy as jnp
    >>> head = est.LogisticRegressionHead()
    >>> print(f"{head.loss(jnp.array([0.25]), jnp.array([[0.0]])):.4f}")
    0.6931

    Args:
      weight_column, loss_reduction, name: as for `est.RegressionHead`.

    The loss of a label that is not between 0 and 1 is NaN.
    """

    def __init__(
        self,
        weight_column: str | None = None,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        name: str | None = None,
    ) -> None:
        super().__init__(1, weight_column, loss_reduction, inverse_link_fn=jax.nn.sigmoid, name=name)

    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
        return nan_where((labels < 0) | (labels > 1), losses)
