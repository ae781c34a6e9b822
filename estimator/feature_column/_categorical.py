"""Categorical columns: by identity, hash, buckets of numbers, or crosses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.feature_column._column import (
    CategoricalColumn,
    Coder,
    DenseColumn,
    KeyColumn,
    are_integers,
    check_key,
    check_positive,
    check_single,
    in_range,
    integers,
)
from estimator.feature_column._dense import NumericColumn, many_hot
from estimator.feature_column._hash import Crc32, bits, bucket, mix
from estimator.io._features import Config, VarLenFeature


@dataclasses.dataclass(frozen=True)
class IdentityColumn(KeyColumn):
    buckets: int
    default_value: int | None

    @property
    def num_buckets(self) -> int:
        return self.buckets

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        return in_range(integers(features, self.key), self.buckets, self.default_value)


def categorical_column_with_identity(key: str, num_buckets: int, default_value: int | None = None) -> IdentityColumn:
    """A column whose feature has the ids of its classes.

    Args:
      key: the feature: integers in `[0, num_buckets)`, and -1 for no class.
      num_buckets: the number of classes.
      default_value: the id for integers that are not ids. If None, values computed from them are NaN, since a compiled
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
class HashColumn(KeyColumn):
    hash_bucket_size: int
    dtype: Any = dataclasses.field(default=str, compare=False)  # in a `tf.Example`; the column takes integers, too

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        values = integers(features, self.key)
        # -1 stands for the absence of a class, in integers and in encoded strings; a hash of it would be a class.
        return jnp.where(values == -1, -1, bucket(mix(bits(values)), self.hash_bucket_size))

    def coders(self) -> dict[str, Coder]:
        return {self.key: Crc32()}

    def example_features(self) -> dict[str, Config]:
        return {self.key: VarLenFeature(self.dtype)}


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: Any = str) -> HashColumn:
    """A column whose classes are hashes of the feature.

    Integers are mixed by the last steps of MurmurHash3 and taken modulo `hash_bucket_size`; -1 stands for no class.
    Strings become integers by CRC-32 in `encode`. So a class has the same id in every process and on every device, but
    not the same as in TensorFlow.

    Args:
      key: the feature: any integers, or strings, which `encode` turns into integers.
      hash_bucket_size: the number of classes; several values of the feature may share one.
      dtype: `str`, or a dtype of integers, of the feature in a `tf.Example`; the column takes both, whichever it is.
    """
    caller = "categorical_column_with_hash_bucket"
    check_key(caller, key)
    kind = np.int64 if are_integers(caller, dtype) else str
    check_positive(caller, "hash_bucket_size", hash_bucket_size)
    return HashColumn(key, hash_bucket_size, kind)


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

    def example_features(self) -> dict[str, Config]:
        return self.source_column.example_features()

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        numbers = self.source_column.values(features)
        # A number on a boundary belongs to the bucket above, as in TensorFlow. Both are float32; otherwise rounding
        # would decide.
        bucket = jnp.searchsorted(jnp.asarray(self.boundaries, jnp.float32), numbers, side="right").astype(jnp.int32)
        # Each number of a vector has its own range of buckets.
        first = (len(self.boundaries) + 1) * jnp.arange(self.source_column.width, dtype=jnp.int32)
        # `searchsorted` puts NaN after all numbers, into the last bucket.
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
        # Sorted, as in TensorFlow: the order of the keys does not change the names of variables.
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.keys))

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        parts = [integers(features, k) if isinstance(k, str) else k.ids(features) for k in self.keys]
        rows = parts[0].shape[0]
        hashed, known = jnp.full((rows, 1), self.hash_key, jnp.uint32), jnp.ones((rows, 1), bool)
        for part in parts:  # every class of one with every class of the next
            hashed = mix(hashed[:, :, None] ^ bits(part)[:, None, :]).reshape(rows, -1)
            known = (known[:, :, None] & (part != -1)[:, None, :]).reshape(rows, -1)
        return jnp.where(known, bucket(hashed, self.hash_bucket_size), -1)

    def coders(self) -> dict[str, Coder]:
        coders: dict[str, Coder] = {}
        for key in self.keys:
            coders |= {key: Crc32()} if isinstance(key, str) else key.coders()
        return coders

    def example_features(self) -> dict[str, Config]:
        features: dict[str, Config] = {}
        for key in self.keys:
            features |= {key: VarLenFeature(str)} if isinstance(key, str) else key.example_features()
        return features


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """A column whose classes are hashes of combinations of the classes of several columns.

    Args:
      keys: at least two: features of integers (or of strings, which `encode` turns into integers), or categorical
        columns. An example with several classes of each has all their combinations. Where another column makes ids of a
        feature's strings, those are crossed: strings that it does not know, as one class or none.
      hash_bucket_size: the number of classes.
      hash_key: varies which combinations share a class.
    """
    if not isinstance(keys, list | tuple) or len(keys) < 2:
        raise ValueError(f"`crossed_column`: keys must be a list with length > 1; got {keys!r}.")
    for key in keys:
        # As in TensorFlow: hashing before crossing makes collisions more likely.
        if isinstance(key, HashColumn):
            raise ValueError(
                "`crossed_column`: categorical_column_with_hash_bucket is not supported for crossing. Hashing before "
                f"crossing will increase probability of collision. Instead, use the feature name {key.key!r}."
            )
        if not isinstance(key, str | CategoricalColumn):
            raise ValueError(
                f"`crossed_column`: each of keys must be a feature's name or a categorical column; got {key!r}."
            )
        if not isinstance(key, str):
            check_single("crossed_column", key)
            if key.is_weighted:
                raise ValueError(
                    "`crossed_column` does not support weights, but the given column has them. Cross the column that "
                    f"it weights, and give the cross to `weighted_categorical_column`. Given column: {key!r}."
                )
    check_positive("crossed_column", "hash_bucket_size", hash_bucket_size)
    # 32 bits of the golden ratio, a usual constant of hash functions. TensorFlow's hash has 64 bits, for which jax
    # needs x64.
    return CrossedColumn(tuple(keys), hash_bucket_size, 0x9E3779B9 if hash_key is None else hash_key % 2**32)
