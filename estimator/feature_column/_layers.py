"""The first layer of a model over feature columns: their concatenation, or their weighted sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._frame import innermost_frame
from estimator.feature_column._column import CategoricalColumn, DenseColumn, as_columns, check_features, check_single
from estimator.feature_column._embedding import look_up_combined
from estimator.sparse._embedding_sparse import check_combiner
from estimator.variables._variable_scope import variable_scope
from estimator.variables._variables import get_variable


def input_layer(features: Mapping[Any, Any], feature_columns: Iterable[DenseColumn]) -> jax.Array:
    """Concatenates all columns, in the order of their names: float32 of shape `(batch, width)`.

    To be called in a model_fn; embedding columns create their variables, input_layer/<name>/embedding_weights. A second
    call in the same scope creates them in input_layer_1; to share them, open that scope again with reuse.

    Args:
      features: the features of the batch.
      feature_columns: numeric, bucketized, indicator and embedding columns.

    Raises:
      ValueError: there are no columns, one is categorical, two have the same name, or a feature is missing.
      TypeError: a feature is not of its column's kind.
    """
    columns = checked_dense(feature_columns)
    check_features(features)
    values = []
    with scope(None, "input_layer"):
        for column in columns:
            # As in TensorFlow, each column has a scope; the outer scope is made unique for a second layer.
            with scope(column.scope_name):
                values.append(column.values(features))
    return jnp.concatenate(values, axis=-1)


def linear_model(
    features: Mapping[Any, Any],
    feature_columns: Iterable[DenseColumn | CategoricalColumn],
    units: int = 1,
    sparse_combiner: str = "sum",
) -> jax.Array:
    """A weighted sum of all columns, with a bias: float32 of shape `(batch, units)`.

    To be called in a model_fn; the weights, linear_model/<name>/weights and linear_model/bias_weights, are initially
    zero. A second call in the same scope creates them in linear_model_1. A categorical column has a weight per class;
    with more than 1024 classes the gradient is sparse.

    Args:
      features: the features of the batch.
      feature_columns: columns of any kind.
      units: the number of sums.
      sparse_combiner: how the weights of several classes of an example are combined: "sum", "mean" or "sqrtn".

    Raises:
      ValueError, TypeError: as for `input_layer`.
    """
    columns = checked_columns(feature_columns)
    check_combiner("linear_model", "sparse_combiner", sparse_combiner)
    check_features(features)
    zeros = jax.nn.initializers.zeros
    terms, values, weights = [], [], []
    with variable_scope(None, "linear_model"):
        for column in columns:
            with _scope_of_weights(column):
                # A bucketized column is categorical and dense: as in TensorFlow it looks up rows here, instead of a
                # product with zeros and ones.
                if isinstance(column, CategoricalColumn):
                    ids, own, shape = column.ids(features), column.weights(features), (column.num_buckets, units)
                    terms.append(look_up_combined("weights", ids, own, shape, zeros, sparse_combiner))
                else:
                    values.append(column.values(features))
                    weights.append(get_variable("weights", (column.width, units), initializer=zeros))
        if values:  # one product: XLA takes ten times as long to compile a hundred
            terms.append(jnp.concatenate(values, axis=-1) @ jnp.concatenate(weights))
        return sum(terms[1:], terms[0]) + get_variable("bias_weights", (units,), initializer=zeros)


def scope(name: str | None, default_name: str | None = None) -> AbstractContextManager[Any]:
    """A scope for variables; columns without variables need no model_fn."""
    return nullcontext() if innermost_frame() is None else variable_scope(name, default_name)


def _scope_of_weights(column: DenseColumn | CategoricalColumn) -> AbstractContextManager[Any]:
    """The scope of a column's weights. The columns of a shared embedding have one name, which is made unique."""
    if isinstance(column, DenseColumn) and column.scope_name != column.name:
        return variable_scope(None, default_name=column.scope_name)
    return variable_scope(column.name)


def checked_dense(feature_columns: Any) -> list[DenseColumn]:
    columns = checked_columns(feature_columns)
    for column in columns:
        if not isinstance(column, DenseColumn):
            raise ValueError(
                f"Items of feature_columns must be dense columns. Given: {column!r}. Wrap a categorical column with "
                "`embedding_column` or `indicator_column`."
            )
    return columns


def checked_columns(feature_columns: Any) -> list[Any]:
    columns = named_columns(feature_columns)
    for column in columns:
        check_single("input_layer` or `linear_model", column)
    return columns


def named_columns(feature_columns: Any) -> list[Any]:
    """Columns of any kind in the order of their names."""
    columns = as_columns(feature_columns)
    if not columns:
        raise ValueError(f"feature_columns must not be empty; got {feature_columns!r}.")
    # As in TensorFlow: the rows of a kernel after the layer do not depend on the order of the list.
    columns.sort(key=lambda column: column.name)
    for first, second in zip(columns, columns[1:], strict=False):
        if first.name == second.name:
            raise ValueError(f"Duplicate feature column name found for columns: {first} and {second}.")
    return columns
