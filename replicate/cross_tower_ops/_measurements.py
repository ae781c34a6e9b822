"""The table of measurements: a row for each kind of device, number of towers and number of bytes."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from replicate.cross_tower_ops._algorithms import ALGORITHMS

RECORDED = pathlib.Path(__file__).with_name("measured.json")
ARRAYS = 8
"""The number of arrays into which the bytes of a row are divided to measure `alone`."""

_CLEARLY = 1.05  # More than noise. A smaller gain is not worth another program.


class Row(NamedTuple):
    """One measurement.

    Attributes:
      kind: `device_kind` of the devices.
      towers: their number.
      bytes: that are summed, as float32.
      psum_us: the microseconds that `psum` takes for them as one vector.
      ratios: by algorithm, its time divided by the time of `psum`.
      alone: the time of a `psum` of each of `ARRAYS` equal arrays, together of `bytes`, divided by the time of packing
        them and summing them by the fastest algorithm.
    """

    kind: str
    towers: int
    bytes: int
    psum_us: float
    ratios: dict[str, float]
    alone: float

    @property
    def best(self) -> str:
        """The fastest algorithm; `psum`, unless it is clearly slower."""
        fastest = min(self.ratios, key=self.ratios.__getitem__)
        return fastest if self.ratios[fastest] * _CLEARLY < 1 else "psum"

    @property
    def pays_alone(self) -> bool:
        """True if arrays of an `ARRAYS`-th of the bytes are clearly faster not packed."""
        return self.alone * _CLEARLY < 1


def nearest_row(rows: Sequence[Row], size: float) -> Row:
    """The row with the nearest number of bytes, as a ratio."""
    # Sizes span orders of magnitude, so that nearness is a ratio.
    return min(rows, key=lambda row: abs(math.log(row.bytes / max(size, 1))))


def rows_for_towers(rows: Sequence[Row], towers: int) -> list[Row]:
    """The rows with the nearest number of towers, as a ratio; the larger of two."""
    nearest = min({row.towers for row in rows}, key=lambda count: (abs(math.log(count / towers)), -count))
    return sorted((row for row in rows if row.towers == nearest), key=lambda row: row.bytes)


def write_table(path: str | pathlib.Path, rows: Sequence[Row], recorded_on: str) -> None:
    """Writes a JSON file with a line for each row, in order."""
    lines = ",\n  ".join(json.dumps(row._asdict() | {"best": row.best}) for row in sorted(rows))
    pathlib.Path(path).write_text(
        f'{{\n "recorded_on": {json.dumps(recorded_on)},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8"
    )


def read_table(path: str | pathlib.Path = RECORDED) -> list[Row]:
    """Reads what `write_table` wrote; by default the table that comes with the package."""
    try:
        rows = [_row(**entry) for entry in json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["rows"]]
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(
            f"{path} is not a table of `python -m replicate.cross_tower_ops.measure --out {path}` ({e!r}). "
            "Make it again."
        ) from e
    return rows


recorded_rows = functools.cache(read_table)


def _row(best: Any, **entry: Any) -> Row:
    """A row of a file, whose `best` must follow from the rest."""
    row = Row(**entry)
    if unknown := row.ratios.keys() - ALGORITHMS.keys():
        raise ValueError(f"there is no algorithm {min(unknown)!r}")
    # The file has `best` for its readers: after an edit by hand it must still follow from the ratios.
    if best != row.best:
        raise ValueError(f"{best!r} is not the best of {row.ratios}")
    return row
