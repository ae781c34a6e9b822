"""`Replica`: the place of one run of a model_fn among those that make a step together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Replica:
    """A tower's or micro-batch's place in a replicated run; the defaults are a run alone.

    Attributes:
      average_denominator: `(denominator, index)`, what a loss divides by instead of its own denominator, which differs
        from tower to tower; `index` counts `Frame.denominators`, and is None for one that is not among them.
      loss_scale: factor on the losses of this run, whose gradients are added to the other towers' gradients.
      share: factor on a term of the loss that the whole batch has once, where the losses of towers are summed.
      towers: the number of towers that run together with this one.
      mean: the mean over them.
      parts: the number of devices of a tower.
      shard: cuts a dimension of an array over the devices of a tower.
      one_tower: whether a replicated model_fn runs as one tower, on any device: what is exported has no towers.
      forward_only: whether it runs in TRAIN without gradients, as in evaluation.
    """

    average_denominator: Callable[[jax.Array, int | None], jax.Array] = lambda denominator, index: denominator
    loss_scale: float = 1.0
    share: float = 1.0
    towers: int = 1
    mean: Callable[[jax.Array], jax.Array] = lambda x: x
    parts: int = 1
    shard: Callable[[jax.Array, int], jax.Array] = lambda x, axis: x
    one_tower: bool = False
    forward_only: bool = False
