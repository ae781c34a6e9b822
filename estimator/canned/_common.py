"""What canned estimators share: heads and optimizers from their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optax

from estimator._optimizer import Optimizer
from estimator.heads import BinaryClassHead, Head, MultiClassHead, RegressionHead
from estimator.heads._head import checked_optimizer

OptimizerOrFn = Optimizer | Callable[[], Optimizer]


def classifier_head(
    n_classes: int, weight_column: str | None, label_vocabulary: Sequence[str] | None, loss_reduction: str
) -> Head:
    if n_classes == 2:
        return BinaryClassHead(weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction)
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)


def regressor_head(label_dimension: int, weight_column: str | None, loss_reduction: str) -> Head:
    return RegressionHead(label_dimension, weight_column, loss_reduction)


def check_head(caller: str, head: Any) -> None:
    if not isinstance(head, Head):
        raise TypeError(f"`{caller}` needs a head such as `est.RegressionHead()`; got {head!r}.")


def optimizer_fn(caller: str, optimizer: OptimizerOrFn | None, learning_rate: float) -> Callable[[], Optimizer]:
    """Gives the optimizer when the model_fn runs; Adagrad where there is none."""
    if optimizer is None:
        # TensorFlow's Ftrl, as linear models have it by default, is this rule where weights begin as zeros.
        optimizer = Optimizer(optax.adagrad(learning_rate, initial_accumulator_value=0.1))
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        made = checked_optimizer(caller, optimizer)
        return lambda: made
    function = optimizer
    return lambda: checked_optimizer(caller, function())
