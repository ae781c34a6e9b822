"""The result of `explain` as plain values."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable

from replicate.explain._hlo import Collective


@dataclasses.dataclass(frozen=True)
class Split:
    """A feature or label, and what of it a tower gets.

    Attributes:
      name: such as "features/pixels".
      dtype, shape: of the whole batch.
      tower_shape: of a tower's rows.
      sparse: whether it is a BCOO.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tower_shape: tuple[int, ...]
    sparse: bool = False


@dataclasses.dataclass(frozen=True)
class Home:
    """The devices on which an array of the state lives.

    Attributes:
      name: of the variable, or of the optimizer and the path in its state.
      dtype, shape: of the whole array.
      bytes: of one copy.
      bytes_by_device: of what each device has of it.
      cut_axis: the dimension along which it is cut; None where each of the devices has it whole.
      copies: how many there are of each piece: of what is cut over the devices of a tower, one in each tower.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    bytes_by_device: dict[str, int]
    cut_axis: int | None = None
    copies: int = 1

    @property
    def where(self) -> str:
        devices = len(self.bytes_by_device)
        if self.cut_axis is not None:
            # An array that is cut within a tower is complete in each tower.
            each = f", in each of {self.copies} towers" if self.copies > 1 else ""
            return f"cut along dimension {self.cut_axis} over {devices // self.copies} devices{each}"
        return f"whole on {next(iter(self.bytes_by_device))}" if devices == 1 else f"whole on each of {devices} devices"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """An array that goes between the towers and a variable's own device, outside of the compiled programs.

    Attributes:
      name: of what is moved.
      to_towers: whether the towers get it; else the variable's device gets it, from all towers.
      bytes: moved in all.
      device: where the variable lives.
    """

    name: str
    to_towers: bool
    bytes: int
    device: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device of the compiled program.

    Attributes:
      arguments: the state and the tower's rows.
      outputs: the new state and the loss.
      reused: of the outputs, what takes the memory of an argument.
      temporary: activations, gradients and whatever else lives for the step only.
    """

    arguments: int
    outputs: int
    reused: int
    temporary: int

    @property
    def peak(self) -> int:
        """The most there can be at one time."""
        # Outputs that reuse the memory of arguments are counted once.
        return self.arguments + self.outputs - self.reused + self.temporary


def bytes_by_device(homes: Iterable[Home]) -> dict[str, int]:
    totals: dict[str, int] = collections.defaultdict(int)
    for home in homes:
        for device, size in home.bytes_by_device.items():
            totals[device] += size
    return dict(totals)


class Distribution(enum.StrEnum):
    """The kinds of places where variables live.

    Attributes:
      ONE_DEVICE: on the one there is.
      MIRRORED: on every device.
      SHARDED: a piece on each device.
      VARIABLE_DEVICES: each on a device of its own.
      LOCAL_COPIES: each tower has its own within a block (`block_sync`).
    """

    ONE_DEVICE = "one device"
    MIRRORED = "mirrored"
    SHARDED = "sharded"
    VARIABLE_DEVICES = "variable devices"
    LOCAL_COPIES = "local copies"


@dataclasses.dataclass(frozen=True)
class StepData:
    """The facts of one training step of a replicated model_fn.

    Attributes:
      name: of the model_fn.
      towers: the device or devices of each, as in "cpu:0, cpu:1".
      distribution: where the variables live.
      rows: of the whole batch.
      micro_batches: the parts in which a tower runs its rows, one after another.
      batch: what is split.
      collectives: of the compiled program; where variables have devices of their own, of the towers' program.
      transfers: between the towers and the variables' own devices.
      variables, slots: where each array lives.
      steps_per_program: how many steps `RunConfig(steps_per_loop="auto")` puts into one program, where no hook looks
        more often than the run itself.
      flops: floating point operations of a step on one device, by XLA's count, which takes what is in a loop once;
        None if it does not say.
      memory: on each device; None where XLA does not say.
      bandwidth, latency: what the times are estimated with, in bytes per second and in seconds.
    """

    name: str
    towers: tuple[str, ...]
    distribution: Distribution
    rows: int
    micro_batches: int
    batch: tuple[Split, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    variables: tuple[Home, ...]
    slots: tuple[Home, ...]
    steps_per_program: int
    flops: float | None
    memory: Memory | None
    bandwidth: float
    latency: float

    @property
    def communication_seconds(self) -> float:
        """The estimated time of all collectives and transfers, as if nothing were computed meanwhile.

        The devices of variables send and receive side by side, each one array after another.
        """
        by_device: dict[str, float] = collections.defaultdict(float)
        for each in self.transfers:
            by_device[each.device] += self.latency + each.bytes / self.bandwidth
        inside = sum(each.seconds(self.bandwidth, self.latency) for each in self.collectives)
        return inside + max(by_device.values(), default=0.0)

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """The bytes of the variables and slots on each device."""
        return bytes_by_device([*self.variables, *self.slots])
