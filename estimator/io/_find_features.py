"""The features of a batch of serialized examples, found in their bytes all at once.

Protobuf makes Python objects of the map of each example, of each key and of each feature. Here numpy takes a step from
one feature to the next in all examples together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from estimator.io._flat import Pieces, fields_at
from estimator.io._messages import UnreadExample

_FEWEST = 100  # examples; a step takes 20 microseconds, and protobuf a third of one for each feature
_FIRST, _SECOND = 1 << 3 | 2, 2 << 3 | 2  # of a message's fields: the map, and an entry's key; an entry's value
_WORD = 8  # bytes
_MASKS = np.array([(1 << 8 * i) - 1 for i in range(_WORD + 1)], np.uint64)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that two words have different products


def find_features(serialized: Sequence[bytes], keys: Sequence[str], fewest: int = _FEWEST) -> list[Pieces]:
    """For each key the serialized `Feature` of each example, b"" where it is missing.

    Args:
      serialized: examples.
      keys: of their features.
      fewest: the number of examples from which on they are read all at once.

    Raises:
      DecodeError: an example is not one.
    """
    found = _find_at_once(serialized, [key.encode() for key in keys], fewest) if len(serialized) >= fewest else None
    if found is None:
        maps = [UnreadExample.FromString(each).features.feature for each in serialized]
        # Not `get`, which takes three times as long; a missing one is added as b"".
        found = Pieces.of([each[key] for key in keys for each in maps])
    return found.split(len(keys))


def _find_at_once(serialized: Sequence[bytes], keys: list[bytes], fewest: int) -> Pieces | None:
    """The features, key by key; None where examples are not as writers make them."""
    examples = Pieces.of([*serialized, *keys, bytes(_WORD)])  # the last one, so that words may begin anywhere before
    count, data = len(serialized), np.frombuffer(examples.joined, np.uint8)
    entries = _entries(data, examples.begins[:count], examples.ends[:count], fewest)
    if entries is None:
        return None
    example, begins, ends = entries
    have_names, names, name_ends = fields_at(data, begins, _FIRST)
    have_values, values, value_ends = fields_at(data, name_ends, _SECOND)
    if not (have_names and have_values) or (value_ends != ends).any():
        return None
    which = _match(data, names, name_ends, examples.begins[count:-1], examples.ends[count:-1])
    if which is None:
        return None
    places = np.flatnonzero(which >= 0)
    which, example = which[places], example[places]
    found_begins, found_ends = np.zeros((2, len(keys), count), np.int64)
    found_begins[which, example], found_ends[which, example] = values[places], ends[places]
    if np.count_nonzero(found_ends) < len(places):
        return None  # an example has a key twice
    return Pieces(examples.joined, found_begins.ravel(), found_ends.ravel())


def _match(
    data: np.ndarray, begins: np.ndarray, ends: np.ndarray, key_begins: np.ndarray, key_ends: np.ndarray
) -> np.ndarray | None:
    """For each name the number of the key that it is, or -1; None where two keys have one code."""
    lengths, key_lengths = ends - begins, key_ends - key_begins
    rest = range(_WORD, key_lengths.max(initial=0), _WORD)

    def code_of(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        code = _words(data, begins, lengths)
        for i in rest:
            code = np.where(lengths > i, code * _FACTOR + _words(data, begins + i, lengths - i), code)
        return code

    codes, known = code_of(begins, lengths), code_of(key_begins, key_lengths)
    order = np.argsort(known)
    known = known[order]
    if not len(known) or (known[1:] == known[:-1]).any():
        return None
    place = np.searchsorted(known, codes).clip(max=len(known) - 1)
    which = order[place]
    is_key = (known[place] == codes) & (key_lengths[which] == lengths)
    for i in rest:
        is_key &= _words(data, begins + i, lengths - i) == _words(data, key_begins + i, key_lengths - i)[which]
    return np.where(is_key, which, -1)


def _words(data: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The bytes from there on as a number, which has at most eight of them."""
    words = np.lib.stride_tricks.sliding_window_view(data, _WORD)[np.minimum(begins, len(data) - _WORD)]
    return words.view("<u8")[:, 0] & _MASKS[lengths.clip(0, _WORD)]


def _entries(
    data: np.ndarray, begins: np.ndarray, ends: np.ndarray, fewest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The entries of the maps of all examples: the number of the example, and where they begin and end.

    None where fewer examples than `fewest` have further entries, which protobuf reads as fast.
    """
    are_maps, at, limits = fields_at(data, begins, _FIRST)
    if not are_maps or (limits != ends).any():
        return None
    example, steps = np.arange(len(at)), []
    while len(going := np.flatnonzero(at < limits[example])) >= fewest:
        example = example[going]
        are_entries, begins, at = fields_at(data, at[going], _FIRST)
        if not are_entries:
            return None
        steps.append((example, begins, at))
    if len(going) or not steps:
        return None
    example, begins, ends = (np.concatenate(each) for each in zip(*steps, strict=True))
    return None if (ends > limits[example]).any() else (example, begins, ends)
