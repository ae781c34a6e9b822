"""TensorFlow's optimizers and learning rate schedules, with its names, arguments and numbers, as in `tf.train`."""

from typing import TYPE_CHECKING

from estimator.porting._missing_names import names_missing_in as _names_missing_in
from estimator.train._adam import AdaMaxOptimizer, AdamOptimizer, AdamWOptimizer, LazyAdamOptimizer
from estimator.train._adaptive import AdadeltaOptimizer, AdagradOptimizer, RMSPropOptimizer
from estimator.train._descent import GradientDescentOptimizer, MomentumOptimizer, MomentumWOptimizer
from estimator.train._global_step import get_global_step, get_or_create_global_step
from estimator.train._optimize_loss import optimize_loss
from estimator.train._proximal import (
    AdagradDAOptimizer,
    FtrlOptimizer,
    ProximalAdagradOptimizer,
    ProximalGradientDescentOptimizer,
)
from estimator.train._schedules import (
    cosine_decay,
    cosine_decay_restarts,
    exponential_decay,
    inverse_time_decay,
    linear_cosine_decay,
    natural_exp_decay,
    piecewise_constant,
    polynomial_decay,
)
from estimator.train._sign import AddSignOptimizer, PowerSignOptimizer

__all__ = [
    "AdaMaxOptimizer",
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "AddSignOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "LazyAdamOptimizer",
    "MomentumOptimizer",
    "MomentumWOptimizer",
    "PowerSignOptimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
    "cosine_decay",
    "cosine_decay_restarts",
    "exponential_decay",
    "get_global_step",
    "get_or_create_global_step",
    "inverse_time_decay",
    "linear_cosine_decay",
    "natural_exp_decay",
    "optimize_loss",
    "piecewise_constant",
    "polynomial_decay",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(
        __name__, "; it has optimizers and schedules. Hooks and the rest of `tf.train` are in `est` itself."
    )
