"""Heads and optimizers from the arguments of canned estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._record import Scalar, report_in_training
from estimator.heads import BinaryClassHead, Head, MultiClassHead
from estimator.heads._head import checked_optimizer
from estimator.optim._optimizer import Optimizer
from estimator.train._optimize_loss import OPTIMIZERS

OptimizerOrFn = Optimizer | Callable[[], Optimizer] | str

_NAMED = {name: make for name, make in OPTIMIZERS.items() if name != "Momentum"}  # as TensorFlow's estimators take them


def classifier_head(
    n_classes: int, weight_column: str | None, label_vocabulary: Sequence[str] | None, loss_reduction: str
) -> Head:
    if n_classes == 2:
        return BinaryClassHead(weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction)
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)


def check_head(caller: str, head: Any) -> None:
    if not isinstance(head, Head):
        raise TypeError(f"`{caller}` needs a head such as `est.RegressionHead()`; got {head!r}.")


def optimizer_fn(
    caller: str, optimizer: OptimizerOrFn | None, default: str, learning_rate: float, named_rate: float | None = None
) -> Callable[[], Optimizer]:
    """A function that returns the optimizer when the model_fn runs.

    Args:
      caller: the class, for error messages.
      optimizer: its argument.
      default: the name of the optimizer that stands for None.
      learning_rate: of that one.
      named_rate: the learning rate of an optimizer requested by name, if it differs.
    """
    if optimizer is None:
        optimizer = _NAMED[default](learning_rate)
    if isinstance(optimizer, str):
        if optimizer not in _NAMED:
            raise ValueError(
                f"`{caller}` got an unsupported optimizer name: {optimizer!r}. Supported names are {sorted(_NAMED)}; "
                "for any other write `optimizer=est.Optimizer(optax.adam(1e-3))`, or give one of `est.train`."
            )
        # In TensorFlow the default rate of a linear model depends on its columns; for an optimizer by name it is a
        # constant.
        optimizer = _NAMED[optimizer](named_rate or learning_rate)
    # An optimizer is checked now. A function is called in each run: a learning rate that it computes is an array of
    # that run.
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        checked = checked_optimizer(caller, optimizer)
        return lambda: checked
    function = optimizer
    return lambda: checked_optimizer(caller, function())


def show_layer(values: jax.Array, prefix: str = "") -> None:
    """Shows the fraction of zeros in TRAIN, under the current variable scope, with a prefix.

    TensorFlow shows a histogram too, which here makes compiling a small network take a third longer.
    """
    report_in_training(f"{prefix}fraction_of_zero_values", lambda: Scalar(jnp.mean(values == 0), summary=True))
