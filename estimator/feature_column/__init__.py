"""Feature columns, as in `tf.feature_column`: how a model's input layer reads a dict of features.

Features are arrays of numbers, of shape `(batch,)` or `(batch, k)`, one row per example; categories are integers, -1
for a missing one. A compiled program has no strings: `encode` turns them into integers, in input_fn.

>>> import estimator as est, jax, numpy as np
>>> fc = est.feature_column
>>> color = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])
>>> columns = [fc.numeric_column("size"), fc.indicator_column(color)]
>>> features = {"size": np.array([1.5, 2.5]), "color": np.array(["green", "blue"])}
>>> features = fc.encode(features, columns)
>>> features["color"]
array([         1, 4294967295], dtype=uint32)
>>> print(fc.input_layer(features, columns))
[[0.  1.  1.5]
 [0.  0.  2.5]]
"""

from typing import TYPE_CHECKING

from estimator.feature_column._categorical import (
    bucketized_column,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    crossed_column,
)
from estimator.feature_column._dense import indicator_column, numeric_column
from estimator.feature_column._embedding import embedding_column, shared_embedding_columns
from estimator.feature_column._encode import encode, encode_labels
from estimator.feature_column._layers import input_layer, linear_model
from estimator.feature_column._parse_spec import (
    classifier_parse_example_spec,
    make_parse_example_spec,
    regressor_parse_example_spec,
)
from estimator.feature_column._sequence import (
    sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list,
    sequence_input_layer,
    sequence_numeric_column,
)
from estimator.feature_column._vocabulary import (
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)
from estimator.feature_column._weighted import weighted_categorical_column
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = [
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "classifier_parse_example_spec",
    "crossed_column",
    "embedding_column",
    "encode",
    "encode_labels",
    "indicator_column",
    "input_layer",
    "linear_model",
    "make_parse_example_spec",
    "numeric_column",
    "regressor_parse_example_spec",
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "sequence_input_layer",
    "sequence_numeric_column",
    "shared_embedding_columns",
    "weighted_categorical_column",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__)
