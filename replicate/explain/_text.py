"""Sentences and tables of an explanation, and the whole of it as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from estimator.runtime._table import align
from replicate.explain._data import Distribution, Home, StepData, bytes_by_device
from replicate.explain._stages import count, duration, format_type, size, stages


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, the names of the columns, rows of cells, and lines below them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def title(data: StepData) -> str:
    return f"One training step of {data.name} on {count(len(data.towers), 'tower')}"


def sentences(data: StepData) -> list[str]:
    """The things that happen in a step, one after the other."""
    return [sentence for stage in stages(data) for sentence in stage.sentences]


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
                ("sparse " if each.sparse else "") + format_type(each.dtype, each.shape),
                format_type(each.dtype, each.tower_shape),
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
        arrays = " + ".join(format_type(*array) for array in each.arrays[:3]) + (" + ..." if each.arrays[3:] else "")
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
    where = " of the towers" if data.distribution is Distribution.VARIABLE_DEVICES else ""
    # The time includes collectives in a branch as if it were taken in each step; block sync sums once per block.
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
            format_type(each.dtype, each.shape),
            size(each.bytes),
            size(max(each.bytes_by_device.values())),
            each.where,
        )
        for each in homes
    )
    total = sum(each.bytes for each in homes)
    # Variables may be placed unevenly: the fullest device runs out of memory first.
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
    lines += [f"{i}. {sentence}" for i, sentence in enumerate(sentences(data), 1)]
    for table in tables(data):
        lines += ["", table.title, "-" * len(table.title)]
        if table.rows:
            lines += align([table.columns, *table.rows] if any(table.columns) else table.rows)
        lines += table.notes
    return "\n".join(lines)
