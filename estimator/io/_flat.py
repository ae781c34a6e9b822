"""The values of features in a batch of examples, read from their bytes all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

KINDS: dict[str, np.dtype[Any]] = {
    "bytes_list": np.dtype(object),
    "float_list": np.dtype(np.float32),
    "int64_list": np.dtype(np.int64),
}
# A field begins with a byte for its number and that its length follows. Kinds are numbered from 1; a list is field 1.
_TAGS = {kind: number << 3 | 2 for number, kind in enumerate(KINDS, 1)}
_LIST = 1 << 3 | 2
_MOST_BITS = 35  # of a length; protobuf allows no message of more than 2 GB
_FEWEST = 200  # features; protobuf takes a microsecond for each, numpy 150 for all


Flat = tuple[np.ndarray, np.ndarray]


class Pieces(Sequence[bytes]):
    """Pieces of one string of bytes, from `begins` to `ends`."""

    def __init__(self, joined: bytes, begins: np.ndarray, ends: np.ndarray) -> None:
        self.joined, self.begins, self.ends = joined, begins, ends

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> Self:
        """Joins pieces."""
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        ends = np.cumsum(lengths)
        return cls(b"".join(pieces), ends - lengths, ends)

    def split(self, n: int) -> list[Pieces]:
        """The pieces in `n` equal parts."""
        shape = n, len(self) // max(n, 1)
        places = zip(self.begins.reshape(shape), self.ends.reshape(shape), strict=True)
        return [Pieces(self.joined, *each) for each in places]

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, i: Any) -> Any:
        return self.joined[self.begins[i] : self.ends[i]]


def fields_at(data: np.ndarray, begins: np.ndarray, tag: int) -> tuple[bool, np.ndarray, np.ndarray]:
    """Where the contents of fields begin and end, which begin there with a tag and the length of their contents.

    Returns:
      Whether all of them are such fields, if each ends where it should; the places.
    """
    # Where a field ends too early, the next one is looked at, and the end is another one than it should be.
    are_fields = bool((data.take(begins, mode="clip") == tag).all())
    at = begins + 2
    sizes = data.take(begins + 1, mode="clip").astype(np.int64)
    is_longer, shift = sizes >= 128, 7
    while is_longer.any() and shift < _MOST_BITS:  # a byte has seven bits of a length, and the eighth if more come
        more = data.take(at, mode="clip").astype(np.int64)
        sizes += np.where(is_longer, (more - 1) << shift, 0)
        at += is_longer
        is_longer, shift = is_longer & (more >= 128), shift + 7
    return are_fields and not is_longer.any(), at, at + sizes


def read_columns(kind: str, columns: Sequence[Pieces]) -> list[Flat | None]:
    """For each of some columns of serialized `Feature`s the values, one after the other, and the number that each has.

    The columns are pieces of the same bytes. None for one that `read_flat` cannot read, or where protobuf is as fast.
    """
    if sum(map(len, columns)) < _FEWEST:
        return [None] * len(columns)
    begins, ends = (np.concatenate([getattr(column, name) for column in columns]) for name in ("begins", "ends"))
    flat = read_flat(kind, Pieces(columns[0].joined, begins, ends))
    if flat is None:
        return [None] if len(columns) == 1 else [each for column in columns for each in read_columns(kind, [column])]
    values, counts = flat[0], flat[1].reshape(len(columns), -1)
    return list(zip(np.split(values, np.cumsum(counts.sum(1))[:-1]), counts, strict=True))


def read_flat(kind: str, features: Pieces) -> Flat | None:
    """The values of serialized `Feature`s, one after the other, and the number that each has.

    Protobuf makes several Python objects for each feature of each example. Here numpy goes over the bytes of a batch
    where they are as writers make them: one packed list of numbers, or one string.

    Returns:
      None where a feature is written in another way, or is of another kind.
    """
    data, begins, ends = np.frombuffer(features.joined, np.uint8), features.begins, features.ends
    lengths = ends - begins
    if not len(data):
        return None
    # Of two bytes it is a list without values, and of none it is missing.
    has_values = lengths > 2
    is_short = ~has_values & (lengths > 0)
    if is_short.any() and {features[i] for i in np.flatnonzero(is_short).tolist()} != {bytes((_TAGS[kind], 0))}:
        return None
    begins, ends = begins[has_values], ends[has_values]
    for tag in (_TAGS[kind], _LIST):
        are_fields, begins, stops = fields_at(data, begins, tag)
        if not are_fields or (stops != ends).any():
            return None
    sizes = ends - begins
    counts = np.zeros(len(features), np.int64)
    if kind == "bytes_list":
        counts[has_values] = 1
        joined, places = features.joined, zip(begins.tolist(), ends.tolist(), strict=True)
        return np.array([joined[begin:end] for begin, end in places], KINDS[kind]), counts
    if kind == "float_list":
        counts[has_values], rest = np.divmod(sizes, 4)
        return None if rest.any() else (_gather(data, begins, sizes, 4).view("<f4").astype(np.float32), counts)
    data = _gather(data, begins, sizes, 1)
    # An integer is in bytes of seven bits, of which the last is below 128.
    is_last = data < 128
    last = np.flatnonzero(is_last)
    first = np.append(0, last + 1)[:-1]
    length, row_ends = last - first + 1, np.cumsum(sizes)
    # Protobuf decides about more than 64 bits, and refuses a list that ends within an integer.
    longest = length.max(initial=0)
    if longest > 10 or (data[last[length == 10]] > 1).any() or not is_last[row_ends[sizes > 0] - 1].all():
        return None
    counts[has_values] = np.diff(np.append(0, np.cumsum(is_last))[row_ends], prepend=0)
    integers = (data[first] & 127).astype(np.int64)
    for i in range(1, longest):
        longer = np.flatnonzero(length > i)
        integers[longer] |= (data[first[longer] + i] & 127).astype(np.int64) << 7 * i
    return integers, counts


def _gather(data: np.ndarray, begins: np.ndarray, sizes: np.ndarray, unit: int) -> np.ndarray:
    """The bytes of pieces, one after the other; sizes are multiples of the unit, which is copied at a time."""
    if not sizes.any():
        return data[:0]
    if (sizes == sizes[0]).all():
        places, unit = begins, sizes[0]
    else:
        counts = sizes // unit
        places = np.repeat(begins - unit * (np.cumsum(counts) - counts), counts) + unit * np.arange(counts.sum())
    return np.lib.stride_tricks.sliding_window_view(data, unit)[places].reshape(-1)
