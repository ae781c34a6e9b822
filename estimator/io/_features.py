"""Configurations of the features of a `tf.Example`, which `parse_example` takes, and how each is parsed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from estimator.io._flat import KINDS, Flat

_READ = {kind: operator.attrgetter(f"{kind}.value") for kind in KINDS}
_NAMES = {"int64_list": "int64", "float_list": "float", "bytes_list": "string"}  # TensorFlow's, in its errors


class SparseTensorValue(NamedTuple):
    """A sparse array, as TensorFlow has it: the value of a `VarLenFeature`.

    Attributes:
      indices: int64 of shape `(n, dimensions)`, of the values that are there, in order.
      values: shape `(n,)`.
      dense_shape: int64 of shape `(dimensions,)`.
    """

    indices: np.ndarray
    values: np.ndarray
    dense_shape: np.ndarray

    def to_dense(self, default: Any = None, width: int | None = None) -> np.ndarray:
        """The array whose other elements are `default`: by default -1 for integers, NaN, or b"" for strings, which
        feature columns and `est.embedding_lookup_sparse` take for an id, number or string that is not there.

        Args:
          default: as above.
          width: the size of the last dimension, if it is to be larger than the values need.
        """
        if default is None:
            default = {"i": -1, "f": np.nan, "O": b""}[self.values.dtype.kind]
        shape = [int(size) for size in self.dense_shape]
        dense = np.full([*shape[:-1], shape[-1] if width is None else width], default, self.values.dtype)
        dense[tuple(self.indices.T)] = self.values
        return dense


@dataclasses.dataclass(frozen=True)
class _Feature:
    @functools.cached_property
    def kind(self) -> str:
        """The field of a `Feature` that holds its values."""
        return _kind_of(type(self).__name__, self.dtype)  # type: ignore[attr-defined]

    def read(self, key: str, features: Sequence[bytes], flat: Flat | None) -> Flat:
        """The values of serialized `Feature`s, one after the other, and the number that each of them has."""
        if flat is not None:
            return flat
        lists = [values or () for values in self.read_each(key, features)]
        return self.as_array(lists), np.array([*map(len, lists)], np.int64)

    def read_each(self, key: str, features: Sequence[bytes]) -> list[Any]:
        """The values of each of some serialized `Feature`s; None for one that has no kind, as of one that is missing.

        Raises:
          ValueError: one is of another kind.
        """
        from estimator.io._messages import Feature

        kind, lists = self.kind, []
        read = _READ[kind]
        for index, feature in enumerate(map(Feature.FromString, features)):
            values = read(feature)
            # Where there are some, they are of this kind; to ask for it takes as long as to read them.
            which = kind if values else feature.WhichOneof("kind")
            if which not in (None, kind):
                raise ValueError(
                    f"Name: <unknown>, Key: {key}, Index: {index}.  Data types don't match. Data type: {_NAMES[which]} "
                    f"but expected type: {_NAMES[kind]}"
                )
            lists.append(None if which is None else values)
        return lists

    def as_array(self, lists: Sequence[Any]) -> np.ndarray:
        """The array of the values of a batch."""
        return np.array(list(itertools.chain.from_iterable(lists)), KINDS[self.kind])


@dataclasses.dataclass(frozen=True)
class FixedLenFeature(_Feature):
    """A feature that has the same shape in all examples; parsed into an array of shape `(batch, *shape)`.

    Args:
      shape: the shape in an example; `[]` for a single value.
      dtype: `np.int64`, `np.float32`, or `str` for strings, which are parsed into objects of `bytes`.
      default_value: for examples without it, of that shape or one value for all. If None, such an example is an error.

    Raises:
      TypeError: the dtype is another one.
      ValueError: the default has another shape, or the shape is not known.
    """

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape("FixedLenFeature", self.shape))
        kind = KINDS[self.kind]
        if self.default_value is not None:
            default = np.asarray(self.default_value, kind)
            if default.ndim and default.size != math.prod(self.shape):
                raise ValueError(
                    f"default_value of FixedLenFeature must be one value, or have the shape {list(self.shape)}; got "
                    f"{self.default_value!r}."
                )

    def parse(self, key: str, features: Sequence[bytes], flat: Flat | None = None) -> np.ndarray:
        """Parses the serialized `Feature`s of a batch, b"" for a missing one; `flat` if they are read already."""
        size = math.prod(self.shape)
        if flat is not None and size and (flat[1] == size).all():
            values = flat[0]
        else:
            values = self.as_array([self._fill(key, *each) for each in enumerate(self.read_each(key, features))])
        return values.reshape(len(features), *self.shape)

    def _fill(self, key: str, index: int, values: Any) -> Any:
        if values is None:
            values = self._default()
        if values is None:
            raise ValueError(
                f"Name: <unknown>, Feature: {key} (data type: {_NAMES[self.kind]}) is required but could not be found."
            )
        if len(values) != math.prod(self.shape):
            raise ValueError(
                f"Name: <unknown>, Key: {key}, Index: {index}.  Number of {_NAMES[self.kind]} values != expected.  "
                f"Values size: {len(values)} but output shape: [{','.join(map(str, self.shape))}]"
            )
        return values

    def _default(self) -> list[Any] | None:
        if self.default_value is None:
            return None
        encoded = _encode(self.default_value) if self.kind == "bytes_list" else self.default_value
        return list(np.broadcast_to(np.asarray(encoded, KINDS[self.kind]).reshape(-1), math.prod(self.shape)))


@dataclasses.dataclass(frozen=True)
class VarLenFeature(_Feature):
    """A feature that has any number of values in an example; parsed into a `SparseTensorValue` of shape `(batch, k)`.

    Args:
      dtype: as for `FixedLenFeature`.

    Raises:
      TypeError: the dtype is another one.
    """

    dtype: Any

    def __post_init__(self) -> None:
        assert self.kind

    def parse(self, key: str, features: Sequence[bytes], flat: Flat | None = None) -> SparseTensorValue:
        """Parses the serialized `Feature`s of a batch, b"" for a missing one; `flat` if they are read already."""
        values, counts = self.read(key, features, flat)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        dense_shape = np.array([len(counts), counts.max(initial=0)], np.int64)
        return SparseTensorValue(np.stack([rows, columns], 1), values, dense_shape)


@dataclasses.dataclass(frozen=True)
class FixedLenSequenceFeature(_Feature):
    """A feature that has any number of elements of one shape in an example; parsed into an array of shape `(batch, k,
    *shape)`, filled up, or, of a sequence, `(steps, *shape)`.

    Args:
      shape: the shape of an element; `[]` for a single value.
      dtype: as for `FixedLenFeature`.
      allow_missing: whether examples may lack it; in `parse_example` it has to be True.
      default_value: one value, to fill up with; by default 0 or b"".

    Raises:
      TypeError: the dtype is another one.
      ValueError: the default is not one value, or the shape is not known.
    """

    shape: Sequence[int]
    dtype: Any
    allow_missing: bool = False
    default_value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape("FixedLenSequenceFeature", self.shape))
        if self.default_value is not None and np.size(np.asarray(self.default_value, KINDS[self.kind])) != 1:
            raise ValueError(f"default_value of FixedLenSequenceFeature must be one value; got {self.default_value!r}.")

    def parse(self, key: str, features: Sequence[bytes], flat: Flat | None = None) -> np.ndarray:
        """Parses the serialized `Feature`s of a batch, b"" for a missing one; `flat` if they are read already."""
        if not self.allow_missing:
            raise ValueError(
                f"The FixedLenSequenceFeature {key!r} needs allow_missing=True, which fills up the examples of a batch."
            )
        size, (values, counts) = math.prod(self.shape), self.read(key, features, flat)
        uneven = np.flatnonzero(counts % max(size, 1))
        if len(uneven):
            raise ValueError(
                f"Name: <unknown>, Key: {key}, Index: {uneven[0]}.  Number of {_NAMES[self.kind]} values is not a "
                f"multiple of the size of an element.  Values size: {counts[uneven[0]]} but shape of an element: "
                f"[{','.join(map(str, self.shape))}]"
            )
        longest = counts.max(initial=0)
        filled = np.full((len(counts), longest), self._fill(), values.dtype)
        filled[np.arange(longest) < counts[:, None]] = values
        return filled.reshape(len(counts), longest // max(size, 1), *self.shape)

    def parse_steps(self, key: str, steps: Sequence[bytes] | None) -> np.ndarray:
        """Parses the serialized `Feature`s of the steps of a sequence; None if it is missing."""
        if steps is None:
            if not self.allow_missing:
                raise ValueError(
                    f"Name: <unknown>, Feature list '{key}' is required but could not be found.  Did you mean to "
                    "include it with allow_missing=True?"
                )
            steps = ()
        return FixedLenFeature(self.shape, self.dtype).parse(key, steps)

    def _fill(self) -> Any:
        if self.default_value is None:
            return {"int64_list": 0, "float_list": 0.0, "bytes_list": b""}[self.kind]
        return _encode(np.asarray(self.default_value).item()) if self.kind == "bytes_list" else self.default_value


Config = FixedLenFeature | VarLenFeature | FixedLenSequenceFeature


def _encode(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_encode(each) for each in value]
    return value.encode() if isinstance(value, str) else value


def _kind_of(caller: str, dtype: Any) -> str:
    if dtype is str or dtype is bytes or (isinstance(dtype, str) and dtype == "string"):
        return "bytes_list"
    try:
        given = np.dtype({int: np.int64, float: np.float32}.get(dtype, dtype))
    except TypeError:
        given = np.dtype(bool)  # is refused below
    if given.kind in "SUT":
        return "bytes_list"
    for kind in ("int64_list", "float_list"):
        if given == KINDS[kind]:
            return kind
    raise TypeError(
        f"{caller} has a dtype of np.int64, np.float32 or str, as the values of a tf.Example are; got {dtype!r}. Cast "
        "what is parsed."
    )


def _checked_shape(caller: str, shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(f"shape of {caller} must be a list of sizes, `[]` for one value; got {shape!r}.")
    return tuple(int(size) for size in sizes)
