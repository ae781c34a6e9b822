"""Tables of text, which notebooks show as HTML, and sizes in bytes as people read them."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple


def align(rows: Sequence[tuple[str, ...]], alignment: str = "") -> Iterator[str]:
    """Lines of columns, each aligned as a character of `alignment` says, or else to the left. They end without spaces,
    so that a test or a document can compare them."""
    alignment = alignment or "<" * len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)
        ).rstrip()


class Table(NamedTuple):
    """Rows of cells, of which the first has the titles, between lines of text."""

    rows: Sequence[tuple[str, ...]]
    alignment: str
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = list(align(self.rows, self.alignment))
        rule = ["-" * max(map(len, lines))] if self.below else []
        return "\n".join([*self.above, *lines, *rule, *self.below])

    def to_html(self) -> str:
        styles = [f"text-align: {'right' if side == '>' else 'left'}; white-space: pre" for side in self.alignment]

        def line(tag: str, row: tuple[str, ...]) -> str:
            cells = zip(row, styles, strict=True)
            return "".join(f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell, style in cells)

        titles, *rows = self.rows
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        table = f"<table><thead><tr>{line('th', titles)}</tr></thead><tbody>{body}</tbody></table>"
        above, below = ("<br/>".join(map(html.escape, lines)) for lines in (self.above, self.below))
        return f"<div>{above}{table}{below}</div>"


class ShownAsTable:
    """Base class of objects that are printed as a table, and shown as one where a cell of a notebook ends with them."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().to_html()


def show_time(seconds: float) -> str:
    """The local time of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
