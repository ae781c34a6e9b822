"""Loss scaling: half-precision backward passes whose small gradients do not vanish."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator.core._typing import PyTree, Slots


class LossScaleState(NamedTuple):
    """The entry in `State.slots` of an optimizer with a loss scale.

    Attributes:
      inner: the state of its optax transformation.
      scale: float32 scalar, the factor on the loss in the next step.
      good_steps: int32 scalar, the number of steps since the scale last changed.
    """

    inner: optax.OptState
    scale: jax.Array
    good_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A factor on the loss while gradients are taken, which adjusts itself.

    To compute in half precision, see `est.Policy`, or cast: `w.astype(jnp.float16)`. Variables stay float32, and so do
    their gradients, the sums over towers and the updates; but within the backward pass small numbers become zero. The
    scale lifts them, and gradients are divided by it as soon as they are float32 again, so that all a model_fn sees
    (the loss, what `compute_gradients` returns) is unscaled. If the scale was too large, the sum of the gradients is
    not finite: that update is skipped, together with what the model_fn assigned in that step, and the scale is divided
    by `factor`; after `growth_interval` good steps it is multiplied. Powers of two keep all of this exact.

    bfloat16 has the range of float32 and needs no scale.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def trained(loss_scale):
    ...     def model_fn(features, labels, mode):
    ...         w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...         loss = 1e-8 * jnp.mean(w.astype(jnp.float16) * features, dtype=jnp.float32)
    ...         train_op = est.Optimizer(optax.sgd(1e7), loss_scale=loss_scale).minimize(loss)
    ...         return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    ...     model, x = est.transform(model_fn), jnp.ones(1, jnp.float16)
    ...     return model.train_step(model.init(jax.random.key(0), x), x)[0]
    >>> print(f"{trained(None).variables['w']:.2f} {trained(DynamicLossScale()).variables['w']:.2f}")
    1.00 0.90
    >>> print(trained(DynamicLossScale()).slots["optimizer"].scale)
    32768.0

    Args:
      initial_scale: the factor in the first step.
      growth_interval: after how many good steps in a row the scale grows.
      factor: by which it grows and shrinks.
      min_scale: below which it does not shrink.

    Raises:
      ValueError: a number is out of its range; the message names it.
    """

    # The defaults of TensorFlow's `LossScaleOptimizer`.
    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        largest = float(jnp.finfo(jnp.float32).max)
        if not 0 < self.min_scale <= self.initial_scale <= largest:
            raise ValueError(
                "`DynamicLossScale` needs 0 < min_scale <= initial_scale, which must be finite in float32; "
                f"got min_scale={self.min_scale!r} and initial_scale={self.initial_scale!r}."
            )
        if not (self.factor > 1 and math.isfinite(self.factor)):
            raise ValueError(f"`DynamicLossScale` needs a finite factor > 1, such as 2.0; got {self.factor!r}.")
        if not isinstance(self.growth_interval, int) or self.growth_interval < 1:
            raise ValueError(
                f"`DynamicLossScale` needs growth_interval, a number of steps, to be an int >= 1; "
                f"got {self.growth_interval!r}."
            )

    def initial(self, inner: optax.OptState) -> LossScaleState:
        return LossScaleState(inner, jnp.float32(self.initial_scale), jnp.int32(0))

    def after(self, good: jax.Array, state: LossScaleState, inner: optax.OptState) -> LossScaleState:
        """The state after a step.

        Args:
          good: whether the gradients were finite.
          state: before the step.
          inner: the state of the transformation after it.
        """
        factor = jnp.float32(self.factor)
        grows = state.good_steps + 1 >= self.growth_interval
        # Never infinity, which a division does not make finite again.
        grown = jnp.where(jnp.isfinite(state.scale * factor), state.scale * factor, state.scale)
        after_good = jnp.where(grows, grown, state.scale)
        after_bad = jnp.maximum(state.scale / factor, jnp.float32(self.min_scale))
        good_steps = jnp.where(good & ~grows, state.good_steps + 1, 0)
        return LossScaleState(inner, jnp.where(good, after_good, after_bad), good_steps)


def check_argument(caller: str, loss_scale: object) -> DynamicLossScale | None:
    if loss_scale is not None and not isinstance(loss_scale, DynamicLossScale):
        raise TypeError(
            f"`{caller}` takes a loss_scale such as `est.DynamicLossScale()`; got {loss_scale!r}. "
            "Give a number as `est.DynamicLossScale(initial_scale=...)`."
        )
    return loss_scale


def current(slots: Slots, name: str | None) -> jax.Array | None:
    """The scale in an optimizer's entry of the slots; None if it has none."""
    entry = slots.get(name) if name is not None else None
    return entry.scale if isinstance(entry, LossScaleState) else None


def scale_by(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x * scale`, multiplied in float32 or wider: a scale may be infinite in a narrower dtype."""
    with jax.numpy_dtype_promotion("standard"):
        return (x * scale).astype(x.dtype)


def unscale_by(tree: PyTree, scale: jax.Array) -> PyTree:
    """The inverse of `scale_by`, of every array in a pytree."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda x: (x / scale).astype(x.dtype), tree)
