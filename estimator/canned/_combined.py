"""Wide and deep: a linear model and a network, trained together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from estimator._estimator import Estimator
from estimator.canned._common import OptimizerOrFn, check_head, classifier_head, optimizer_fn
from estimator.canned._dnn import Activation, dnn_logits_fn
from estimator.canned._linear import linear_learning_rate, linear_logits_fn
from estimator.checkpoint._warm_start import WarmStartSettings
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import current_frame
from estimator.core._run_config import RunConfig
from estimator.core._train_op import TrainOp, group
from estimator.core._typing import Features, Labels
from estimator.feature_column._column import CategoricalColumn, DenseColumn
from estimator.feature_column._layers import checked_columns
from estimator.heads import Head, RegressionHead
from estimator.losses import Reduction

_DNN_LEARNING_RATE, _LINEAR_LEARNING_RATE = 0.001, 0.005  # TensorFlow's


class DNNLinearCombinedEstimator(Estimator):
    """An Estimator whose logits are the sum of a linear model's and a network's, with any head.

    Each part has its own columns and optimizer; variables and summaries are named as in `est.LinearEstimator` and
    `est.DNNEstimator`. A part without columns is left out, as in TensorFlow.

    Args:
      head: computes loss, metrics and predictions from the logits.
      model_dir, config, warm_start_from: as for `est.Estimator`.
      linear_feature_columns, linear_optimizer, linear_sparse_combiner: as for `est.LinearEstimator`; the default
        learning rate is 0.005 at most.
      dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm: as for
        `est.DNNEstimator`; the default learning rate is 0.001.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[DenseColumn | CategoricalColumn] | None = None,
        linear_optimizer: OptimizerOrFn | None = None,
        dnn_feature_columns: Iterable[DenseColumn] | None = None,
        dnn_optimizer: OptimizerOrFn | None = None,
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Activation = jax.nn.relu,
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        caller = type(self).__name__
        check_head(caller, head)
        if not linear_feature_columns and not dnn_feature_columns:
            raise ValueError(
                f"Either linear_feature_columns or dnn_feature_columns must be given to `{caller}`; got "
                f"{linear_feature_columns!r} and {dnn_feature_columns!r}."
            )
        units = head.logits_dimension
        # The network first, as TensorFlow builds it: variables are listed in the order of their creation.
        parts = []
        if dnn_feature_columns:
            dnn = dnn_logits_fn(
                caller, units, dnn_hidden_units, dnn_feature_columns, dnn_activation_fn, dnn_dropout, batch_norm
            )
            parts.append((dnn, optimizer_fn(caller, dnn_optimizer, "Adagrad", _DNN_LEARNING_RATE)))
        if linear_feature_columns:
            columns = checked_columns(linear_feature_columns)
            rate = linear_learning_rate(_LINEAR_LEARNING_RATE, columns)
            # As in TensorFlow, the logits of the linear part are shown here, but not in a linear model alone.
            linear = linear_logits_fn(caller, units, columns, linear_sparse_combiner, shows_logits=True)
            parts.append((linear, optimizer_fn(caller, linear_optimizer, "Ftrl", rate)))

        def model_fn(features: Features, labels: Labels, mode: str) -> EstimatorSpec:
            trainable = current_frame(caller).declared.trainable
            logits, own = [], []
            for logits_fn, _ in parts:
                # As in TensorFlow, each part has its own variables and optimizer; a column in both parts has a table in
                # each. The variables of a part are those that its logits_fn adds.
                before = set(trainable)
                logits.append(logits_fn(features, mode))
                own.append([name for name in trainable if trainable[name] and name not in before])

            def train_op_fn(loss: jax.Array) -> TrainOp:
                return group(*(make().minimize(loss, names) for (_, make), names in zip(parts, own, strict=True)))

            return head.create_estimator_spec(features, mode, sum(logits), labels, train_op_fn=train_op_fn)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A classifier: a linear model and a network together.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: as for `est.DNNClassifier`.
      The others: as for `est.DNNLinearCombinedEstimator`.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[DenseColumn | CategoricalColumn] | None = None,
        linear_optimizer: OptimizerOrFn | None = None,
        dnn_feature_columns: Iterable[DenseColumn] | None = None,
        dnn_optimizer: OptimizerOrFn | None = None,
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Activation = jax.nn.relu,
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        linear = (linear_feature_columns, linear_optimizer)
        parts = (*linear, dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout)
        options: dict[str, Any] = {"batch_norm": batch_norm, "linear_sparse_combiner": linear_sparse_combiner}
        super().__init__(head, model_dir, *parts, config, warm_start_from, **options)


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """A regressor: a linear model and a network together.

    Args:
      label_dimension, weight_column, loss_reduction: as for `est.DNNRegressor`.
      The others: as for `est.DNNLinearCombinedEstimator`.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[DenseColumn | CategoricalColumn] | None = None,
        linear_optimizer: OptimizerOrFn | None = None,
        dnn_feature_columns: Iterable[DenseColumn] | None = None,
        dnn_optimizer: OptimizerOrFn | None = None,
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Activation = jax.nn.relu,
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: str | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        linear = (linear_feature_columns, linear_optimizer)
        parts = (*linear, dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout)
        options: dict[str, Any] = {"batch_norm": batch_norm, "linear_sparse_combiner": linear_sparse_combiner}
        super().__init__(head, model_dir, *parts, config, warm_start_from, **options)
