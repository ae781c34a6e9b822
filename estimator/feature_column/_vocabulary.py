"""Categorical columns of a vocabulary: a list, or the lines of a file."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.feature_column._column import (
    ID_DTYPE,
    Coder,
    KeyColumn,
    are_integers,
    check_key,
    check_positive,
    feature,
    in_range,
    integers,
)
from estimator.feature_column._hash import Crc32, bits, bucket, mix


@dataclasses.dataclass(frozen=True)
class VocabularyColumn(KeyColumn):
    vocabulary_list: tuple[Any, ...]
    default_value: int
    num_oov_buckets: int
    vocabulary_file: str | None = dataclasses.field(default=None, compare=False)

    @property
    def num_buckets(self) -> int:
        return len(self.vocabulary_list) + self.num_oov_buckets

    @property
    def of_strings(self) -> bool:
        return isinstance(self.vocabulary_list[0], str)

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        values = integers(features, self.key)
        if self.of_strings:
            dtype = feature(features, self.key).dtype
            if dtype != ID_DTYPE:
                raise TypeError(
                    f"The classes of feature {self.key!r} are strings, such as {self.vocabulary_list[0]!r}; got "
                    f"{dtype}. Give strings, by `.astype(str)` for example, and turn them into ids in input_fn: "
                    "`features = est.feature_column.encode(features, columns)`."
                )
            return in_range(values, self.num_buckets, None)
        # A binary search in a constant of the program; TensorFlow uses a lookup table, which must be initialized.
        ordered = np.sort(np.array(self.vocabulary_list, np.int32))
        places = np.argsort(np.array(self.vocabulary_list, np.int32)).astype(np.int32)
        at = jnp.searchsorted(jnp.asarray(ordered), values).clip(0, len(ordered) - 1)
        otherwise: Any = self.default_value
        if self.num_oov_buckets:
            otherwise = len(ordered) + bucket(mix(bits(values)), self.num_oov_buckets)
        ids = jnp.where(jnp.asarray(ordered)[at] == values, jnp.asarray(places)[at], otherwise)
        # -1 stands for the absence of a class, not for an unknown one.
        return jnp.where(values == -1, -1, ids)

    def coders(self) -> dict[str, Coder]:
        return {self.key: self} if self.of_strings else {}

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.vocabulary_list)}

    def code(self, text: str) -> int:
        place = self._places.get(text)
        if place is not None:
            return place
        if self.num_oov_buckets:
            return len(self.vocabulary_list) + Crc32().code(text) % self.num_oov_buckets
        return self.default_value


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str] | Sequence[int],
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """A column of listed classes; the id of a class is its position in the list.

    Args:
      key: the feature: strings, which `encode` turns into ids; or, for a vocabulary of integers, any integers, -1
        for no class.
      vocabulary_list: the classes, all strings or all integers.
      dtype: `str` or a dtype of integers, which the classes must have; if None, the dtype of the list.
      default_value: the id of values that are not listed; -1: they have no class.
      num_oov_buckets: the number of additional classes for values that are not listed, chosen by a hash, which is not
        TensorFlow's.
    """
    caller = "categorical_column_with_vocabulary_list"
    check_key(caller, key)
    words = tuple(vocabulary_list)
    if not words:
        raise ValueError(f"`{caller}`: vocabulary_list must be non-empty; got {vocabulary_list!r} for key {key!r}.")
    kind = isinstance(words[0], str) if dtype is None else not are_integers(caller, dtype)
    if not all(isinstance(w, str) if kind else _is_int32(w) for w in words):
        wanted = "strings alone, or integers of 32 bits" if dtype is None else f"classes of dtype {dtype!r}"
        raise ValueError(f"`{caller}`: vocabulary_list must hold {wanted}; got {words!r}.")
    return _column(caller, "vocabulary_list", key, words, default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = str,
) -> VocabularyColumn:
    """A column whose classes are the lines of a file; the id of a class is the number of its line, from 0.

    The file is read by this call. Every process and the export need it, or a copy.

    >>> import os, tempfile
    >>> import estimator as est, numpy as np
    >>> path = os.path.join(tempfile.mkdtemp(), "states.txt")
    >>> with open(path, "w") as file:
    ...     _ = file.write("Alabama\\nAlaska\\nArizona\\n")
    >>> states = est.feature_column.categorical_column_with_vocabulary_file("state", path, num_oov_buckets=1)
    >>> est.feature_column.encode({"state": np.array(["Arizona", "Utah", ""])}, [states])["state"]
    array([         2,          3, 4294967295], dtype=uint32)

    Args:
      key: the feature, as for `categorical_column_with_vocabulary_list`.
      vocabulary_file: a text file in UTF-8.
      vocabulary_size: how many lines to use; all if None.
      num_oov_buckets: the number of additional classes for values that are not in the file.
      default_value: the id of values that are not in the file; None or -1: they have no class.
      dtype: `str`; or a dtype of integers, as which the lines are read.

    Raises:
      ValueError: the file is missing, is shorter than `vocabulary_size`, or has an empty line or one line twice; or
        an argument is invalid.
    """
    caller = "categorical_column_with_vocabulary_file"
    check_key(caller, key)
    of_integers = are_integers(caller, dtype)
    if not isinstance(vocabulary_file, str | os.PathLike) or not os.path.isfile(vocabulary_file):
        raise ValueError(f"`{caller}`: vocabulary_file in {key} does not exist; got {vocabulary_file!r}.")
    if vocabulary_size is not None:
        check_positive(caller, "vocabulary_size", vocabulary_size)
    with open(vocabulary_file, encoding="utf-8") as file:  # universal newlines
        # Only the end of the line is removed: spaces may belong to a class.
        lines = [line.rstrip("\n") for line in file]
    if not lines or len(lines) < (vocabulary_size or 0):
        raise ValueError(
            f"`{caller}`: vocabulary_file {os.fspath(vocabulary_file)!r} of key {key!r} has {len(lines)} lines; "
            f"vocabulary_size is {vocabulary_size}."
        )
    words: tuple[Any, ...] = tuple(lines[:vocabulary_size])
    if of_integers:
        if wrong := [line for line in words if not line.strip().lstrip("-").isdigit() or not _is_int32(int(line))]:
            raise ValueError(
                f"`{caller}`: vocabulary_file {os.fspath(vocabulary_file)!r} must hold integers of 32 bits for dtype "
                f"{dtype!r}; got {wrong[:3]}."
            )
        words = tuple(map(int, words))
    # In TensorFlow the default is None for a file, which means -1, and -1 for a list.
    default = -1 if default_value is None else default_value
    column = _column(caller, "vocabulary_file", key, words, default, num_oov_buckets)
    return dataclasses.replace(column, vocabulary_file=os.fspath(vocabulary_file))


def _column(
    caller: str, source: str, key: str, words: tuple[Any, ...], default_value: Any, num_oov_buckets: Any
) -> VocabularyColumn:
    if twice := [word for word, times in collections.Counter(words).items() if times > 1]:
        raise ValueError(f"`{caller}`: Duplicate keys in {source}: {twice}, for key {key!r}.")
    if "" in words or -1 in words:
        raise ValueError(f"`{caller}`: {source} of key {key!r} holds '' or -1, which stand for no class.")
    if not isinstance(num_oov_buckets, int | np.integer) or num_oov_buckets < 0:
        raise ValueError(f"`{caller}`: Invalid num_oov_buckets {num_oov_buckets!r}; it must be an int of at least 0.")
    if num_oov_buckets and default_value != -1:
        raise ValueError(
            f"`{caller}`: Can't specify both num_oov_buckets and default_value; got {num_oov_buckets} and "
            f"{default_value}."
        )
    if default_value not in range(-1, len(words)):
        raise ValueError(f"`{caller}`: default_value must be -1 or an id, below {len(words)}; got {default_value!r}.")
    return VocabularyColumn(key, words, default_value, int(num_oov_buckets))


def _is_int32(word: Any) -> bool:
    return isinstance(word, int | np.integer) and not isinstance(word, bool) and -(2**31) <= int(word) < 2**31
