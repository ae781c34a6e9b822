"""The bases of columns, and how a column reads its feature."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._bcoo import is_sparse
from estimator.core._typing import Features
from estimator.io._features import Config, VarLenFeature

# Ids that `encode` and `encode_labels` make of strings are of this dtype, -1 as its largest value: it tells them from a
# user's integers, which a program has as int32.
ID_DTYPE = np.dtype(np.uint32)


class Coder(Protocol):
    """Maps a string to an integer, -1 for no class; equal encoders map alike."""

    def code(self, text: str) -> int: ...


class InputColumn(abc.ABC):
    """A column for an input layer: a `DenseColumn`, a `SequenceDenseColumn`, or both.

    Attributes:
      name: part of the names of its variables; columns are ordered by it.
      scope_name: the scope of its variables within the scope of the layer.
      width: the number of values per example, or per step of a sequence.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    def scope_name(self) -> str:
        return self.name

    @property
    @abc.abstractmethod
    def width(self) -> int: ...

    @abc.abstractmethod
    def example_features(self) -> dict[str, Config]:
        """The features of a `tf.Example` that it reads, by key, as `est.io.parse_example` takes them."""


class DenseColumn(InputColumn):
    """A column for an `input_layer` or a `linear_model`."""

    @abc.abstractmethod
    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        """Float32 of shape `(batch, width)`; its variables are created in the current scope."""


class SequenceDenseColumn(InputColumn):
    """A column for a `sequence_input_layer`."""

    @abc.abstractmethod
    def sequence_values(self, features: Mapping[Any, Any]) -> tuple[jax.Array, jax.Array]:
        """Float32 of shape `(batch, steps, width)`, and the lengths of the sequences, int32 of shape `(batch,)`."""


class CategoricalColumn(abc.ABC):
    """A categorical column.

    Attributes:
      name: part of the names of its variables.
      num_buckets: the number of classes.
      is_weighted: whether its classes have weights.
    """

    is_weighted = False

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int: ...

    @abc.abstractmethod
    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        """Int32 of shape `(batch, k)`: -1 for no class, and `num_buckets` for an invalid id, which becomes NaN."""

    def weights(self, features: Mapping[Any, Any]) -> jax.Array | None:
        """Float32 of the shape of the ids; if None, all are 1."""
        return None

    def coders(self) -> dict[str, Coder]:
        """The encoders of strings by feature; features of numbers have none."""
        return {}

    @abc.abstractmethod
    def example_features(self) -> dict[str, Config]:
        """As `InputColumn.example_features`."""


@dataclasses.dataclass(frozen=True)
class KeyColumn(CategoricalColumn):
    """A categorical column of one feature."""

    key: str

    @property
    def name(self) -> str:
        return self.key

    def example_features(self) -> dict[str, Config]:
        return {self.key: VarLenFeature(str if self.coders() else np.int64)}


class SequenceCategoricalColumn(CategoricalColumn):
    """A categorical column whose ids are the steps of a sequence."""

    @abc.abstractmethod
    def lengths(self, features: Mapping[Any, Any]) -> jax.Array:
        """The lengths of the sequences, int32 of shape `(batch,)`."""


def as_columns(feature_columns: Any) -> list[Any]:
    """One column, or several of any kind, as a list."""
    kinds = InputColumn | CategoricalColumn
    columns = [feature_columns] if isinstance(feature_columns, kinds) else list(feature_columns or ())
    for column in columns:
        if not isinstance(column, kinds):
            raise ValueError(
                "Items of feature_columns must be columns such as `est.feature_column.numeric_column(key)`. Given: "
                f"{column!r}."
            )
    return columns


def check_key(caller: str, key: Any) -> None:
    if not isinstance(key, str) or not key:
        raise ValueError(f"`{caller}` needs the name of a feature, a non-empty string, as key; got {key!r}.")


