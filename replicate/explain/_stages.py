"""The stages of a step, one after another, as an explanation's text and picture show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from replicate.explain._data import Distribution, StepData
from replicate.explain._hlo import Collective

_LONGEST = 120  # characters that fit into a line of the whole width


class Stage(NamedTuple):
    """One thing that happens.

    Attributes:
      sentences: of the text.
      kind: "batch", "collective", "tower" or "update"; the picture has a colour for each.
      lines: of the box that the picture has over its whole width; the first is the heading.
      boxes: instead of it, the lines of a box for each tower.
      arrow: beside the arrows that lead to it.
    """

    sentences: Sequence[str]
    kind: str
    lines: tuple[str, ...] = ()
    boxes: tuple[tuple[str, ...], ...] = ()
    arrow: str = ""


def stages(data: StepData) -> Iterator[Stage]:
    in_blocks = data.distribution is Distribution.LOCAL_COPIES
    off_towers = data.distribution is Distribution.VARIABLE_DEVICES
    # Where variables are cut, the towers gather them before they compute.
    gathers = [
        each for each in data.collectives if data.distribution is Distribution.SHARDED and each.kind == "all-gather"
    ]
    collectives = [each for each in data.collectives if each not in gathers]
    split, sums = ("split by rows", "sums of the gradients") if len(data.towers) > 1 else ("", "")
    yield _batch(data)
    if off_towers:
        sentence = "The towers get the variables they read from where these live"
        yield _transfers(data, True, sentence, "variables come from their devices")._replace(arrow=split)
    if gathers:
        sentence = f"The towers gather the variables, which are cut: {_summary(gathers)}."
        yield _collectives(data, [sentence], "gather the cut variables: ", gathers)._replace(arrow=split)
    yield _towers(data)._replace(arrow="" if off_towers or gathers else split)
    if in_blocks:
        yield _block_end(data, collectives)
    elif collectives:
        who = "towers and their devices" if _devices_per_tower(data) > 1 else "towers"
        sentence = f"The {who} talk to each other, on the way or at the end: {_summary(collectives)}."
        yield _collectives(data, [sentence], "", collectives)
    if off_towers:
        sentence = "The gradients of all towers go to the devices of their variables and are summed there"
        yield _transfers(data, False, sentence, "gradients go to their variables")
    yield _update(data)._replace(arrow="averages of the copies" if in_blocks and sums else sums)


def _batch(data: StepData) -> Stage:
    towers = len(data.towers)
    split = f" and is split by rows: {data.rows // towers} for each of {towers} towers."
    arrays = ", ".join(f"{each.name} {format_type(each.dtype, each.shape)}" for each in data.batch)
    return Stage(
        [f"A batch of {count(data.rows, 'row')} comes in" + (split if towers > 1 else "; one tower has them all.")],
        "batch",
        (f"a batch of {count(data.rows, 'row')}", _shorten(arrays)),
    )


def _towers(data: StepData) -> Stage:
    rows = data.rows // len(data.towers)
    in_blocks = data.distribution is Distribution.LOCAL_COPIES
    shared, parts = _devices_per_tower(data), data.micro_batches
    micro_batches = f", in {parts} micro-batches one after another" if parts > 1 else ""
    work = f"; its {shared} devices share the work" if shared > 1 else ""
    sentences = [f"Each tower runs the model_fn forward and backward on its {count(rows, 'row')}{micro_batches}{work}."]
    if in_blocks:
        sentences.append("Each tower's optimizers run on its own gradients, and change its own copy of the variables.")
    in_parts = f" in {parts} parts" if parts > 1 else ""
    result = "update of its own copy" if in_blocks else "loss and gradients"
    boxes = tuple(
        (f"tower {i}", device, f"rows {i * rows} to {(i + 1) * rows - 1}{in_parts}", result)
        for i, device in enumerate(data.towers)
    )
    return Stage(sentences, "tower", boxes=boxes)


def _block_end(data: StepData, collectives: list[Collective]) -> Stage:
    """The stage in which towers that train on their own are averaged, once per block."""
    # They are in a branch; in blocks of one step there is none.
    at_end = [each for each in collectives if each.within == "branch"] or collectives
    sentences = [
        "After the last step of a block the copies are averaged, and the outer optimizer moves the global variables, "
        f"from which all towers continue: {_summary(at_end)}."
    ]
    if others := [each for each in collectives if each not in at_end]:
        sentences.append(f"After the last step of a program what it reports is put together: {_summary(others)}.")
    return _collectives(data, sentences, "after a block: ", at_end) if at_end else Stage(sentences, "collective")


def _update(data: StepData) -> Stage:
    where = {
        Distribution.ONE_DEVICE: "The optimizers run on the gradients, on the one device. ",
        Distribution.MIRRORED: "The optimizers run on the sums, in every tower alike, so that all copies stay equal. ",
        Distribution.SHARDED: "The optimizers run on the sums, on each device for its pieces of the variables and "
        "slots. ",
        Distribution.VARIABLE_DEVICES: "The optimizers run on the sums, on each variable's own device. ",
        Distribution.LOCAL_COPIES: "",
    }
    sentences = [where[data.distribution] + "Then global_step counts one more."]
    by_device = data.bytes_by_device
    if data.distribution is Distribution.VARIABLE_DEVICES:
        homes = ", ".join(f"{device} {size(total)}" for device, total in by_device.items())
        return Stage(sentences, "update", ("update of each variable on its own device", _shorten(homes)))
    what = "its pieces" if data.distribution is Distribution.SHARDED else "variables and slots"
    # The box shows the first device of a tower; the others have about the same bytes.
    boxes = tuple(("update", what, size(by_device.get(device.split(",")[0], 0))) for device in data.towers)
    return Stage(sentences, "update", boxes=boxes)


def _transfers(data: StepData, to_towers: bool, sentence: str, heading: str) -> Stage:
    moved = [each for each in data.transfers if each.to_towers == to_towers]
    total = size(sum(each.bytes for each in moved))
    sentence += f": {count(len(moved), 'array')}, {total} moved in all."
    return Stage([sentence], "collective", (f"{heading}: {total}",))


def _collectives(data: StepData, sentences: list[str], heading: str, collectives: list[Collective]) -> Stage:
    seconds = sum(each.seconds(data.bandwidth, data.latency) for each in collectives)
    return Stage(sentences, "collective", (_shorten(heading + _summary(collectives)), "about " + duration(seconds)))


def _devices_per_tower(data: StepData) -> int:
    # A tower of several devices lists them in one string.
    return data.towers[0].count(",") + 1


def _summary(collectives: list[Collective]) -> str:
    """Their number and bytes, by kind."""
    by_kind: dict[str, list[int]] = {}
    for each in collectives:
        by_kind.setdefault(each.kind, []).append(each.bytes * (1 if each.times is None else each.times))
    return ", ".join(f"{len(sizes)} {kind} ({size(sum(sizes))})" for kind, sizes in by_kind.items())


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def count(n: int, what: str) -> str:
    """Formats a number of things, as in "1 tower" and "2 towers"."""
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


def format_type(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
