"""Dense columns that have a trained vector for each class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._frame import run_store
from estimator.feature_column._column import (
    CategoricalColumn,
    DenseColumn,
    SequenceCategoricalColumn,
    SequenceDenseColumn,
    check_categorical,
    check_positive,
    check_single,
    sequence_of,
)
from estimator.io._features import Config
from estimator.sparse._embedding import embedding_lookup
from estimator.sparse._embedding_sparse import check_combiner, check_max_norm, clip_rows, combine_rows
from estimator.variables._variable_scope import AUTO_REUSE, get_variable_scope, variable_scope
from estimator.variables._variables import get_variable

_FEW_ROWS = 1024  # With fewer rows a sparse update saves little, and XLA takes half a second to compile it.


@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(DenseColumn, SequenceDenseColumn):
    categorical_column: CategoricalColumn
    dimension: int
    combiner: str
    initializer: Any
    max_norm: float | None
    trainable: bool

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_embedding"

    @property
    def width(self) -> int:
        return self.dimension

    def example_features(self) -> dict[str, Config]:
        return self.categorical_column.example_features()

    def values(self, features: Mapping[Any, Any]) -> jax.Array:
        check_single("input_layer", self)
        return self.vectors(self.categorical_column.ids(features), self.categorical_column.weights(features))

    def sequence_values(self, features: Mapping[Any, Any]) -> tuple[jax.Array, jax.Array]:
        column = sequence_of(self)
        return self.vectors(column.ids(features)[..., None], None), column.lengths(features)

    def vectors(self, ids: jax.Array, weights: jax.Array | None) -> jax.Array:
        """The combined vectors of the classes in the last dimension of the ids."""
        shape = (self.categorical_column.num_buckets, self.dimension)
        # TensorFlow's default.
        initializer = self.initializer or jax.nn.initializers.truncated_normal(1 / math.sqrt(self.dimension))
        return look_up_combined(
            "embedding_weights", ids, weights, shape, initializer, self.combiner, self.max_norm, self.trainable
        )


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Callable[..., jax.Array] | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """A column that has a trained vector for each class.

    With more than 1024 classes the gradient is sparse: see `est.embedding_lookup`.

    Args:
      categorical_column: the column of classes; an invalid id makes the row NaN. Of a column of sequences, it is a
        column for `sequence_input_layer`, with a vector in each step.
      dimension: the length of a vector.
      combiner: how the vectors of an example with several classes are combined: their "mean", their "sum", or, for
        "sqrtn", the sum divided by the square root of their number. Without a class the result is zero. Of weighted
        columns, as for `est.embedding_lookup_sparse`; "mean" and "sqrtn" leave out classes whose weight is not above
        zero, as in TensorFlow.
      initializer: `fn(key, shape, dtype)`; by default, as in TensorFlow, truncated normal of deviation
        `1 / sqrt(dimension)`.
      max_norm: vectors of a larger l2 norm are scaled down to it before they are combined; if None, they stay.
      trainable: False: the vectors stay as they are.
    """
    _check("embedding_column", [categorical_column], dimension, combiner, initializer, max_norm)
    return EmbeddingColumn(categorical_column, dimension, combiner, initializer, max_norm, trainable)


@dataclasses.dataclass(frozen=True)
class SharedEmbeddingColumn(EmbeddingColumn):
    collection: str

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_shared_embedding"

    @property
    def scope_name(self) -> str:
        return self.collection

    def vectors(self, ids: jax.Array, weights: jax.Array | None) -> jax.Array:
        # Where the first of the columns is used, the table is created.
        scope = run_store(("feature_column.shared_embedding_columns", self.collection), get_variable_scope)
        with variable_scope(scope, reuse=AUTO_REUSE):
            return super().vectors(ids, weights)


def shared_embedding_columns(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: Callable[..., jax.Array] | None = None,
    shared_embedding_collection_name: str | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[SharedEmbeddingColumn]:
    """Columns that share a trained vector for each class, such as the words of a question and of an answer.

    >>> import estimator as est, jax, numpy as np
    >>> fc = est.feature_column
    >>> watched, best = (fc.categorical_column_with_identity(key, 5) for key in ("watched", "best"))
    >>> columns = fc.shared_embedding_columns([watched, best], 2)
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=fc.input_layer(features, columns))
    >>> features = {"watched": np.array([[1, 2], [3, -1]]), "best": np.array([1, 3])}
    >>> state = est.transform(model_fn).init(jax.random.key(0), features, mode="infer")
    >>> {name: value.shape for name, value in state.variables.items()}
    {'input_layer/best_watched_shared_embedding/embedding_weights': (5, 2)}

    Args:
      categorical_columns: columns of one kind with the same number of classes, weighted or not, or all of sequences.
      dimension, combiner, initializer, max_norm, trainable: as for `embedding_column`.
      shared_embedding_collection_name: the scope of the variable. By default, as in TensorFlow, the names of the
        columns, in order, and "shared_embedding", joined by "_". Columns of one name share the vectors in a run.

    Returns:
      A dense column for each categorical column, in their order.
    """
    caller = "shared_embedding_columns"
    if not isinstance(categorical_columns, list | tuple) or not categorical_columns:
        raise ValueError(f"`{caller}`: categorical_columns must be a list of columns; got {categorical_columns!r}.")
    _check(caller, categorical_columns, dimension, combiner, initializer, max_norm)
    # Only for the default name, which in TensorFlow is made of the sorted names; the result is in the order of the
    # arguments.
    columns = sorted(categorical_columns, key=lambda column: column.name)
    for column in columns:
        if _kind(column) != _kind(columns[0]) or column.num_buckets != columns[0].num_buckets:
            raise ValueError(
                f"`{caller}`: all categorical_columns must have the same type and the same number of buckets, weighted "
                f"or not; got {columns[0]!r} and {column!r}."
            )
    name = shared_embedding_collection_name or "_".join([column.name for column in columns] + ["shared_embedding"])
    return [
        SharedEmbeddingColumn(column, dimension, combiner, initializer, max_norm, trainable, name)
        for column in categorical_columns
    ]


def look_up_combined(
    name: str,
    ids: jax.Array,
    weights: jax.Array | None,
    shape: tuple[int, int],
    initializer: Any,
    combiner: str,
    max_norm: float | None = None,
    trainable: bool = True,
) -> jax.Array:
    """Rows of a variable, combined over the last dimension of the ids; a large variable has a sparse gradient."""
    if weights is not None and combiner != "sum":
        # As in TensorFlow, ids without a positive weight are left out, except for sums.
        ids = jnp.where(weights > 0, ids, -1)
    if not trainable:
        # Without a gradient a plain lookup is enough.
        table = get_variable(name, shape, initializer=initializer, trainable=False)
        rows = jnp.where(ids[..., None] < 0, 0, table.at[jnp.maximum(ids, 0)].get(mode="fill", fill_value=jnp.nan))
    else:
        if shape[0] <= _FEW_ROWS:
            get_variable(name, shape, initializer=initializer)  # reading all of it makes the gradient dense
        rows = embedding_lookup(name, ids, shape, initializer=initializer)
    return combine_rows(clip_rows(rows, ids.ndim, max_norm), ids, weights, combiner)


def _kind(column: CategoricalColumn) -> tuple[bool, type]:
    """The kind of a column: whether it is of sequences, and its type without weights."""
    return isinstance(column, SequenceCategoricalColumn), type(getattr(column, "categorical_column", column))


def _check(caller: str, columns: Sequence[Any], dimension: Any, combiner: Any, initializer: Any, max_norm: Any) -> None:
    for column in columns:
        check_categorical(caller, column)
    check_positive(caller, "dimension", dimension)
    check_combiner(caller, "combiner", combiner)
    check_max_norm(caller, max_norm)
    if initializer is not None and not callable(initializer):
        raise TypeError(
            f"`{caller}`: initializer must be a function such as `jax.nn.initializers.normal()`; got {initializer!r}."
        )
