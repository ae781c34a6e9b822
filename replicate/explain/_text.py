"""An explanation in words and tables, and the whole of it as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from replicate.explain._data import Home, StepData, bytes_by_device, typed
from replicate.explain._hlo import Collective


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, the names of the columns, rows of cells, and lines below them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def title(data: StepData) -> str:
    return f"One training step of {data.name} on {count(len(data.towers), 'tower')}"


def life(data: StepData) -> list[str]:
    """What happens in a step, one after the other."""
    towers = len(data.towers)
    rows = data.rows // towers
    before, after = in_order(data)
    said = [
        f"A batch of {count(data.rows, 'row')} comes in"
        + (f" and is split by rows: {rows} for each of {towers} towers." if towers > 1 else "; one tower has them all.")
    ]
    if data.distribution == "variable devices":
        moved = [each for each in data.transfers if each.to_towers]
        said.append(
            f"The towers get the variables they read from where these live: {count(len(moved), 'array')}, "
            f"{size(sum(each.bytes for each in moved))} moved in all."
        )
    if before:
        said.append(f"The towers gather the variables, which are cut: {summary(before)}.")
    parts = f", in {data.micro_batches} micro-batches one after another" if data.micro_batches > 1 else ""
    shared = data.towers[0].count(",") + 1
    work = f"; its {shared} devices share the work" if shared > 1 else ""
    said.append(f"Each tower runs the model_fn forward and backward on its {count(rows, 'row')}{parts}{work}.")
    if data.distribution == "local copies":
        return [*said, *_in_blocks(after), "Then global_step counts one more."]
    if after:
        who = "towers and their devices" if shared > 1 else "towers"
        said.append(f"The {who} talk to each other, on the way or at the end: {summary(after)}.")
    if data.distribution == "variable devices":
        moved = [each for each in data.transfers if not each.to_towers]
        said.append(
            "The gradients of all towers go to the devices of their variables and are summed there: "
            f"{count(len(moved), 'array')}, {size(sum(each.bytes for each in moved))} moved in all."
        )
    said.append(f"{update(data)} Then global_step counts one more.")
    return said


def _in_blocks(collectives: list[Collective]) -> list[str]:
    """What towers do that train on their own and meet once per block."""
    at_the_end = at_the_end_of_a_block(collectives)
    said = [
        "Each tower's optimizers run on its own gradients, and change its own copy of the variables.",
        "After the last step of a block the copies are averaged, and the outer optimizer moves the global variables, "
        f"from which all towers go on: {summary(at_the_end)}.",
    ]
    others = [each for each in collectives if each not in at_the_end]
    if others:
        said.append(f"After the last step of a program what it reports is put together: {summary(others)}.")
    return said


def at_the_end_of_a_block(collectives: list[Collective]) -> list[Collective]:
    """Those in a branch; in blocks of one step there is none."""
    return [each for each in collectives if each.within == "branch"] or collectives


def update(data: StepData) -> str:
    """Where the optimizers run."""
    return {
        "one device": "The optimizers run on the gradients, on the one device.",
        "mirrored": "The optimizers run on the sums, in every tower alike, so that all copies stay equal.",
        "sharded": "The optimizers run on the sums, on each device for its pieces of the variables and slots.",
        "variable devices": "The optimizers run on the sums, on each variable's own device.",
    }[data.distribution]


def in_order(data: StepData) -> tuple[list[Collective], list[Collective]]:
    """The collectives before the towers compute, as cut variables need them, and those after."""
    before = [each for each in data.collectives if data.distribution == "sharded" and each.kind == "all-gather"]
    return before, [each for each in data.collectives if each not in before]


def summary(collectives: list[Collective]) -> str:
    kinds = dict.fromkeys(each.kind for each in collectives)
    said = []
    for kind in kinds:
        mine = [each for each in collectives if each.kind == kind]
        total = sum(each.bytes * (1 if each.times is None else each.times) for each in mine)
        said.append(f"{len(mine)} {kind} ({size(total)})")
    return ", ".join(said)


def tables(data: StepData) -> list[Table]:
    return [table for table in _tables(data) if table.rows or table.notes]


def _tables(data: StepData) -> Iterator[Table]:
    yield Table("Towers", ("tower", "device"), tuple((str(i), device) for i, device in enumerate(data.towers)))
    yield Table(
        "What is split",
        ("array", "whole batch", "each tower"),
        tuple(
            (
                each.name,
                ("sparse " if each.sparse else "") + typed(each.dtype, each.shape),
                typed(each.dtype, each.tower_shape),
            )
            for each in data.batch
        ),
    )
    yield _collectives(data)
    yield Table(
        "Copies between the towers and the variables' devices",
        ("array", "way", "bytes"),
        tuple(
            (each.name, f"{each.device} -> towers" if each.to_towers else f"towers -> {each.device}", size(each.bytes))
            for each in data.transfers
        ),
    )
    yield _homes("Variables", data.variables)
    yield _homes("Slots of the optimizers", data.slots)
    yield Table(
        "Variables and slots by device",
        ("device", "bytes"),
        tuple((device, size(total)) for device, total in data.bytes_by_device.items()),
    )
    yield _costs(data)


def _collectives(data: StepData) -> Table:
    rows = []
    for each in data.collectives:
        arrays = " + ".join(typed(*array) for array in each.arrays[:3]) + (" + ..." if each.arrays[3:] else "")
        runs = "in a loop" if each.times is None else f"{each.times} x"
        runs += ", if its branch is taken" if each.within == "branch" else ""
        rows.append(
            (
                each.kind,
                arrays,
                size(each.bytes),
                f"{each.participants} devices",
                runs,
                duration(each.seconds(data.bandwidth, data.latency)),
            )
        )
    where = " of the towers" if data.distribution == "variable devices" else ""
    taken = " in which every branch is taken" if any(each.within == "branch" for each in data.collectives) else ""
    notes = [] if rows else [f"None: the compiled program{where} needs no communication."]
    if rows or data.transfers:
        notes.append(
            f"Estimated time of communication: {duration(data.communication_seconds)} per step{taken}, at "
            f"{data.bandwidth / 1e9:g} GB/s and {data.latency * 1e6:g} us of latency."
        )
    if any(each.times is None for each in data.collectives):
        notes.append("How often a loop runs that ends by a condition is not known: it is counted once.")
    columns = ("kind", "arrays", "bytes", "participants", "runs", "estimated")
    return Table(f"Collectives of the compiled program{where}", columns, tuple(rows), tuple(notes))


def _homes(name: str, homes: tuple[Home, ...]) -> Table:
    rows = tuple(
        (
            each.name,
            typed(each.dtype, each.shape),
            size(each.bytes),
            size(max(each.bytes_by_device.values())),
            each.where,
        )
        for each in homes
    )
    total = sum(each.bytes for each in homes)
    most = max(bytes_by_device(homes).values(), default=0)
    note = f"In all {size(total)}; on one device {'at most ' if most else ''}{size(most)}."
    return Table(
        name, ("array", "type", "bytes", "per device", "where it lives"), rows, (note,) if rows else ("None.",)
    )


def _costs(data: StepData) -> Table:
    most = data.steps_per_program
    rows = [
        (
            'steps_per_loop="auto"',
            f"{count(most, 'step')} per program" + ("; fewer where hooks look more often" if most > 1 else ""),
        )
    ]
    notes: tuple[str, ...] = ()
    if data.flops is not None:
        notes = ("XLA counts the operations within a loop once.",)
        rows.append(("operations", f"{data.flops:,.0f} floating point operations per device"))
    if data.memory is not None:
        memory = data.memory
        rows += [
            ("arguments", f"{size(memory.arguments)} per device"),
            ("outputs", f"{size(memory.outputs)} per device, {size(memory.reused)} of it in place of arguments"),
            ("temporary", f"{size(memory.temporary)} per device"),
            ("peak", f"{size(memory.peak)} per device at most"),
        ]
    return Table("The compiled program", ("", ""), tuple(rows), notes)


def as_text(data: StepData) -> str:
    lines = [title(data), "=" * len(title(data)), ""]
    lines += [f"{i}. {said}" for i, said in enumerate(life(data), 1)]
    for table in tables(data):
        lines += ["", table.title, "-" * len(table.title)]
        if table.rows:
            cells = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for row in cells:
                lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += table.notes
    return "\n".join(lines)


def count(n: int, what: str) -> str:
    """As in "1 tower" and "2 towers"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def size(n: int) -> str:
    return f"{n:,} B"


def duration(seconds: float) -> str:
    """
    >>> duration(3.5e-5), duration(0.0125), duration(2.0)
    ('35 us', '12.5 ms', '2 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
