"""Fully connected networks over feature columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from estimator import layers
from estimator._estimator import Estimator
from estimator.canned._common import OptimizerOrFn, check_head, classifier_head, optimizer_fn, show_layer
from estimator.checkpoint._warm_start import WarmStartSettings
from estimator.core._argument_checks import as_int
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._mode_keys import ModeKeys
from estimator.core._run_config import RunConfig
from estimator.core._typing import Features, Labels, PyTree
from estimator.feature_column import input_layer
from estimator.feature_column._column import DenseColumn
from estimator.feature_column._layers import checked_dense
from estimator.heads import Head, RegressionHead
from estimator.losses import Reduction
from estimator.variables._variable_scope import variable_scope

LEARNING_RATE = 0.05  # TensorFlow's
_MOMENTUM = 0.999  # of batch normalization, as in TensorFlow

Activation = Callable[[jax.Array], jax.Array]


class DNNEstimator(Estimator):
    """An Estimator of a fully connected network with any head.

    Its variables are named as in TensorFlow 1: dnn/hiddenlayer_0/kernel, dnn/logits/bias,
    dnn/input_from_feature_columns/input_layer/<column>/embedding_weights. Training shows
    dnn/hiddenlayer_0/fraction_of_zero_values as there, and the same of the other layers.

    Args:
      head: computes loss, metrics and predictions from the logits.
      hidden_units: the width of each hidden layer.
      feature_columns: numeric, bucketized, indicator and embedding columns.
      model_dir, config, warm_start_from: as for `est.Estimator`.
      optimizer: an `est.Optimizer`, a `TowerOptimizer`, a function that returns one, or one of TensorFlow's names,
        "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD": the one of `est.train` with the learning rate 0.05. By default
        "Adagrad".
      activation_fn: the activation function of the hidden layers.
      dropout: the fraction of a hidden layer that is dropped in training; if None, there is no dropout.
      batch_norm: whether hidden layers are normalized. Each tower normalizes by its own rows, as in TensorFlow;
        `moving_mean` and `moving_variance` are averaged over towers.
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Iterable[int],
        feature_columns: Iterable[DenseColumn],
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerOrFn | None = None,
        activation_fn: Activation = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        batch_norm: bool = False,
    ) -> None:
        caller = type(self).__name__
        check_head(caller, head)
        logits_fn = dnn_logits_fn(
            caller, head.logits_dimension, hidden_units, feature_columns, activation_fn, dropout, batch_norm
        )
        make_optimizer = optimizer_fn(caller, optimizer, "Adagrad", LEARNING_RATE)

        def model_fn(features: Features, labels: Labels, mode: str) -> EstimatorSpec:
            logits = logits_fn(features, mode)
            return head.create_estimator_spec(features, mode, logits, labels, make_optimizer())

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class DNNClassifier(DNNEstimator):
    """A classifier: a fully connected network.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> columns = [est.feature_column.numeric_column("x")]
    >>> x = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    >>> input_fn = est.inputs.numpy_input_fn({"x": x}, (x > 1.5).astype(np.int32), 4, num_epochs=None, shuffle=False)
    >>> optimizer = est.Optimizer(optax.adam(0.1))
    >>> classifier = est.DNNClassifier([8], columns, tempfile.mkdtemp(), optimizer=optimizer).train(input_fn, steps=60)
    >>> classifier.evaluate(input_fn, steps=1)["accuracy"]
    1.0
    >>> [int(p["class_ids"][0]) for p in classifier.predict(lambda: {"x": x}, "class_ids")]
    [0, 0, 1, 1]

    It is replicated like any model_fn, with a wrapped optimizer:
    `est.Estimator(replicate_model_fn(classifier.model_fn), classifier.model_dir)`.

    Args:
      hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout, config, batch_norm: as for
        `est.DNNEstimator`.
      n_classes, weight_column, label_vocabulary, loss_reduction: as for `est.MultiClassHead`, or, for two classes,
        `est.BinaryClassHead`; which define labels, predictions and metrics.
    """

    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[DenseColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerOrFn | None = None,
        activation_fn: Activation = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        network = (hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout)
        super().__init__(head, *network, config, warm_start_from, batch_norm=batch_norm)


class DNNRegressor(DNNEstimator):
    """A regressor: a fully connected network.

    Args:
      hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout, config, batch_norm: as for
        `est.DNNEstimator`.
      label_dimension, weight_column, loss_reduction: as for `est.RegressionHead`, which defines labels,
        predictions and metrics.
    """

    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[DenseColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | None = None,
        optimizer: OptimizerOrFn | None = None,
        activation_fn: Activation = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        network = (hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout)
        super().__init__(head, *network, config, warm_start_from, batch_norm=batch_norm)


def dnn_logits_fn(
    caller: str,
    units: int,
    hidden_units: Any,
    feature_columns: Any,
    activation_fn: Activation,
    dropout: float | None,
    batch_norm: bool,
) -> Callable[[PyTree, str], jax.Array]:
    """A function `(features, mode)` that returns logits of shape `(batch, units)`."""
    given = hidden_units if isinstance(hidden_units, Iterable) else (hidden_units,)
    widths = tuple(as_int(caller, "hidden_units", width) for width in given)
    if not widths or min(widths) < 1:
        raise ValueError(f"`{caller}` needs the widths of its layers as hidden_units, as in [64, 32]; got {widths!r}.")
    columns = checked_dense(feature_columns)
    if not callable(activation_fn):
        raise TypeError(f"`{caller}` needs a function such as `jax.nn.relu` as activation_fn; got {activation_fn!r}.")
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"`{caller}` needs a number in [0, 1), or None, as dropout; got {dropout!r}.")

    def logits_fn(features: Features, mode: str) -> jax.Array:
        training = mode == ModeKeys.TRAIN
        with variable_scope("dnn"):
            # The scopes here and below are TensorFlow's: the names in a checkpoint of its DNN are the same.
            with variable_scope("input_from_feature_columns"):
                net = input_layer(features, columns)
            for i, width in enumerate(widths):
                net = layers.dense(net, width, activation_fn, name=f"hiddenlayer_{i}")
                # Entered again for TensorFlow's names: dnn/hiddenlayer_0/kernel, dnn/hiddenlayer_0/batchnorm_0/gamma.
                with variable_scope(f"hiddenlayer_{i}"):
                    # As in TensorFlow, dropout comes before batch normalization.
                    if dropout:
                        net = layers.dropout(net, dropout, training=training)
                    if batch_norm:
                        net = layers.batch_normalization(
                            net, momentum=_MOMENTUM, training=training, name=f"batchnorm_{i}"
                        )
                show_layer(net, f"hiddenlayer_{i}/")
            logits = layers.dense(net, units, name="logits")
            show_layer(logits, "logits/")
            return logits

    return logits_fn
