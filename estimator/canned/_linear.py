"""Linear models over feature columns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from estimator._estimator import Estimator
from estimator.canned._common import OptimizerOrFn, check_head, classifier_head, optimizer_fn, show_layer
from estimator.checkpoint._warm_start import WarmStartSettings
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import Frame, current_frame
from estimator.core._record import Histogram, Scalar, report_in_training
from estimator.core._run_config import RunConfig
from estimator.core._typing import Features, Labels, PyTree
from estimator.feature_column import linear_model
from estimator.feature_column._column import CategoricalColumn, DenseColumn
from estimator.feature_column._layers import checked_columns
from estimator.heads import Head, RegressionHead
from estimator.losses import Reduction
from estimator.sparse._embedding_sparse import check_combiner
from estimator.variables._variable_scope import variable_scope

LEARNING_RATE = 0.2  # TensorFlow's, at most


class LinearEstimator(Estimator):
    """An Estimator of a linear model with any head.

    Its variables are named as in TensorFlow 1: linear/linear_model/<column>/weights and
    linear/linear_model/bias_weights. They are initially zero. Training shows, as there,
    linear/fraction_of_zero_weights and linear/bias.

    Args:
      head: computes loss, metrics and predictions from the logits.
      feature_columns: feature columns of any kind.
      model_dir, config, warm_start_from: as for `est.Estimator`.
      optimizer: an `est.Optimizer`, a `TowerOptimizer`, a function that returns one, or one of TensorFlow's names,
        "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD": the one of `est.train` with the learning rate 0.2. By default
        "Ftrl" with `min(0.2, 1 / sqrt(number of columns))`.
      sparse_combiner: how the weights of several classes of an example are combined: "sum", "mean" or "sqrtn".
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Iterable[DenseColumn | CategoricalColumn],
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerOrFn | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        sparse_combiner: str = "sum",
    ) -> None:
        caller = type(self).__name__
        check_head(caller, head)
        columns = checked_columns(feature_columns)
        logits_fn = linear_logits_fn(caller, head.logits_dimension, columns, sparse_combiner)
        make_optimizer = optimizer_fn(
            caller, optimizer, "Ftrl", linear_learning_rate(LEARNING_RATE, columns), named_rate=LEARNING_RATE
        )

        def model_fn(features: Features, labels: Labels, mode: str) -> EstimatorSpec:
            return head.create_estimator_spec(features, mode, logits_fn(features, mode), labels, make_optimizer())

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class LinearClassifier(LinearEstimator):
    """A classifier: a linear model.

    >>> import estimator as est, numpy as np, tempfile
    >>> kind = est.feature_column.categorical_column_with_identity("kind", 3)
    >>> features, labels = {"kind": np.array([0, 1, 2])}, np.array([0, 1, 1])
    >>> input_fn = est.inputs.numpy_input_fn(features, labels, 3, num_epochs=None, shuffle=False)
    >>> classifier = est.LinearClassifier([kind], tempfile.mkdtemp()).train(input_fn, steps=20)
    >>> [f"{w:.1f}" for w in classifier.get_variable_value("linear/linear_model/kind/weights").ravel()]
    ['-1.1', '0.9', '0.9']

    Args:
      feature_columns, model_dir, optimizer, config, sparse_combiner: as for `est.LinearEstimator`.
      n_classes, weight_column, label_vocabulary, loss_reduction: as for `est.MultiClassHead`, or, for two classes,
        `est.BinaryClassHead`; which define labels, predictions and metrics.
    """

    def __init__(
        self,
        feature_columns: Iterable[DenseColumn | CategoricalColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerOrFn | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, warm_start_from, sparse_combiner=sparse_combiner
        )


class LinearRegressor(LinearEstimator):
    """A regressor: a linear model.

    Args:
      feature_columns, model_dir, optimizer, config, sparse_combiner: as for `est.LinearEstimator`.
      label_dimension, weight_column, loss_reduction: as for `est.RegressionHead`, which defines labels,
        predictions and metrics.
    """

    def __init__(
        self,
        feature_columns: Iterable[DenseColumn | CategoricalColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | None = None,
        optimizer: OptimizerOrFn | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, warm_start_from, sparse_combiner=sparse_combiner
        )


def linear_learning_rate(at_most: float, columns: Sequence[Any]) -> float:
    # As in TensorFlow: all columns add to one logit, which would change more in a step the more columns there are.
    return min(at_most, 1 / math.sqrt(len(columns)))


def linear_logits_fn(
    caller: str, units: int, columns: Sequence[Any], sparse_combiner: str, *, shows_logits: bool = False
) -> Callable[[PyTree, str], jax.Array]:
    """A function `(features, mode)` that returns logits of shape `(batch, units)`."""
    check_combiner(caller, "sparse_combiner", sparse_combiner)

    def logits_fn(features: Features, mode: str) -> jax.Array:
        with variable_scope("linear"):
            logits = linear_model(features, columns, units, sparse_combiner)
            _show_weights(current_frame(caller))
            if shows_logits:
                show_layer(logits)
            return logits

    return logits_fn


def _show_weights(frame: Frame) -> None:
    """Shows TensorFlow's summaries of a linear model in TRAIN."""
    prefix = "/".join((*frame.scope, "linear_model", ""))
    # Not by `read_variable`: reading a large table as a whole makes its gradient dense.
    weights = {name: jax.lax.stop_gradient(value) for name, value in frame.variables.items() if name.startswith(prefix)}
    bias = weights.pop(f"{prefix}bias_weights")

    def fraction_of_zeros() -> Scalar:
        zeros, size = sum((x == 0).sum() for x in weights.values()), sum(x.size for x in weights.values())
        return Scalar(zeros / size, summary=True)

    report_in_training("bias", lambda: Scalar(bias[0], summary=True) if bias.size == 1 else Histogram.of(bias))
    report_in_training("fraction_of_zero_weights", fraction_of_zeros)
