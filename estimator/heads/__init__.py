"""Heads, as in `tf.estimator`: with one, a model_fn only computes logits.

A head computes a loss, predictions and metrics from logits and labels, and puts them into an `EstimatorSpec`. It uses
`est.losses` and `est.metrics`, so the results do not depend on the number of towers.
"""

from estimator.heads._binary import BinaryClassHead
from estimator.heads._head import Head
from estimator.heads._multi_class import MultiClassHead
from estimator.heads._multi_head import MultiHead
from estimator.heads._multi_label import MultiLabelHead
from estimator.heads._regression import LogisticRegressionHead, PoissonRegressionHead, RegressionHead

__all__ = [
    "BinaryClassHead",
    "Head",
    "LogisticRegressionHead",
    "MultiClassHead",
    "MultiHead",
    "MultiLabelHead",
    "PoissonRegressionHead",
    "RegressionHead",
]
