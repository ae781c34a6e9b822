"""What an explanation holds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any


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
    """Where an array of the state lives.

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
      device: that of the variable.
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
      reused: those of the outputs that take the memory of an argument.
      temporary: activations, gradients and whatever else lives for the step only.
    """

    arguments: int
    outputs: int
    reused: int
    temporary: int

    @property
    def peak(self) -> int:
        """The most there can be at one time."""
        return self.arguments + self.outputs - self.reused + self.temporary


def bytes_by_device(homes: Iterable[Home]) -> dict[str, int]:
    totals: dict[str, int] = collections.defaultdict(int)
    for home in homes:
        for device, size in home.bytes_by_device.items():
            totals[device] += size
    return dict(totals)


def typed(dtype: str, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
