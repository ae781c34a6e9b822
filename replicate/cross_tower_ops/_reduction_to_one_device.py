"""Sums over towers on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from replicate.cross_tower_ops._base import CrossTowerOps, Devices, ReduceOp, combine
from replicate.cross_tower_ops._per_tower import PerTower, local_device
from replicate.towers._collectives import cross_tower_concatenate


def add_n(arrays: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape and dtype, one after the other.

    >>> print(add_n([jnp.ones(2), jnp.full(2, 2.0)]))
    [3. 3.]
    """
    total, *others = arrays
    # Added in this order and not as a tree, so that the rounding is the same on every device.
    for array in others:
        total = total + array
    return total


class ReductionToOneDevice(CrossTowerOps):
    """Gathers the arrays of all towers on one device, accumulates them there and copies the result.

    It takes values on devices of several kinds, and its sums have the order of the towers. Outside of programs only
    one device does the arithmetic. A program of all towers has no single device: in one, and for values that span
    processes, every tower gathers all arrays and accumulates them itself, with the same result.

    >>> from replicate.cross_tower_ops import PerTower
    >>> x = PerTower({"/cpu:1": jnp.float32(3), "/cpu:2": jnp.float32(7)})
    >>> largest = ReductionToOneDevice(accumulation_fn=lambda arrays: jnp.stack(arrays).max(0))
    >>> largest.reduce("sum", x, destinations="/cpu:0").value
    Array(7., dtype=float32)
    """

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        """As TensorFlow's.

        Args:
          reduce_to_device: where values outside of programs are accumulated. None means the first destination.
          accumulation_fn: returns one array for the arrays of all towers, in tower order, of their shape and dtype; jax
            traces it. Its result is divided for a mean. None means `add_n`. Row-sparse values are always
            concatenated.

        Raises:
          ValueError: an unknown device, or another process's.
        """
        self._device = None if reduce_to_device is None else local_device("ReductionToOneDevice", reduce_to_device)
        self._accumulation_fn = accumulation_fn or add_n

    def sum_in_towers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """All arrays of all towers gathered and accumulated in every tower; booleans as integers, as `psum` has it."""
        # A program of all towers does not run on one device: each tower gathers all rows and adds them in the same
        # order, so that the sums are equal bit for bit.
        rows = [jnp.asarray(x, jnp.int32 if jnp.result_type(x) == jnp.bool_ else None)[None] for x in values]
        return [self._accumulate(list(all_towers)) for all_towers in cross_tower_concatenate(rows)]

    def _reduce_arrays(self, op: ReduceOp, values: list[PerTower], destinations: list[Devices]) -> list[PerTower]:
        if any(value.towers != value.devices for value in values):
            return super()._reduce_arrays(op, values, destinations)
        return combine(self._accumulate, op, values, self._homes(destinations))

    def _homes(self, destinations: list[Devices]) -> list[jax.Device]:
        return super()._homes(destinations) if self._device is None else [self._device] * len(destinations)

    def _accumulate(self, arrays: list[jax.Array]) -> jax.Array:
        total = self._accumulation_fn(arrays)
        want = arrays[0]
        if (total.shape, total.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"The accumulation_fn of `ReductionToOneDevice` must return an array like each that it gets, "
                f"{want.dtype}{list(want.shape)}; got {total.dtype}{list(total.shape)}."
            )
        return total
