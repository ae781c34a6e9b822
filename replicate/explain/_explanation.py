"""The result of `explain` as plain values, and as text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from estimator.runtime._table import align
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
      cut_axis: the dimension along which it is cut, or None if each of the devices has it whole.
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


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One training step of a replicated model_fn. `print` shows it as text.

    Attributes:
      name: of the model_fn.
      towers: the device or devices of each, as in "cpu:0, cpu:1".
      placement: a sentence that says where the variables live, and where the optimizers run.
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
    placement: str
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
        totals: dict[str, int] = collections.defaultdict(int)
        for home in (*self.variables, *self.slots):
            for device, size in home.bytes_by_device.items():
                totals[device] += size
        return dict(totals)

    def __str__(self) -> str:
        columns = ("", "array", "type", "bytes", "where")
        return "\n".join([*_sentences(self), "", *align([columns, *_rows(self)], "<<<><")])


def _sentences(step: Explanation) -> Iterator[str]:
    towers = len(step.towers)
    yield f"One training step of {step.name} on {_count(towers, 'tower')}"
    parts = f", in {step.micro_batches} micro-batches one after another" if step.micro_batches > 1 else ""
    devices = f", on {step.towers[0].count(',') + 1} devices that share the work" if "," in step.towers[0] else ""
    yield f"A tower gets {step.rows // towers:,} of the batch's {_count(step.rows, 'row')}{parts}{devices}."
    yield step.placement
    if step.collectives or step.transfers:
        # An average at the end of a block is counted as if each step ended one.
        branches = any(each.within == "branch" for each in step.collectives)
        yield (
            f"Communication takes about {_duration(step.communication_seconds)} a step"
            f"{' in which every branch is taken' if branches else ''}, at {step.bandwidth / 1e9:g} GB/s and "
            f"{_duration(step.latency)} of latency."
        )
    else:
        yield "The compiled program needs no communication."
    yield f'steps_per_loop="auto" puts {_count(step.steps_per_program, "step")} into one program.'
    if step.flops is not None:
        yield f"XLA counts {step.flops:,.0f} floating point operations per device, those in a loop once."
    if (memory := step.memory) is not None:
        yield (
            f"A device needs at most {_size(memory.peak)}: arguments {_size(memory.arguments)}, outputs "
            f"{_size(memory.outputs)} ({_size(memory.reused)} in place of arguments), temporary "
            f"{_size(memory.temporary)}."
        )


def _rows(step: Explanation) -> Iterator[tuple[str, str, str, str, str]]:
    """The rows of the table, in the order of a step."""
    for i, devices in enumerate(step.towers):
        yield "tower", str(i), "", "", devices
    for split in step.batch:
        type_ = ("sparse " if split.sparse else "") + _type(split.dtype, split.shape)
        yield "batch", split.name, type_, "", f"{_type(split.dtype, split.tower_shape)} in each tower"
    for what, homes in (("variable", step.variables), ("slot", step.slots)):
        for home in homes:
            yield what, home.name, _type(home.dtype, home.shape), _size(home.bytes), home.where
    for device, total in step.bytes_by_device.items():
        yield "device", device, "", _size(total), "of variables and slots"
    for each in step.collectives:
        arrays = " + ".join(_type(*array) for array in each.arrays[:3]) + (" + ..." if each.arrays[3:] else "")
        runs = "in a loop of unknown length" if each.times is None else f"{each.times} x"
        runs += ", if its branch is taken" if each.within == "branch" else ""
        seconds = _duration(each.seconds(step.bandwidth, step.latency))
        yield "collective", each.kind, arrays, _size(each.bytes), f"{each.participants} devices, {runs}, {seconds}"
    for move in step.transfers:
        way = f"{move.device} -> towers" if move.to_towers else f"towers -> {move.device}"
        yield "transfer", move.name, "", _size(move.bytes), way


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _size(n: int) -> str:
    return f"{n:,} B"


def _duration(seconds: float) -> str:
    """
    >>> _duration(3.5e-5), _duration(0.0125), _duration(2.0)
    ('35 us', '12.5 ms', '2 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _type(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
