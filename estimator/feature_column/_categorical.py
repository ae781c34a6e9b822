"""Categorical columns: by identity, hash, vocabulary, buckets of numbers, or crosses."""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.feature_column._column import (
    CategoricalColumn,
    Coder,
    DenseColumn,
    check_key,
    check_positive,
    integers,
)
from estimator.feature_column._dense import NumericColumn, many_hot


@dataclasses.dataclass(frozen=True)
class _Crc32:
    """An integer for a string: 31 bits of the CRC-32 of its UTF-8 bytes."""

    def code(self, text: str) -> int:
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class IdentityColumn(CategoricalColumn):
    key: str
    buckets: int
    default_value: int | None

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.buckets

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        return _in_range(integers(features, self.key), self.buckets, self.default_value)


def categorical_column_with_identity(key: str, num_buckets: int, default_value: int | None = None) -> IdentityColumn:
    """A column whose feature has the ids of its classes.

    Args:
      key: the feature: integers in `[0, num_buckets)`, and -1 for no class.
      num_buckets: the number of classes.
      default_value: the id for integers that are not ids. None: values computed from them are NaN, since a compiled
        program cannot raise an error; the NaN check of training detects it.
    """
    caller = "categorical_column_with_identity"
    check_key(caller, key)
    check_positive(caller, "num_buckets", num_buckets)
    if default_value is not None and default_value not in range(num_buckets):
        raise ValueError(
            f"`{caller}`: default_value must be in [0, num_buckets); got {default_value!r} with "
            f"num_buckets={num_buckets} for key {key!r}."
        )
    return IdentityColumn(key, num_buckets, default_value)


@dataclasses.dataclass(frozen=True)
class HashColumn(CategoricalColumn):
    key: str
    hash_bucket_size: int

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        values = integers(features, self.key)
        return jnp.where(values == -1, -1, _bucket(_mixed(_bits(values)), self.hash_bucket_size))

    def coders(self) -> dict[str, Coder]:
        return {self.key: _Crc32()}


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int) -> HashColumn:
    """A column whose classes are hashes of the feature.

    Integers are mixed by the last steps of MurmurHash3 and taken modulo `hash_bucket_size`; -1 stands for no class.
    Strings become integers by CRC-32 in `encode`. So a class has the same id in every process and on every device, but
    not the same as in TensorFlow.

    Args:
      key: the feature: any integers, or strings, which `encode` turns into integers.
      hash_bucket_size: the number of classes; several values of the feature may share one.
    """
    caller = "categorical_column_with_hash_bucket"
    check_key(caller, key)
    check_positive(caller, "hash_bucket_size", hash_bucket_size)
    return HashColumn(key, hash_bucket_size)


@dataclasses.dataclass(frozen=True)
class VocabularyColumn(CategoricalColumn):
    key: str
    vocabulary_list: tuple[Any, ...]
    default_value: int
    num_oov_buckets: int

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return len(self.vocabulary_list) + self.num_oov_buckets

    @property
    def of_strings(self) -> bool:
        return isinstance(self.vocabulary_list[0], str)

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        values = integers(features, self.key)
        if self.of_strings:  # `encode` made them ids already
            return _in_range(values, self.num_buckets, None)
        ordered = np.sort(np.array(self.vocabulary_list, np.int32))
        places = np.argsort(np.array(self.vocabulary_list, np.int32)).astype(np.int32)
        at = jnp.searchsorted(jnp.asarray(ordered), values).clip(0, len(ordered) - 1)
        otherwise: Any = self.default_value
        if self.num_oov_buckets:
            otherwise = len(ordered) + _bucket(_mixed(_bits(values)), self.num_oov_buckets)
        ids = jnp.where(jnp.asarray(ordered)[at] == values, jnp.asarray(places)[at], otherwise)
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
            return len(self.vocabulary_list) + _Crc32().code(text) % self.num_oov_buckets
        return self.default_value


def categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[str] | Sequence[int], default_value: int = -1, num_oov_buckets: int = 0
) -> VocabularyColumn:
    """A column of listed classes; the id of a class is its position in the list.

    Args:
      key: the feature: strings, which `encode` turns into ids; or, for a vocabulary of integers, any integers, -1
        for no class.
      vocabulary_list: the classes, all strings or all integers.
      default_value: the id of values that are not listed; -1: they have no class.
      num_oov_buckets: the number of additional classes for values that are not listed, chosen by a hash.
    """
    caller = "categorical_column_with_vocabulary_list"
    check_key(caller, key)
    words = tuple(vocabulary_list)
    if not words:
        raise ValueError(f"`{caller}`: vocabulary_list must be non-empty; got {vocabulary_list!r} for key {key!r}.")
    if not (all(isinstance(w, str) for w in words) or all(_is_int32(w) for w in words)):
        raise ValueError(f"`{caller}`: vocabulary_list must hold strings alone, or integers of 32 bits; got {words!r}.")
    if twice := [word for word, times in collections.Counter(words).items() if times > 1]:
        raise ValueError(f"`{caller}`: Duplicate keys in vocabulary_list: {twice}, for key {key!r}.")
    if "" in words or -1 in words:
        raise ValueError(f"`{caller}`: vocabulary_list of key {key!r} holds '' or -1, which stand for no class.")
    if not isinstance(num_oov_buckets, int) or num_oov_buckets < 0:
        raise ValueError(f"`{caller}`: Invalid num_oov_buckets {num_oov_buckets!r}; it must be an int of at least 0.")
    if num_oov_buckets and default_value != -1:
        raise ValueError(
            f"`{caller}`: Can't specify both num_oov_buckets and default_value; got {num_oov_buckets} and "
            f"{default_value}."
        )
    if default_value not in range(-1, len(words)):
        raise ValueError(f"`{caller}`: default_value must be -1 or an id, below {len(words)}; got {default_value!r}.")
    return VocabularyColumn(key, words, default_value, num_oov_buckets)


