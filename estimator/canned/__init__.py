"""Canned estimators, as in `tf.estimator`: Estimators whose model_fn is there already, over feature columns."""

from estimator.canned._baseline import BaselineClassifier, BaselineEstimator, BaselineRegressor
from estimator.canned._combined import (
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
)
from estimator.canned._dnn import DNNClassifier, DNNEstimator, DNNRegressor
from estimator.canned._linear import LinearClassifier, LinearEstimator, LinearRegressor

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
]
