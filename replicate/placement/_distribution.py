"""`VariableDistribution`: the choice of the placement of a replicated model_fn's variables."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax

from estimator.replication import Placement
from replicate.placement._mirrored import MirroredPlacement, OneDevicePlacement, ShardedPlacement
from replicate.placement._model_parallel import ModelParallelPlacement
from replicate.placement._parameter_server import ParameterServer
from replicate.towers._devices import find_devices


class VariableDistribution(enum.StrEnum):
    """The ways to distribute variables and optimizer slots over the towers' devices.

    The numbers are the same for all; a checkpoint of one is read under any other. With one tower, and no variable
    device of its own, all are the same.

    Attributes:
      MIRRORED: a copy on every tower's device; gradients are summed by one all-reduce. The fastest, if it fits.
      SHARDED: each variable and its slots are cut over the towers along their first dimension that divides; what
        has none is mirrored. Towers gather the variables at each step, the optimizer runs on the pieces. For
        models whose slots do not fit on every device.
      SHARED_LOCAL_PARAMETER_SERVER: one copy, on the variable device. Towers get the variables from there at each
        step; their gradients are gathered and summed, and the optimizer runs, there.
      SHARED_ROUND_ROBIN: one copy of each variable, the n-th that the model_fn creates on device n modulo towers,
        where its gradient is summed and its slots are.
    """

    MIRRORED = "mirrored"
    SHARDED = "sharded"
    SHARED_LOCAL_PARAMETER_SERVER = "shared_local_parameter_server"
    SHARED_ROUND_ROBIN = "shared_round_robin"


def place(
    distribution: VariableDistribution, devices: Sequence[Any], variable_device: jax.Device | str | None = None
) -> Placement:
    """The placement for a distribution over the towers' devices, one per tower or a tuple of them, or one for all."""
    number, devices = len(devices), tuple(dict.fromkeys(devices))
    distribution = VariableDistribution(distribution)
    wide = isinstance(devices[0], tuple)
    if wide and distribution != VariableDistribution.MIRRORED:
        raise ValueError(
            f"variable_distribution={str(distribution)!r} was given with devices_per_tower={len(devices[0])}. Towers "
            "of several devices have VariableDistribution.MIRRORED: what `est.get_variable(..., partition=...)` cuts "
            "is cut over the devices of each tower. Leave out one of them."
        )
    if distribution.startswith("shared") and len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"variable_distribution={str(distribution)!r} keeps variables on devices of one process, which the towers "
            "of others do not reach. Use MIRRORED, or SHARDED, which cuts variables over all of them."
        )
    towers: Placement
    if wide:
        towers = ModelParallelPlacement(devices)
    else:
        towers = OneDevicePlacement(devices[0], number) if len(devices) == 1 else MirroredPlacement(devices)
    if distribution == VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER:
        home = _variable_device(devices, variable_device)
        # If the variable device is the only tower's, a step is one program without transfers.
        return towers if list(devices) == [home] else ParameterServer(towers, [home])
    if variable_device is not None:
        raise ValueError(
            f"variable_device={variable_device!r} was given with variable_distribution={str(distribution)!r}, which "
            "has none. It is for VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER; leave out one of them."
        )
    if wide or len(devices) == 1 or distribution == VariableDistribution.MIRRORED:
        return towers
    if distribution == VariableDistribution.SHARDED:
        return ShardedPlacement(devices)
    return ParameterServer(towers, devices)


def _variable_device(devices: Sequence[jax.Device], given: jax.Device | str | None) -> jax.Device:
    if given is not None:
        return find_devices([given])[0]
    return devices[0] if len(devices) == 1 else jax.local_devices(backend="cpu")[0]
