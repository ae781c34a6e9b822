"""Losses, as in `tf.losses`: labels first, one weight per element or row, one scalar out; and their total."""

from typing import TYPE_CHECKING

from estimator.losses._collected import (
    add_loss,
    get_losses,
    get_regularization_loss,
    get_regularization_losses,
    get_total_loss,
)
from estimator.losses._losses import (
    Reduction,
    absolute_difference,
    compute_weighted_loss,
    hinge_loss,
    huber_loss,
    log_loss,
    mean_squared_error,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    sparse_softmax_cross_entropy,
)
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = [
    "Reduction",
    "absolute_difference",
    "add_loss",
    "compute_weighted_loss",
    "get_losses",
    "get_regularization_loss",
    "get_regularization_losses",
    "get_total_loss",
    "hinge_loss",
    "huber_loss",
    "log_loss",
    "mean_squared_error",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "sparse_softmax_cross_entropy",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__, f"; it has {', '.join(__all__)}.")
