"""Heads, as in `tf.estimator`: with one, a model_fn only computes logits.

A head computes a loss, predictions and metrics from logits and labels, and puts them into an `EstimatorSpec`. It uses
`est.losses` and `est.metrics`, so the results do not depend on the number of towers.
"""

from typing import TYPE_CHECKING

from estimator.porting._missing_names import names_loaded_later as _names_loaded_later

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

if TYPE_CHECKING:
    from estimator.heads._binary import BinaryClassHead
    from estimator.heads._head import Head
    from estimator.heads._multi_class import MultiClassHead
    from estimator.heads._multi_head import MultiHead
    from estimator.heads._multi_label import MultiLabelHead
    from estimator.heads._regression import LogisticRegressionHead, PoissonRegressionHead, RegressionHead
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__,
        {
            "_binary": "BinaryClassHead",
            "_head": "Head",
            "_multi_class": "MultiClassHead",
            "_multi_head": "MultiHead",
            "_multi_label": "MultiLabelHead",
            "_regression": "LogisticRegressionHead PoissonRegressionHead RegressionHead",
        },
    )
