"""The values of features in a batch of examples, read from their bytes all at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

KINDS: dict[str, np.dtype[Any]] = {
    "bytes_list": np.dtype(object),
    "float_list": np.dtype(np.float32),
    "int64_list": np.dtype(np.int64),
}
# A field begins with a byte for its number and that its length follows. Kinds are numbered from 1; a list is field 1.
_TAGS = {kind: number << 3 | 2 for number, kind in enumerate(KINDS, 1)}
_LIST = 1 << 3 | 2
_MOST_BYTES = 1 << 14  # of a feature, so that lengths have one byte or two
_FEWEST = 200  # features; protobuf takes a microsecond for each, numpy 150 for all


Flat = tuple[np.ndarray, np.ndarray]


def read_columns(kind: str, columns: Sequence[Sequence[bytes]]) -> list[Flat | None]:
    """For each of some columns of serialized `Feature`s the values, one after the other, and the number that each has.

    None for a column that `read_flat` cannot read, or where protobuf is as fast.
    """
    if sum(map(len, columns)) < _FEWEST:
        return [None] * len(columns)
    flat = read_flat(kind, [*itertools.chain.from_iterable(columns)])
    if flat is None:
        return [None] if len(columns) == 1 else [each for column in columns for each in read_columns(kind, [column])]
    values, counts = flat[0], flat[1].reshape(len(columns), -1)
    return list(zip(np.split(values, np.cumsum(counts.sum(1))[:-1]), counts, strict=True))


def read_flat(kind: str, features: Sequence[bytes]) -> Flat | None:
    """The values of serialized `Feature`s, one after the other, and the number that each has.

    Protobuf makes several Python objects for each feature of each example. Here numpy goes over the bytes of a batch
    where they are as writers make them: one packed list of numbers, or one string.

    Returns:
      None where a feature is written in another way, is longer, or is of another kind.
    """
    lengths = np.fromiter(map(len, features), np.int64, len(features))
    if not 0 < lengths.max(initial=0) < _MOST_BYTES:
        return None
    joined = b"".join(features)
    data, ends = np.frombuffer(joined, np.uint8), np.cumsum(lengths)
    # Of two bytes it is a list without values, and of none it is missing.
    has_values = lengths > 2
    is_short = ~has_values & (lengths > 0)
    if is_short.any() and {features[i] for i in np.flatnonzero(is_short).tolist()} != {bytes((_TAGS[kind], 0))}:
        return None
    begins, ends = (ends - lengths)[has_values], ends[has_values]
    for tag in (_TAGS[kind], _LIST):
        # Where a field ends too early, the next one is looked at, and the sum is not the end.
        is_tag, sizes = data.take(begins, mode="clip") == tag, data.take(begins + 1, mode="clip").astype(np.int64)
        is_long = sizes >= 128
        if is_long.any():
            sizes += np.where(is_long, 128 * data.take(begins + 2, mode="clip").astype(np.int64) - 128, 0)
        begins = begins + 2 + is_long
        if not (is_tag & (begins + sizes == ends)).all():
            return None
    counts = np.zeros(len(features), np.int64)
    if kind == "bytes_list":
        counts[has_values] = 1
        strings = [joined[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return np.array(strings, KINDS[kind]), counts
    change = np.zeros(len(data) + 1, np.int8)
    change[begins] = 1
    change[ends] -= 1  # a list without values ends where it begins
    data = data[np.cumsum(change[:-1], dtype=np.int8).view(bool)]
    if kind == "float_list":
        counts[has_values], rest = np.divmod(sizes, 4)
        return None if rest.any() else (data.view("<f4").astype(np.float32), counts)
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