def check_positive(caller: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{caller}`: {name} must be an int of at least 1; got {value!r}.")


def check_categorical(caller: str, column: Any) -> None:
    if not isinstance(column, CategoricalColumn):
        raise TypeError(
            f"`{caller}` takes a categorical column, such as `categorical_column_with_identity(key, num_buckets)`; "
            f"got {column!r}."
        )


def check_single(caller: str, column: Any) -> None:
    """Raises an error for a column of sequences, or one that wraps it."""
    sequence = isinstance(column, SequenceDenseColumn) and not isinstance(column, DenseColumn)
    # Embeddings and indicators are dense columns and columns of sequences: the column that they wrap decides.
    inner = getattr(column, "categorical_column", None)
    if sequence or any(isinstance(each, SequenceCategoricalColumn) for each in (column, inner)):
        raise ValueError(
            f"A column of sequences cannot be used in `{caller}`. Use a column whose name does not begin with "
            "`sequence_`, or, for a sequence, `sequence_input_layer` with an `embedding_column` or `indicator_column`. "
            f"Given: {column!r}."
        )


def sequence_of(column: Any) -> SequenceCategoricalColumn:
    """The column of sequences that a dense column wraps."""
    sequence = column.categorical_column
    if not isinstance(sequence, SequenceCategoricalColumn):
        raise ValueError(
            "`sequence_input_layer` takes columns of sequences. Wrap a `sequence_categorical_column_with_*`, or use "
            f"`input_layer`. Given: {column!r}."
        )
    return sequence


def are_integers(caller: str, dtype: Any) -> bool:
    """Returns whether a dtype of classes is of integers, not of strings."""
    if dtype is not None and np.dtype(dtype).kind in "iu":
        return True
    if dtype is None or np.dtype(dtype).kind not in "OSU":
        raise ValueError(f"`{caller}`: dtype must be `str` or a dtype of integers; got {dtype!r}.")
    return False


def check_features(features: Features) -> None:
    if not isinstance(features, Mapping):
        raise ValueError(
            "features should be a dictionary of arrays by the keys of the feature columns. Given type: "
            f"{type(features).__name__}. Let input_fn return `{{'x': features}}`, or, of a DataFrame, "
            "`est.feature_column.encode(frame, columns)`."
        )


def feature(features: Mapping[Any, Any], key: str) -> jax.Array:
    if key not in features:
        raise ValueError(f"Feature {key!r} is not in features dictionary, which has {sorted(map(str, features))}.")
    value = features[key]
    if is_sparse(value):
        raise TypeError(
            f"Feature columns take dense arrays; feature {key!r} is {value!r}. Give categories as integers of shape "
            "(batch, k), filled up by -1, and numbers as `x.todense()`."
        )
    # An array of jax holds no strings, and a traced one has no values for numpy.
    if not isinstance(value, jax.Array) and np.asarray(value).dtype.kind in "OSU":
        raise TypeError(
            f"Feature {key!r} holds strings, or objects, which no compiled program does. Turn strings into integers in "
            "input_fn: `features = est.feature_column.encode(features, columns)`; write `.astype(np.int32)` for "
            "integers in an array of objects."
        )
    value = jnp.asarray(value)
    if not value.ndim:
        raise ValueError(f"Feature {key!r} is a scalar; it needs a batch dimension.")
    return value


def integers(features: Mapping[Any, Any], key: str) -> jax.Array:
    """The feature as int32 of shape `(batch, k)`."""
    value = feature(features, key)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"A categorical column needs integers; feature {key!r} is {value.dtype}. Write `.astype(np.int32)`, or cut "
            "numbers into classes by `est.feature_column.bucketized_column`."
        )
    if value.ndim > 2:
        raise ValueError(f"A categorical column takes shape (batch,) or (batch, k); feature {key!r} has {value.shape}.")
    # jax has no int64 without x64; ids that do not fit in int32 are an error when a batch is read.
    return (value[:, None] if value.ndim == 1 else value).astype(jnp.int32)


def in_range(values: jax.Array, num_buckets: int, default_value: int | None) -> jax.Array:
    # -1 stands for the absence of a class and does not change. An invalid id becomes `num_buckets`, which makes its row
    # NaN: a compiled program cannot raise an error.
    unknown = (values < -1) | (values >= num_buckets)
    return jnp.where(unknown, num_buckets if default_value is None else default_value, values)
