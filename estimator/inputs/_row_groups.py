"""Single rows grouped to batches, for `pad_batches`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from estimator.core._typing import PyTree
from estimator.inputs._input_fn import pair_of


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """Reads `batch_size` rows as one batch. What is to be padded becomes an array of rows, everything else one array.

    Args:
      batch_size: the number of rows.
      drop_remainder: whether fewer rows at the end are left out.
      axes, label_axes: as for `pad_batches`. If None, all but scalars is to be padded, as by `tf.data`.
    """

    batch_size: int
    drop_remainder: bool
    axes: Any
    label_axes: Any

    def read(self, rows: Iterator[Any]) -> Any:
        """The next batch; raises StopIteration at the end."""
        group = list(itertools.islice(rows, self.batch_size))
        if not group or (self.drop_remainder and len(group) < self.batch_size):
            raise StopIteration
        # As in batches, only tuples have labels.
        if not all(isinstance(row, tuple) for row in group):
            return _join("features", group, self.axes)
        features, labels = zip(*map(pair_of, group), strict=True)
        return _join("features", features, self.axes), _join("labels", labels, self.label_axes)


def _join(name: str, rows: Sequence[Any], axes: Any) -> PyTree:
    if not isinstance(rows[0], Mapping):
        return None if rows[0] is None else _column(name, rows, not isinstance(axes, Mapping))
    for row in rows:
        if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
            raise ValueError(
                f"pad_batches got rows whose {name} differ in their names: {list(rows[0])} and "
                f"{list(row) if isinstance(row, Mapping) else row!r}. Give all rows the same ones."
            )
    return {
        key: _column(f"{name}[{key!r}]", [row[key] for row in rows], axes is None or key in axes) for key in rows[0]
    }


def _column(name: str, rows: Sequence[Any], is_padded: bool) -> np.ndarray:
    arrays = [np.asarray(row) for row in rows]
    if is_padded and arrays[0].ndim:
        objects = np.empty(len(arrays), object)  # a list of two would be taken for features and labels
        for i, row in enumerate(rows):
            objects[i] = row
        return objects
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(
            f"The rows of {name} have the shapes {sorted({array.shape for array in arrays})}. Give it in `axes`, or in "
            "`label_axes`, to be padded."
        )
    return np.stack(arrays)
