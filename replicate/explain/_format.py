"""Formats of numbers and types in an explanation."""

from __future__ import annotations

from collections.abc import Iterable


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


def format_type(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
