"""Heads, as in `tf.estimator`: what a model does with its logits, so that a model_fn need only compute those.

A head takes logits and labels to a loss, predictions and metrics, and puts these into an `EstimatorSpec`. Losses are
those of `est.losses` and metrics those of `est.metrics`, so that they are the same over any number of towers.
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
