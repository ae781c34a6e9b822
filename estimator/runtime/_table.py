"""Tables of text, and sizes in bytes as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def align(rows: Sequence[tuple[str, ...]], alignment: str = "") -> Iterator[str]:
    """Lines of columns, each aligned as a character of `alignment` says, or else to the left. They end without spaces,
    so that a test or a document can compare them."""
    alignment = alignment or "<" * len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)
        ).rstrip()


def show_bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
