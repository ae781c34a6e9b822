"""Models that look at no feature: what any other has to beat."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from estimator._estimator import Estimator
from estimator.canned._common import OptimizerOrFn, check_head, classifier_head, optimizer_fn
from estimator.core._batch import rows_of
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._run_config import RunConfig
from estimator.core._typing import Features, Labels
from estimator.heads import Head, RegressionHead
from estimator.losses import Reduction
from estimator.variables._variable_scope import variable_scope
from estimator.variables._variables import get_variable

LEARNING_RATE = 0.3  # TensorFlow's


class BaselineEstimator(Estimator):
    """An Estimator that learns one row of logits for all examples, baseline/bias, with any head.

    Args:
      head: makes loss, metrics and predictions of the logits.
      model_dir, config: as for `est.Estimator`.
      optimizer: an `est.Optimizer`, a `TowerOptimizer`, a function that returns one, or one of TensorFlow's names, as
        for `est.LinearEstimator`; the learning rate is 0.3. By default "Ftrl".
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerOrFn | None = None,
        config: RunConfig | None = None,
    ) -> None:
        caller = type(self).__name__
        check_head(caller, head)
        make_optimizer = optimizer_fn(caller, optimizer, "Ftrl", LEARNING_RATE)

        def model_fn(features: Features, labels: Labels, mode: str) -> EstimatorSpec:
            with variable_scope("baseline"):
                bias = get_variable("bias", (head.logits_dimension,), initializer=jax.nn.initializers.zeros)
            # Only the number of examples is read from the features.
            logits = jnp.broadcast_to(bias, (rows_of(features), head.logits_dimension))
            return head.create_estimator_spec(features, mode, logits, labels, make_optimizer())

        super().__init__(model_fn, model_dir, config)


class BaselineClassifier(BaselineEstimator):
    """An Estimator that predicts, for every example, how frequent the classes are.

    >>> import estimator as est, numpy as np, tempfile
    >>> features, labels = {"x": np.zeros(4)}, np.array([1, 0, 1, 1])
    >>> input_fn = est.inputs.numpy_input_fn(features, labels, 4, num_epochs=None, shuffle=False)
    >>> classifier = est.BaselineClassifier(tempfile.mkdtemp()).train(input_fn, steps=100)
    >>> [f"{p['logistic'][0]:.2f}" for p in classifier.predict(lambda: {"x": np.zeros(2)})]
    ['0.75', '0.75']

    Args:
      model_dir, optimizer, config: as for `est.BaselineEstimator`.
      n_classes, weight_column, label_vocabulary, loss_reduction: as for `est.MultiClassHead`, or, for two classes,
        `est.BinaryClassHead`; labels, predictions and metrics are these heads'.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerOrFn | None = None,
        config: RunConfig | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    """An Estimator that predicts the mean of the labels for every example.

    Args:
      model_dir, optimizer, config: as for `est.BaselineEstimator`.
      label_dimension, weight_column, loss_reduction: as for `est.RegressionHead`, whose labels, predictions and
        metrics it has.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | None = None,
        optimizer: OptimizerOrFn | None = None,
        config: RunConfig | None = None,
        *,
        loss_reduction: str = Reduction.SUM_OVER_BATCH_SIZE,
    ) -> None:
        super().__init__(RegressionHead(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config)
