"""The optimizer to use in a replicated model_fn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from absl import logging

from estimator import DynamicLossScale, Optimizer
from estimator.replication import Frame
from replicate.towers._map import in_towers


class TowerOptimizer(Optimizer):
    """An optimizer that acts once, on the sum of all towers' gradients.

    Within towers the scaled loss is differentiated (see `replicate_model_fn`); its gradients are summed over towers,
    and the wrapped optimizer runs once on the sums, so that what its optax chain does, such as clipping by global
    norm, happens to the global gradient. Anything a model_fn does between `compute_gradients` and `apply_gradients`
    happens per tower, before the sum. Without `replicate_model_fn`, and with one tower, it is the wrapped optimizer. As
    in TensorFlow, the sum is taken where towers are merged, not by this object: it marks the optimizers whose gradients
    are meant to be summed.

    >>> import optax
    >>> TowerOptimizer(optax.adam(1e-3)).get_name()
    'optimizer'

    For batches that do not fit into memory, `accumulate_steps=k` lets each tower run the model_fn on its rows in k
    equal parts, one after another, and add up the gradients; the sum over towers and the optimizer follow once, so
    that a training step still counts one step of the whole batch. All that is said of towers holds for these
    micro-batches: the loss is scaled by 1 / (towers * k) unless the reduction is SUM, keys of `est.make_rng` differ,
    assigned values are merged by aggregation, predictions put together in input order. TensorFlow had no such thing.
    That there are micro-batches is known only after the model_fn was traced once for all rows of a tower; of this run
    the compiled program keeps nothing but side effects, such as `jax.debug.print`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> from replicate import replicate_model_fn
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features) ** 2)
    ...     train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=2).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model = est.transform(replicate_model_fn(model_fn, devices=["cpu:0", "cpu:1"]))
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])  # two towers of two micro-batches of one row
    >>> state, spec = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(spec.loss, state.variables["w"])
    7.5 -0.5

    Args:
      optimizer_or_fn: an optax transformation, an `est.Optimizer`, or a function that returns one of them.
      name: of its entries in `State.slots`; by default the wrapped optimizer's.
      accumulate_steps: the number of micro-batches, the same for all optimizers of a training step; 1 keeps the value
        of a wrapped `TowerOptimizer`. Without `replicate_model_fn` a batch runs in one piece, whatever it says.
      loss_scale: for half-precision backward passes; see `est.DynamicLossScale`. By default the wrapped optimizer's.
      learning_rate: as for `est.Optimizer`, in `TowerOptimizer(optax.adam, learning_rate=rate)`.

    Raises:
      TypeError: there is no optimizer.
      ValueError: `accumulate_steps` is not an integer of at least 1, or the wrapped optimizer has a loss scale, or a
        learning rate, already.
    """

    sums_over_towers = True
    accumulate_steps: int

    def __init__(
        self,
        optimizer_or_fn: optax.GradientTransformation
        | Callable[..., optax.GradientTransformation | Optimizer]
        | Optimizer,
        name: str | None = None,
        accumulate_steps: int = 1,
        loss_scale: DynamicLossScale | None = None,
        learning_rate: float | jax.Array | Callable[[jax.Array], Any] | None = None,
    ) -> None:
        if not isinstance(accumulate_steps, int) or isinstance(accumulate_steps, bool) or accumulate_steps < 1:
            raise ValueError(
                "`TowerOptimizer` needs an integer of at least 1 as `accumulate_steps`, the number of micro-batches "
                f"that a tower's rows are split into; got {accumulate_steps!r}."
            )
        if accumulate_steps == 1 and isinstance(optimizer_or_fn, TowerOptimizer):
            accumulate_steps = optimizer_or_fn.accumulate_steps
        self.accumulate_steps = accumulate_steps
        if isinstance(optimizer_or_fn, Optimizer):
            name = name or optimizer_or_fn.get_name()
            wrapped = optimizer_or_fn
            if loss_scale and wrapped.loss_scale:
                raise ValueError(
                    f"`TowerOptimizer` got loss_scale={loss_scale!r} for an optimizer that has {wrapped.loss_scale!r} "
                    "already. Give it once."
                )
            if learning_rate is not None:
                raise ValueError(
                    f"`TowerOptimizer` got a learning_rate for the optimizer {wrapped.get_name()!r}, which has its "
                    "own. Give it to that one, or write `TowerOptimizer(optax.adam, learning_rate=...)`."
                )
            # A function, since the wrapped optimizer may make its transformation by one, in each run.
            super().__init__(lambda: wrapped.transformation, name, loss_scale or wrapped.loss_scale)
            self._learning_rate = wrapped._learning_rate
        else:
            super().__init__(optimizer_or_fn, name, loss_scale, learning_rate)

    def _open_slots(self, frame: Frame, names: tuple[str, ...]) -> str:
        first = not any(getattr(owner, "accumulate_steps", 1) > 1 for owner in frame.declared.slot_owners.values())
        if frame.initializing and self.accumulate_steps > 1 and first and not in_towers():
            logging.warning(
                "TowerOptimizer(..., accumulate_steps=%d) has no effect without `replicate_model_fn`: the batch runs "
                "in one piece, with the same results. Wrap the model_fn, on one device too, to save memory.",
                self.accumulate_steps,
            )
        return super()._open_slots(frame, names)
