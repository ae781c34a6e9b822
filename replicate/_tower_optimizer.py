"""The optimizer to use in a replicated model_fn."""

from __future__ import annotations

from collections.abc import Callable

import optax

from estimator import DynamicLossScale, Optimizer


class TowerOptimizer(Optimizer):
    """An optimizer that acts once, on the sum of all towers' gradients.

    Within towers the gradients are those of the scaled loss (see `replicate_model_fn`); they are summed over towers,
    and the wrapped optimizer runs once on the sums, so that what its optax chain does, such as clipping by global
    norm, happens to the global gradient. What a model_fn itself does between `compute_gradients` and
    `apply_gradients` happens per tower, before the sum. Without `replicate_model_fn`, and with one tower, it is the
    wrapped optimizer. As in TensorFlow, the sum is taken where the towers meet, not by this object: it marks the
    optimizers whose gradients are meant to be summed.

    >>> import optax
    >>> TowerOptimizer(optax.adam(1e-3)).get_name()
    'optimizer'

    Args:
      optimizer_or_fn: an optax transformation, a function that returns one, or an `est.Optimizer`.
      name: of its entries in `State.slots`; by default the wrapped optimizer's.
      loss_scale: for half-precision backward passes; see `est.DynamicLossScale`. By default the wrapped optimizer's.
    """

    def __init__(
        self,
        optimizer_or_fn: optax.GradientTransformation | Callable[[], optax.GradientTransformation] | Optimizer,
        name: str | None = None,
        loss_scale: DynamicLossScale | None = None,
    ) -> None:
        if isinstance(optimizer_or_fn, Optimizer):
            name = name or optimizer_or_fn.get_name()
            wrapped = optimizer_or_fn
            if loss_scale and wrapped.loss_scale:
                raise ValueError(
                    f"`TowerOptimizer` got loss_scale={loss_scale!r} for an optimizer that has {wrapped.loss_scale!r} "
                    "already. Give it once."
                )
            super().__init__(lambda: wrapped.transformation, name, loss_scale or wrapped.loss_scale)
        else:
            super().__init__(optimizer_or_fn, name, loss_scale)
