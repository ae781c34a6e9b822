"""An explanation as one page with a picture: no script, and nothing from elsewhere."""

from __future__ import annotations

from html import escape

from replicate.explain._data import StepData, typed
from replicate.explain._hlo import Collective
from replicate.explain._text import (
    Table,
    at_the_end_of_a_block,
    count,
    duration,
    in_order,
    life,
    size,
    summary,
    tables,
    title,
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #dde3e9; white-space: nowrap; }
th { color: #56677a; font-weight: 600; } td { font-variant-numeric: tabular-nums; }
p.note { color: #56677a; font-size: .9rem; margin: .4rem 0; }
svg { width: 100%; height: auto; } svg text { font: 14px system-ui, sans-serif; fill: #1c2733; text-anchor: middle; }
svg path { fill: none; stroke: #56677a; stroke-width: 1.5; } svg .small { font-size: 12px; fill: #3d4d5e; }
"""
_WIDTH, _MARGIN, _GAP = 900, 10, 16
_SHOWN = 5  # towers drawn; of more, the last and a few of the first
_LONGEST = 120  # characters that fit into a line of the whole width
_COLOURS = {"batch": "#dbeafe", "tower": "#e6f4ea", "collective": "#fde9c9", "update": "#efe3fb"}


def as_page(data: StepData) -> str:
    heading = escape(title(data))
    steps = "".join(f"<li>{escape(said)}</li>" for said in life(data))
    body = "".join(_table(table) for table in tables(data))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{heading}</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>\n'
        f"<body><h1>{heading}</h1>\n{_Picture(data).drawn()}\n<ol>{steps}</ol>\n{body}</body></html>\n"
    )


def _table(table: Table) -> str:
    def line(tag: str, cells: tuple[str, ...]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    head = line("th", table.columns) if any(table.columns) else ""
    rows = "".join(line("td", row) for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    listed = f'<div class="wide"><table>{head}{rows}</table></div>' if rows else ""
    return f"<h2>{escape(table.title)}</h2>{listed}{notes}\n"


class _Picture:
    """The batch, the towers, what goes between them and the update, one below the other."""

    def __init__(self, data: StepData) -> None:
        self._data = data
        self._parts: list[str] = []
        self._y = _MARGIN
        towers = len(data.towers)
        # None stands for those that are left out.
        self._towers = [*range(towers)] if towers <= _SHOWN else [0, 1, 2, None, towers - 1]
        self._step = (_WIDTH - 2 * _MARGIN + _GAP) / len(self._towers)

    def drawn(self) -> str:
        data = self._data
        rows = data.rows // len(data.towers)
        before, after = in_order(data)
        arrays = [f"{each.name} {typed(each.dtype, each.shape)}" for each in data.batch]
        self._bar("batch", f"a batch of {count(data.rows, 'row')}", _short(", ".join(arrays)))
        self._arrows("split by rows" if len(data.towers) > 1 else "")
        if before:
            self._bar("collective", f"gather the cut variables: {summary(before)}", self._seconds(before))
            self._arrows()
        if data.distribution == "variable devices":
            moved = [each for each in data.transfers if each.to_towers]
            self._bar("collective", f"variables come from their devices: {size(sum(each.bytes for each in moved))}")
            self._arrows()
        parts = f" in {data.micro_batches} parts" if data.micro_batches > 1 else ""
        in_blocks = data.distribution == "local copies"
        does = "update of its own copy" if in_blocks else "loss and gradients"
        towers: list[tuple[str, ...]] = [
            (f"tower {i}", device, f"rows {i * rows} to {(i + 1) * rows - 1}{parts}", does)
            for i, device in enumerate(data.towers)
        ]
        self._row("tower", 86, towers)
        if after:
            self._arrows()
            meeting = at_the_end_of_a_block(after) if in_blocks else after
            when = "after a block: " if in_blocks else ""
            self._bar("collective", _short(when + summary(meeting)), self._seconds(meeting))
        if data.distribution == "variable devices":
            self._arrows()
            moved = [each for each in data.transfers if not each.to_towers]
            self._bar("collective", f"gradients go to their variables: {size(sum(each.bytes for each in moved))}")
        sums = "averages of the copies" if in_blocks else "sums of the gradients"
        self._arrows("" if len(data.towers) == 1 else sums)
        held = data.bytes_by_device
        if data.distribution == "variable devices":
            homes = ", ".join(f"{device} {size(total)}" for device, total in held.items())
            self._bar("update", "update of each variable on its own device", _short(homes))
        else:
            what = "its pieces" if data.distribution == "sharded" else "variables and slots"
            self._row(
                "update", 68, [("update", what, size(held.get(device.split(",")[0], 0))) for device in data.towers]
            )
        height = self._y + _MARGIN
        label = escape(title(data), quote=True)
        return (
            f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">\n'
            + "\n".join(self._parts)
            + "\n</svg>"
        )

    def _seconds(self, collectives: list[Collective]) -> str:
        data = self._data
        return "about " + duration(sum(each.seconds(data.bandwidth, data.latency) for each in collectives))

    def _row(self, kind: str, height: int, boxes: list[tuple[str, ...]]) -> None:
        for place, tower in enumerate(self._towers):
            x, width = _MARGIN + place * self._step, self._step - _GAP
            if tower is None:
                hidden = len(self._data.towers) - len(self._towers) + 1
                self._text(x + width / 2, self._y + height / 2 + 5, f"{hidden} more", "small")
                continue
            self._box(x, width, height, kind, boxes[tower])
        self._y += height

    def _bar(self, kind: str, *lines: str) -> None:
        height = 14 + 18 * len(lines)
        self._box(_MARGIN, _WIDTH - 2 * _MARGIN, height, kind, lines)
        self._y += height

    def _box(self, x: float, width: float, height: int, kind: str, lines: tuple[str, ...]) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{self._y:g}" width="{width:g}" height="{height}" rx="6" fill="{_COLOURS[kind]}" '
            'stroke="#8a9aab"/>'
        )
        top = self._y + (height - 18 * len(lines)) / 2 + 14
        for i, line in enumerate(lines):
            self._text(x + width / 2, top + 18 * i, line, "small" if i else "")

    def _arrows(self, said: str = "") -> None:
        y = self._y
        for place, tower in enumerate(self._towers):
            if tower is not None:
                x = _MARGIN + place * self._step + (self._step - _GAP) / 2
                self._parts.append(f'<path d="M{x:g} {y + 4:g} v18 m-4 -6 l4 6 l4 -6"/>')
        if said:
            between = _MARGIN + self._step - _GAP / 2 if len(self._towers) > 1 else _WIDTH / 2 + 90
            self._text(between, y + 18, said, "small")
        self._y += 28

    def _text(self, x: float, y: float, text: str, kind: str) -> None:
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>')


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
