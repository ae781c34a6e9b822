"""Dense columns: numbers and one-hot vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from estimator.feature_column._column import (
    CategoricalColumn,
    DenseColumn,
    InputColumn,
    SequenceDenseColumn,
    check_categorical,
    check_key,
    check_positive,
    check_single,
    feature,
    sequence_of,
)
from estimator.io._features import Config, FixedLenFeature


@dataclasses.dataclass(frozen=True)
class NumericArgs(InputColumn):
    """The arguments of a column of numbers, checked by `of`."""

    key: str
    shape: tuple[int, ...]
    default_value: float | np.number | None
    dtype: Any
    normalizer_fn: Callable[[jax.Array], jax.Array] | None

    @classmethod
    def of(cls, caller: str, key: Any, shape: Any, default_value: Any, dtype: Any, normalizer_fn: Any) -> Self:
        check_key(caller, key)
        shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        for size in shape:
            check_positive(caller, "shape", size)
        check_numeric(caller, key, dtype)
        if default_value is not None and not isinstance(default_value, int | float | np.number):
            raise TypeError(f"`{caller}`: default_value must be a number or None; got {default_value!r}.")
        if normalizer_fn is not None and not callable(normalizer_fn):
            raise TypeError(f"`{caller}`: normalizer_fn must be a callable; got {normalizer_fn!r}.")
        return cls(key, shape, default_value, dtype, normalizer_fn)

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def example_dtype(self) -> Any:
        """The kind of its numbers in a `tf.Example`."""
        return np.int64 if jnp.issubdtype(self.dtype, jnp.integer) else np.float32

    def normalize(self, kind: str, values: jax.Array) -> jax.Array:
        """Applies the normalizer_fn, if there is one; `kind` is for an error."""
        if self.normalizer_fn is None:
            return values
        # The user's function may return arrays of numpy, or another shape.
        new = jnp.asarray(self.normalizer_fn(values))
        if new.shape != values.shape:
            raise ValueError(
                f"The normalizer_fn of the {kind} {self.key!r} must keep the shape, {values.shape}; it returned "
                f"{new.shape}."
            )
        return new


class NumericColumn(NumericArgs, DenseColumn):
    def example_features(self) -> dict[str, Config]:
        return {self.key: FixedLenFeature(self.shape, self.example_dtype, self.default_value)}

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        array = feature(features, self.key)
        expected = (array.shape[0], *self.shape)
        if array.shape != expected and not (self.shape == (1,) and array.ndim == 1):
            raise ValueError(
                f"The numeric column {self.key!r} has shape {self.shape}, so its feature needs shape {expected}; it "
                f"has {array.shape}. Write `numeric_column({self.key!r}, shape={array.shape[1:] or (1,)})`."
            )
        values = array.reshape(expected).astype(self.dtype)
        # NaN, which only floats have, stands for a missing number. It is replaced before the normalizer: TensorFlow
        # uses the default when it parses examples.
        if self.default_value is not None and jnp.issubdtype(values.dtype, jnp.floating):
            values = jnp.where(jnp.isnan(values), jnp.asarray(self.default_value, values.dtype), values)
        values = self.normalize("numeric column", values)
        return values.reshape(array.shape[0], self.width).astype(jnp.float32)


def numeric_column(
    key: str,
    shape: int | tuple[int, ...] = (1,),
    default_value: float | None = None,
    dtype: Any = jnp.float32,
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None,
) -> NumericColumn:
    """A column of numbers.

    >>> import numpy as np
    >>> age = numeric_column("age", default_value=40.0, normalizer_fn=lambda x: (x - 40) / 10)
    >>> print(age.values({"age": np.array([30.0, np.nan])}))
    [[-1.]
     [ 0.]]

    Args:
      key: the feature.
      shape: the shape of an example; the feature has shape `(batch, *shape)`, or also `(batch,)` if it is `(1,)`.
      default_value: replaces NaN, that is, missing numbers; if None, NaN stays. (In TensorFlow it replaces features
        that a parsed example lacks.)
      dtype: the dtype of the argument of `normalizer_fn`.
      normalizer_fn: function of the feature, shape `(batch, *shape)`, that keeps the shape.
    """
    return NumericColumn.of("numeric_column", key, shape, default_value, dtype, normalizer_fn)


def check_numeric(caller: str, key: str, dtype: Any) -> None:
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(f"`{caller}`: dtype must be convertible to float; got {dtype!r} for key {key!r}.")


@dataclasses.dataclass(frozen=True)
class IndicatorColumn(DenseColumn, SequenceDenseColumn):
    categorical_column: CategoricalColumn

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical_column.num_buckets

    def example_features(self) -> dict[str, Config]:
        return self.categorical_column.example_features()

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        check_single("input_layer", self)
        return many_hot(self.categorical_column.ids(features), self.width, self.categorical_column.weights(features))

    def sequence_values(self, features: Mapping[Any, Any]) -> tuple[jax.Array, jax.Array]:
        column = sequence_of(self)
        return many_hot(column.ids(features)[..., None], self.width), column.lengths(features)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """A column that counts how often an example has each class: one-hot if it has one class.

    Args:
      categorical_column: the column of classes; an invalid id makes the row NaN. Of a weighted column it is the sum of
        the weights of each class. Of a column of sequences, it is a column for `sequence_input_layer`, one-hot in each
        step.
    """
    check_categorical("indicator_column", categorical_column)
    return IndicatorColumn(categorical_column)


def many_hot(ids: jax.Array, num_buckets: int, weights: jax.Array | None = None) -> jax.Array:
    """The classes in the last dimension of the ids, added up."""
    # `one_hot` gives zeros for ids out of range: padding, and invalid ids, which become NaN below.
    classes = jax.nn.one_hot(ids, num_buckets, dtype=jnp.float32)
    # The weight of padding may be anything, also NaN, and zero times NaN is NaN.
    counts = (classes if weights is None else classes * jnp.where(ids < 0, 0, weights)[..., None]).sum(axis=-2)
    unknown = (ids >= num_buckets).any(axis=-1, keepdims=True)
    return jnp.where(unknown, jnp.nan, counts)
