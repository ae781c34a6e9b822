"""The bases of columns, and how a column reads its feature."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._bcoo import is_sparse
from estimator.core._typing import Features


class Coder(Protocol):
    """Maps a string to an integer, -1 for no class; equal encoders map alike."""

    def code(self, text: str) -> int: ...


class DenseColumn(abc.ABC):
    """A column for an input layer.

    Attributes:
      name: part of the names of its variables; columns are ordered by it.
      width: the number of values per example.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def width(self) -> int: ...

    @abc.abstractmethod
    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        """Float32 of shape `(batch, width)`."""


class CategoricalColumn(abc.ABC):
    """A categorical column.

    Attributes:
      name: part of the names of its variables.
      num_buckets: the number of classes.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int: ...

    @abc.abstractmethod
    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        """Int32 of shape `(batch, k)`: -1 for no class, and `num_buckets` for an invalid id, which becomes NaN."""

    def coders(self) -> dict[str, Coder]:
        """The encoders of strings by feature; features of numbers have none."""
        return {}


def check_key(caller: str, key: Any) -> None:
    if not isinstance(key, str) or not key:
        raise ValueError(f"`{caller}` needs the name of a feature, a non-empty string, as key; got {key!r}.")


def check_positive(caller: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{caller}`: {name} must be an int of at least 1; got {value!r}.")


def check_features(features: Features) -> None:
    if not isinstance(features, Mapping):
        raise ValueError(
            "features should be a dictionary of arrays by the keys of the feature columns. Given type: "
            f"{type(features).__name__}. Let input_fn return `{{'x': features}}`."
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
    if not isinstance(value, jax.Array) and np.asarray(value).dtype.kind in "OSU":
        raise TypeError(
            f"Feature {key!r} holds strings, which no compiled program does. Turn them into integers in input_fn: "
            "`features = est.feature_column.encode(features, columns)`."
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
    return (value[:, None] if value.ndim == 1 else value).astype(jnp.int32)
