"""Heads and optimizers from the arguments of canned estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator.core._record import Scalar, report_in_training
from estimator.heads import BinaryClassHead, Head, MultiClassHead
from estimator.heads._head import checked_optimizer
from estimator.optim._optimizer import Optimizer

OptimizerOrFn = Optimizer | Callable[[], Optimizer] | str

# TensorFlow's names and its rules' defaults.
_NAMED = {
    "Adagrad": lambda rate: optax.adagrad(rate, initial_accumulator_value=0.1),
    "Adam": optax.adam,
    "RMSProp": lambda rate: optax.rmsprop(rate, decay=0.9, eps=1e-10, initial_scale=1.0),
    "SGD": optax.sgd,
}
_FTRL = "Ftrl"


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
    caller: str,
    optimizer: OptimizerOrFn | None,
    learning_rate: float,
    *,
    from_zeros: bool,
    named_rate: float | None = None,
) -> Callable[[], Optimizer]:
    """A function that returns the optimizer when the model_fn runs.

    Args:
      caller: the class, for error messages.
      optimizer: its argument; None: Adagrad.
      learning_rate: the learning rate of the default optimizer.
      from_zeros: whether all variables of the model are initially zero.
      named_rate: the learning rate of an optimizer requested by name, if it differs.
    """
    if optimizer is None:
        optimizer = Optimizer(_NAMED["Adagrad"](learning_rate))
    if isinstance(optimizer, str):
        optimizer = Optimizer(_rule(caller, optimizer, named_rate or learning_rate, from_zeros))
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        checked = checked_optimizer(caller, optimizer)
        return lambda: checked
    function = optimizer
    return lambda: checked_optimizer(caller, function())


def _rule(caller: str, name: str, learning_rate: float, from_zeros: bool) -> optax.GradientTransformation:
    if name in _NAMED:
        return _NAMED[name](learning_rate)
    if name != _FTRL:
        raise ValueError(
            f"`{caller}` got an unsupported optimizer name: {name!r}. Supported names are {sorted([*_NAMED, _FTRL])}; "
            "for any other write `optimizer=est.Optimizer(optax.adam(1e-3))`."
        )
    if not from_zeros:
        raise ValueError(
            f"`{caller}` cannot train a network by {_FTRL!r}, which optax does not have. Similar is "
            f"`optimizer=est.Optimizer(optax.adagrad({learning_rate}, initial_accumulator_value=0.1))`, which takes "
            "the same steps where variables begin as zeros."
        )
    return _NAMED["Adagrad"](learning_rate)  # the same steps as Ftrl, from zeros and without regularization


def show_layer(values: jax.Array) -> None:
    """Shows the fraction of zeros in TRAIN, under the current variable scope.

    TensorFlow shows a histogram too, which here makes compiling a small network take a third longer.
    """
    report_in_training("fraction_of_zero_values", lambda: Scalar(jnp.mean(values == 0), summary=True))