@dataclasses.dataclass(frozen=True)
class BucketizedColumn(CategoricalColumn, DenseColumn):
    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    def num_buckets(self) -> int:
        return (len(self.boundaries) + 1) * self.source_column.width

    @property
    def width(self) -> int:
        return self.num_buckets

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        numbers = self.source_column.values(features)
        bucket = jnp.searchsorted(jnp.asarray(self.boundaries, jnp.float32), numbers, side="right").astype(jnp.int32)
        first = (len(self.boundaries) + 1) * jnp.arange(self.source_column.width, dtype=jnp.int32)
        return jnp.where(jnp.isnan(numbers), -1, bucket + first)

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        return many_hot(self.ids(features), self.num_buckets)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """A column that buckets numbers; it is a categorical column, and by itself a one-hot dense column.

    >>> import numpy as np
    >>> from estimator.feature_column import numeric_column
    >>> column = bucketized_column(numeric_column("year"), [1960, 1980])
    >>> column.ids({"year": np.array([1959, 1960, 2000])}).ravel().tolist()
    [0, 1, 2]

    Args:
      source_column: the column of numbers; NaN is in no class.
      boundaries: ascending; a class includes its lower boundary.
    """
    if not isinstance(source_column, NumericColumn):
        raise ValueError(
            "`bucketized_column`: source_column must be a column generated with numeric_column(); got "
            f"{source_column!r}."
        )
    boundaries = tuple(boundaries)
    if not boundaries or any(a >= b for a, b in zip(boundaries, boundaries[1:], strict=False)):
        raise ValueError(f"`bucketized_column`: boundaries must be a sorted list of numbers; got {list(boundaries)}.")
    return BucketizedColumn(source_column, boundaries)


@dataclasses.dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    keys: tuple[Any, ...]
    hash_bucket_size: int
    hash_key: int

    @property
    def name(self) -> str:
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.keys))

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        parts = [integers(features, k) if isinstance(k, str) else k.ids(features) for k in self.keys]
        rows = parts[0].shape[0]
        mixed, known = jnp.full((rows, 1), self.hash_key, jnp.uint32), jnp.ones((rows, 1), bool)
        for part in parts:  # every class of one with every class of the next
            mixed = _mixed(mixed[:, :, None] ^ _bits(part)[:, None, :]).reshape(rows, -1)
            known = (known[:, :, None] & (part != -1)[:, None, :]).reshape(rows, -1)
        return jnp.where(known, _bucket(mixed, self.hash_bucket_size), -1)

    def coders(self) -> dict[str, Coder]:
        coders: dict[str, Coder] = {}
        for key in self.keys:
            coders |= {key: _Crc32()} if isinstance(key, str) else key.coders()
        return coders


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """A column whose classes are hashes of combinations of the classes of several columns.

    Args:
      keys: at least two: features of integers (or of strings, which `encode` turns into integers), or categorical
        columns. An example with several classes of each has all their combinations.
      hash_bucket_size: the number of classes.
      hash_key: varies which combinations share a class.
    """
    if not isinstance(keys, list | tuple) or len(keys) < 2:
        raise ValueError(f"`crossed_column`: keys must be a list with length > 1; got {keys!r}.")
    for key in keys:
        if isinstance(key, HashColumn):
            raise ValueError(
                "`crossed_column`: categorical_column_with_hash_bucket is not supported for crossing. Hashing before "
                f"crossing will increase probability of collision. Instead, use the feature name {key.key!r}."
            )
        if not isinstance(key, str | CategoricalColumn):
            raise ValueError(
                f"`crossed_column`: each of keys must be a feature's name or a categorical column; got {key!r}."
            )
    check_positive("crossed_column", "hash_bucket_size", hash_bucket_size)
    return CrossedColumn(tuple(keys), hash_bucket_size, 0x9E3779B9 if hash_key is None else hash_key % 2**32)


def _is_int32(word: Any) -> bool:
    return isinstance(word, int | np.integer) and not isinstance(word, bool) and -(2**31) <= int(word) < 2**31


def _in_range(values: jax.Array, num_buckets: int, default_value: int | None) -> jax.Array:
    unknown = (values < -1) | (values >= num_buckets)
    return jnp.where(unknown, num_buckets if default_value is None else default_value, values)


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def _mixed(bits: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3, a permutation of uint32."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _bucket(bits: jax.Array, size: int) -> jax.Array:
    return (bits % np.uint32(size)).astype(jnp.int32)
