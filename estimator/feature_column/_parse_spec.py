"""The features of `tf.Example`s that feature columns read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from estimator.feature_column._column import CategoricalColumn, SequenceCategoricalColumn, as_columns
from estimator.io._features import Config, FixedLenFeature


def make_parse_example_spec(feature_columns: Iterable[Any]) -> dict[str, Config]:
    """The features that columns read, as `est.io.parse_example` and `est.inputs.tfrecord_input_fn` take them.

    >>> from estimator.feature_column import categorical_column_with_identity, indicator_column, numeric_column
    >>> make_parse_example_spec([numeric_column("x"), indicator_column(categorical_column_with_identity("id", 5))])
    {'x': FixedLenFeature(shape=(1,), dtype=<class 'numpy.float32'>, default_value=None),
     'id': VarLenFeature(dtype=<class 'numpy.int64'>)}

    Args:
      feature_columns: feature columns.

    Raises:
      ValueError: two columns read a feature in different ways, or an item is not a column.
    """
    features: dict[str, Config] = {}
    for column in as_columns(feature_columns):
        for key, config in column.example_features().items():
            if features.setdefault(key, config) != config:
                raise ValueError(
                    f"feature_columns contain different parse_spec for key {key}. Given {features[key]} and {config}."
                )
    return features


def features_of_one_width(feature_columns: Iterable[Any]) -> set[str]:
    """The features whose number of values per example is their own: the ones without weights and sequences."""
    alone: set[str] = set()
    together: set[str] = set()
    for column in as_columns(feature_columns):
        inner = column if isinstance(column, CategoricalColumn) else getattr(column, "categorical_column", None)
        is_alone = isinstance(inner, CategoricalColumn) and not inner.is_weighted
        is_alone = is_alone and not isinstance(inner, SequenceCategoricalColumn)
        (alone if is_alone else together).update(column.example_features())
    return alone - together


def classifier_parse_example_spec(
    feature_columns: Iterable[Any],
    label_key: str,
    label_dtype: Any = np.int64,
    label_default: Any = None,
    weight_column: str | None = None,
) -> dict[str, Config]:
    """The features that a canned classifier reads, its labels and weights included.

    Args:
      feature_columns: feature columns.
      label_key: the feature that is the label.
      label_dtype: `np.int64`, or `str` for a classifier with a `label_vocabulary`.
      label_default: the label of examples without one; if None, such an example is an error.
      weight_column: the feature that has the weights of examples, as the classifier has it.

    Raises:
      ValueError: as `make_parse_example_spec` does, or the label is also a feature.
    """
    return _with_label(feature_columns, label_key, FixedLenFeature([1], label_dtype, label_default), weight_column)


def regressor_parse_example_spec(
    feature_columns: Iterable[Any],
    label_key: str,
    label_dtype: Any = np.float32,
    label_default: Any = None,
    label_dimension: int = 1,
    weight_column: str | None = None,
) -> dict[str, Config]:
    """The features that a canned regressor reads, its labels and weights included.

    Args:
      label_dimension: the number of values of a label.
      feature_columns, label_key, label_dtype, label_default, weight_column: as for `classifier_parse_example_spec`.

    Raises:
      ValueError: as `classifier_parse_example_spec` does.
    """
    label = FixedLenFeature([label_dimension], label_dtype, label_default)
    return _with_label(feature_columns, label_key, label, weight_column)


def _with_label(
    feature_columns: Iterable[Any], label_key: str, label: Config, weight_column: str | None
) -> dict[str, Config]:
    features = make_parse_example_spec(feature_columns)
    if label_key in features:
        raise ValueError(f"label should not be used as feature. label_key: {label_key}, features: {[*features]}.")
    if weight_column is not None:
        features.setdefault(weight_column, FixedLenFeature([1], np.float32))
    return {**features, label_key: label}
