"""Dense columns: numbers, one-hot vectors and embeddings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._variable_scope import variable_scope
from estimator.core._variables import get_variable
from estimator.feature_column._column import CategoricalColumn, DenseColumn, check_key, check_positive, feature
from estimator.sparse._embedding import embedding_lookup

COMBINERS = ("mean", "sqrtn", "sum")
_FEW_ROWS = 1024  # With fewer rows a sparse update saves little, and XLA takes half a second to compile it.


@dataclasses.dataclass(frozen=True)
class NumericColumn(DenseColumn):
    key: str
    shape: tuple[int, ...]
    default_value: float | None
    dtype: Any
    normalizer_fn: Callable[[jax.Array], jax.Array] | None

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        array = feature(features, self.key)
        expected = (array.shape[0], *self.shape)
        if array.shape != expected and not (self.shape == (1,) and array.ndim == 1):
            raise ValueError(
                f"The numeric column {self.key!r} has shape {self.shape}, so its feature needs shape {expected}; it "
                f"has {array.shape}. Write `numeric_column({self.key!r}, shape={array.shape[1:] or (1,)})`."
            )
        values = array.reshape(expected).astype(self.dtype)
        if self.default_value is not None and jnp.issubdtype(values.dtype, jnp.floating):
            values = jnp.where(jnp.isnan(values), jnp.asarray(self.default_value, values.dtype), values)
        if self.normalizer_fn is not None:
            values = jnp.asarray(self.normalizer_fn(values))
            if values.shape != expected:
                raise ValueError(
                    f"The normalizer_fn of the numeric column {self.key!r} must keep the shape, {expected}; it "
                    f"returned {values.shape}."
                )
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
      default_value: replaces NaN, that is, missing numbers; None: NaN stays. (In TensorFlow it replaces features that
        a parsed example lacks.)
      dtype: the dtype of the argument of `normalizer_fn`.
      normalizer_fn: function of the feature, shape `(batch, *shape)`, that keeps the shape.
    """
    check_key("numeric_column", key)
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    for size in shape:
        check_positive("numeric_column", "shape", size)
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(f"`numeric_column`: dtype must be convertible to float; got {dtype!r} for key {key!r}.")
    if default_value is not None and not isinstance(default_value, int | float | np.number):
        raise TypeError(f"`numeric_column`: default_value must be a number or None; got {default_value!r}.")
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise TypeError(f"`numeric_column`: normalizer_fn must be a callable; got {normalizer_fn!r}.")
    return NumericColumn(key, shape, default_value, dtype, normalizer_fn)


@dataclasses.dataclass(frozen=True)
class IndicatorColumn(DenseColumn):
    categorical_column: CategoricalColumn

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical_column.num_buckets

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        return many_hot(self.categorical_column.ids(features), self.width)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """A column that counts how often an example has each class: one-hot if it has one class.

    Args:
      categorical_column: the column of classes; an invalid id makes the row NaN.
    """
    _check_categorical("indicator_column", categorical_column)
    return IndicatorColumn(categorical_column)


@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(DenseColumn):
    categorical_column: CategoricalColumn
    dimension: int
    combiner: str
    initializer: Any

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_embedding"

    @property
    def width(self) -> int:
        return self.dimension

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        ids = self.categorical_column.ids(features)
        shape = (self.categorical_column.num_buckets, self.dimension)
        initializer = self.initializer or jax.nn.initializers.truncated_normal(1 / math.sqrt(self.dimension))
        with variable_scope(f"input_layer/{self.name}"):
            rows = rows_of("embedding_weights", ids, shape, initializer)
        return combined(rows, ids, self.combiner)


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Callable[..., jax.Array] | None = None,
) -> EmbeddingColumn:
    """A column that has a trained vector for each class.

    With more than 1024 classes the gradient is sparse: see `est.embedding_lookup`.

    Args:
      categorical_column: the column of classes; an invalid id makes the row NaN.
      dimension: the length of a vector.
      combiner: how the vectors of an example with several classes are combined: their "mean", their "sum", or, for
        "sqrtn", the sum divided by the square root of their number. Without a class the result is zero.
      initializer: `fn(key, shape, dtype)`; by default, as in TensorFlow, truncated normal of deviation
        `1 / sqrt(dimension)`.
    """
    _check_categorical("embedding_column", categorical_column)
    check_positive("embedding_column", "dimension", dimension)
    check_combiner("embedding_column", "combiner", combiner)
    if initializer is not None and not callable(initializer):
        raise TypeError(
            "`embedding_column`: initializer must be a function such as `jax.nn.initializers.normal()`; got "
            f"{initializer!r}."
        )
    return EmbeddingColumn(categorical_column, dimension, combiner, initializer)


def check_combiner(caller: str, name: str, combiner: Any) -> None:
    if combiner not in COMBINERS:
        raise ValueError(f"`{caller}`: {name} must be one of {COMBINERS}; got {combiner!r}.")


def rows_of(name: str, ids: jax.Array, shape: tuple[int, int], initializer: Any) -> jax.Array:
    """Rows of a variable, `(batch, k, width)`; a large variable has a sparse gradient."""
    if shape[0] <= _FEW_ROWS:
        get_variable(name, shape, initializer=initializer)  # reading all of it makes the gradient dense
    return embedding_lookup(name, ids, shape, initializer=initializer)


def combined(rows: jax.Array, ids: jax.Array, combiner: str) -> jax.Array:
    """Combines rows of shape `(batch, k, d)`, zeros where an id is -1, to shape `(batch, d)`."""
    total = rows.sum(axis=1)
    if combiner == "sum":
        return total
    count = jnp.maximum((ids >= 0).sum(axis=1, keepdims=True), 1).astype(total.dtype)
    return total / (count if combiner == "mean" else jnp.sqrt(count))


def many_hot(ids: jax.Array, num_buckets: int) -> jax.Array:
    counts = jax.nn.one_hot(ids, num_buckets, dtype=jnp.float32).sum(axis=1)
    unknown = (ids >= num_buckets).any(axis=1, keepdims=True)
    return jnp.where(unknown, jnp.nan, counts)


def _check_categorical(caller: str, column: Any) -> None:
    if not isinstance(column, CategoricalColumn):
        raise TypeError(
            f"`{caller}` takes a categorical column, such as `categorical_column_with_identity(key, num_buckets)`; "
            f"got {column!r}."
        )
