"""Where the variables of a replicated model_fn live."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from estimator._placement import Placement
from replicate._towers import TOWER_AXIS


class VariableDistribution(enum.StrEnum):
    """How variables and optimizer slots are spread over the towers' devices.

    Attributes:
      MIRRORED: a copy on every tower's device; gradients are summed by one all-reduce.
    """

    MIRRORED = "mirrored"


class OneDevice(Placement):
    """Everything on one given device."""

    def __init__(self, device: jax.Device) -> None:
        self._sharding = SingleDeviceSharding(device)

    def state(self, like: Any) -> Any:
        del like
        return self._sharding

    def batch(self, rows: int) -> Any:
        del rows
        return self._sharding


class Mirrored(Placement):
    """A copy of the state on every device, and of each batch only a tower's rows."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = Mesh(np.array(devices), (TOWER_AXIS,))

    def state(self, like: Any) -> Any:
        del like
        return NamedSharding(self._mesh, PartitionSpec())

    def batch(self, rows: int) -> Any:
        axis = TOWER_AXIS if rows % self._mesh.size == 0 else None
        return NamedSharding(self._mesh, PartitionSpec(axis))


def place(distribution: VariableDistribution, devices: Sequence[jax.Device]) -> Placement:
    """The placement for a distribution over the towers' devices."""
    VariableDistribution(distribution)
    return OneDevice(devices[0]) if len(devices) == 1 else Mirrored(devices)
