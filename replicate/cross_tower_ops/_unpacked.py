"""Sums over towers array by array, whatever their shapes."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicate.cross_tower_ops._base import CrossTowerOps
from replicate.towers._collectives import cross_tower_sum


class OneByOne(CrossTowerOps):
    """Sums each array by itself, in its own shape.

    For towers of several devices: an array that is cut over the devices of a tower would have to be put together to
    be packed with others. XLA joins the all-reduces.
    """

    def sum_in_towers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        return [cross_tower_sum(value) for value in values]
