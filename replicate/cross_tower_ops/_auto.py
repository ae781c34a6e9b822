"""The way of summing over towers that was the fastest on such devices."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Sequence

import jax
from absl import logging

from replicate.cross_tower_ops._algorithms import all_reduce
from replicate.cross_tower_ops._all_reduce import AllReduce
from replicate.cross_tower_ops._base import CrossTowerOps
from replicate.cross_tower_ops._measurements import ARRAYS, Row, nearest_row, read_table, recorded_rows, rows_for_towers
from replicate.towers._devices import find_devices
from replicate.towers._map import num_towers
from replicate.towers._packing import ConcatAndSplitPacker


def choose_the_best(
    devices: Sequence[jax.Device | str] | None = None, table: str | pathlib.Path | None = None
) -> CrossTowerOps:
    """The ops that were the fastest on devices of this kind, for each size; the default of `replicate_model_fn`.

    The table comes with the package, or is written by `python -m replicate.cross_tower_ops.measure --out FILE`. It says
    which algorithm is the fastest for a vector, and which arrays are better not packed with others; the row with the
    nearest number of towers and of bytes counts. Ties go to `psum` and to packing. Devices of a kind that is not in
    the table get `AllReduce()`: `psum` of all arrays of a dtype in one vector. Devices of several processes get `psum`,
    with arrays of about a megabyte and more by themselves. The choice is logged once for each kind and number of
    devices.

    >>> ops = choose_the_best(["cpu:0", "cpu:1"])

    Args:
      devices: of the towers; see `replicate_model_fn`.
      table: the file to look in, instead of the one of the package.

    Raises:
      ValueError: there are no such devices, or the file is not such a table.
    """
    towers = find_devices(devices)
    kind = towers[0].device_kind
    rows = [row for row in (recorded_rows() if table is None else read_table(table)) if row.kind == kind]
    if len(towers) == 1:
        return AllReduce()
    if len({device.process_index for device in towers}) > 1:
        # The table was measured on single machines: between processes the network decides, but a large array is copied
        # there, too, to pack it. A step of 4 MB in two processes takes 0.7 of the time so.
        rows = [
            Row(kind, 2, ARRAYS * size, 0.0, {"psum": 1.0}, alone) for size, alone in ((1 << 19, 1.0), (1 << 20, 0.5))
        ]
        why = "which are of several processes"
    else:
        why = "as measured" if rows else "a kind of device that was not measured"
    _log(kind, len(towers), f"{_describe(rows, len(towers))}; {why}")
    return _Fastest(rows) if any(row.best != "psum" or row.pays_alone for row in rows) else AllReduce()


# Arrays per vector. 500 in four vectors take 0.9 of the time of 500 in one: what needs only the first starts earlier.
_MOST_ARRAYS = 128


class _Fastest(AllReduce):
    """Packs the arrays that are faster packed, and sums each pack by the fastest algorithm for its size."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self._rows = rows

    def _sum(self, arrays: list[jax.Array]) -> list[jax.Array]:
        rows = rows_for_towers(self._rows, num_towers())
        packer = _SmallPacker(rows)
        return packer.unpack([all_reduce(pack, _algorithm(rows, pack)) for pack in packer.pack(arrays)], arrays)


def _algorithm(rows: Sequence[Row], pack: jax.Array) -> str:
    """The fastest algorithm; `psum`, which needs no padding, for a pack that the towers do not divide."""
    return "psum" if pack.size % num_towers() else nearest_row(rows, pack.nbytes).best


class _SmallPacker(ConcatAndSplitPacker):
    """The arrays of a dtype in one vector or a few, but for the arrays that are faster alone."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self._rows = rows

    def groups(self, arrays: Sequence[jax.Array]) -> list[list[int]]:
        # The bytes of a row are the total of `ARRAYS` arrays of one size.
        alone = [nearest_row(self._rows, ARRAYS * array.nbytes).pays_alone for array in arrays]
        groups = [[i] for i, one in enumerate(alone) if one]
        for group in super().groups(arrays):
            small = [i for i in group if not alone[i]]
            groups += [small[begin : begin + _MOST_ARRAYS] for begin in range(0, len(small), _MOST_ARRAYS)]
        return groups


@functools.cache
def _log(kind: str, towers: int, choice: str) -> None:
    logging.info("Values of %d towers on %s are summed by %s.", towers, kind, choice)


def _describe(rows: Sequence[Row], towers: int) -> str:
    if not rows:
        return "psum"
    rows = rows_for_towers(rows, towers)
    algorithms = [
        f"{name} from {next(run).bytes:,} bytes on" for name, run in itertools.groupby(rows, lambda row: row.best)
    ]
    algorithms[0] = rows[0].best
    alone = [row.bytes // ARRAYS for row in rows if row.pays_alone]
    return ", ".join(algorithms) + (f", arrays of {alone[0]:,} bytes and more by themselves" if alone else "")
