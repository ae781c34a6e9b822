"""Categorical columns whose classes have weights, given by another feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.feature_column._column import (
    CategoricalColumn,
    Coder,
    check_categorical,
    check_key,
    check_single,
    feature,
)
from estimator.feature_column._dense import check_numeric
from estimator.io._features import Config, VarLenFeature


@dataclasses.dataclass(frozen=True)
class WeightedColumn(CategoricalColumn):
    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: Any

    is_weighted = True

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        return self.categorical_column.ids(features)

    def weights(self, features: Mapping[Any, Any]) -> jax.Array:
        weights = feature(features, self.weight_feature_key)
        check_numeric("weighted_categorical_column", self.weight_feature_key, weights.dtype)
        weights = weights[:, None] if weights.ndim == 1 else weights
        # Only for the shape: XLA removes this second computation of the ids.
        expected = self.ids(features).shape
        if weights.shape != expected:
            raise ValueError(
                f"Feature {self.weight_feature_key!r} must have a weight for each class of the column "
                f"{self.categorical_column.name!r}, shape {expected}; it has {weights.shape}."
            )
        # Cast to the dtype of the column first: TensorFlow parses weights in it.
        return weights.astype(self.dtype).astype(jnp.float32)

    def coders(self) -> dict[str, Coder]:
        return self.categorical_column.coders()

    def example_features(self) -> dict[str, Config]:
        return {**self.categorical_column.example_features(), self.weight_feature_key: VarLenFeature(np.float32)}


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = jnp.float32
) -> WeightedColumn:
    """A categorical column whose classes have weights, such as how often a word is in a text.

    >>> import estimator as est, numpy as np
    >>> fc = est.feature_column
    >>> words = fc.categorical_column_with_vocabulary_list("words", ["good", "bad"])
    >>> columns = [fc.indicator_column(fc.weighted_categorical_column(words, "counts"))]
    >>> features = {"words": np.array([["good", "bad"], ["bad", ""]]), "counts": np.array([[2.0, 1.0], [4.0, 0.0]])}
    >>> print(fc.input_layer(fc.encode(features, columns), columns))
    [[2. 1.]
     [0. 4.]]

    An `embedding_column` weights its vectors, an `indicator_column` has the weights instead of ones, a `linear_model`
    multiplies the weights of the model by them.

    Args:
      categorical_column: the classes.
      weight_feature_key: the feature with a weight for each class, an array of the shape of the classes.
      dtype: as which the weights are read.
    """
    caller = "weighted_categorical_column"
    check_categorical(caller, categorical_column)
    check_single(caller, categorical_column)
    check_key(caller, weight_feature_key)
    check_numeric(caller, weight_feature_key, dtype)
    return WeightedColumn(categorical_column, weight_feature_key, dtype)
