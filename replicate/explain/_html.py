"""An explanation as one page with a picture: no script, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from replicate.explain._data import StepData
from replicate.explain._stages import stages
from replicate.explain._text import Table, sentences, tables, title

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
_COLOURS = {"batch": "#dbeafe", "tower": "#e6f4ea", "collective": "#fde9c9", "update": "#efe3fb"}


def as_page(data: StepData) -> str:
    heading = escape(title(data))
    steps = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(data))
    body = "".join(_table(table) for table in tables(data))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{heading}</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>\n'
        f"<body><h1>{heading}</h1>\n{_Picture(data).draw()}\n<ol>{steps}</ol>\n{body}</body></html>\n"
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

    def draw(self) -> str:
        for i, stage in enumerate(stages(self._data)):
            if i and (stage.lines or stage.boxes):
                self._arrows(stage.arrow)
            if stage.boxes:
                self._row(stage.kind, stage.boxes)
            elif stage.lines:
                self._bar(stage.kind, stage.lines)
        height = self._y + _MARGIN
        label = escape(title(self._data), quote=True)
        return (
            f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">\n'
            + "\n".join(self._parts)
            + "\n</svg>"
        )

    def _row(self, kind: str, boxes: Sequence[tuple[str, ...]]) -> None:
        height = 14 + 18 * len(boxes[0])
        for place, tower in enumerate(self._towers):
            x, width = _MARGIN + place * self._step, self._step - _GAP
            if tower is None:
                hidden = len(self._data.towers) - len(self._towers) + 1
                self._text(x + width / 2, self._y + height / 2 + 5, f"{hidden} more", "small")
                continue
            self._box(x, width, height, kind, boxes[tower])
        self._y += height

    def _bar(self, kind: str, lines: tuple[str, ...]) -> None:
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

    def _arrows(self, label: str) -> None:
        y = self._y
        for place, tower in enumerate(self._towers):
            if tower is not None:
                x = _MARGIN + place * self._step + (self._step - _GAP) / 2
                self._parts.append(f'<path d="M{x:g} {y + 4:g} v18 m-4 -6 l4 6 l4 -6"/>')
        if label:
            # Between the first two arrows, where it crosses no line.
            between = _MARGIN + self._step - _GAP / 2 if len(self._towers) > 1 else _WIDTH / 2 + 90
            self._text(between, y + 18, label, "small")
        self._y += 28

    def _text(self, x: float, y: float, text: str, kind: str) -> None:
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>')
