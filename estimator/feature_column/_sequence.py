"""Columns of sequences, and the layer that reads them: the input of a recurrent network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator.feature_column._categorical import categorical_column_with_hash_bucket, categorical_column_with_identity
from estimator.feature_column._column import (
    Coder,
    KeyColumn,
    SequenceCategoricalColumn,
    SequenceDenseColumn,
    check_features,
    feature,
    integers,
    sequence_of,
)
from estimator.feature_column._dense import NumericArgs
from estimator.feature_column._layers import named_columns, scope
from estimator.feature_column._vocabulary import (
    VocabularyColumn,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)
from estimator.io._features import Config, VarLenFeature

UNLISTED = -2  # the code of a string without a class, which is a step of its sequence; -1 is padding


@dataclasses.dataclass(frozen=True)
class StepCoder:
    """Tells strings that have no class from missing ones."""

    coder: Coder

    def code(self, text: str) -> int:
        code = self.coder.code(text)
        return UNLISTED if code == -1 else code


@dataclasses.dataclass(frozen=True)
class SequenceColumn(SequenceCategoricalColumn):
    categorical_column: KeyColumn

    @property
    def name(self) -> str:
        return self.categorical_column.name

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def ids(self, features: Mapping[Any, Any]) -> jax.Array:
        key = self.categorical_column.key
        steps = self._steps(features)
        # Such a string counts as a step in the length; for the wrapped column it has no class.
        if self._has_unlisted:
            steps = jnp.where(steps == UNLISTED, -1, steps).astype(feature(features, key).dtype)
        return self.categorical_column.ids({key: steps})

    def lengths(self, features: Mapping[Any, Any]) -> jax.Array:
        return _last_step(self._steps(features) != -1)

    def coders(self) -> dict[str, Coder]:
        coders = self.categorical_column.coders()
        return {key: StepCoder(coder) for key, coder in coders.items()} if self._has_unlisted else coders

    def example_features(self) -> dict[str, Config]:
        return self.categorical_column.example_features()

    @property
    def _has_unlisted(self) -> bool:
        column = self.categorical_column
        return isinstance(column, VocabularyColumn) and column.of_strings

    def _steps(self, features: Mapping[Any, Any]) -> jax.Array:
        key = self.categorical_column.key
        if feature(features, key).ndim != 2:
            raise ValueError(
                f"A column of sequences takes shape (batch, steps); feature {key!r} has {features[key].shape}. Fill "
                "sequences up to one length, by `est.inputs.pad_batches` for example."
            )
        return integers(features, key)


def sequence_categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> SequenceColumn:
    """A column of sequences of ids; wrap it in an `embedding_column` or `indicator_column`.

    Args:
      key: the feature: integers of shape `(batch, steps)`, filled up by -1. A sequence ends with its last integer
        that is not -1.
      num_buckets, default_value: as for `categorical_column_with_identity`.
    """
    return SequenceColumn(categorical_column_with_identity(key, num_buckets, default_value))


def sequence_categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: Any = str) -> SequenceColumn:
    """A column of sequences whose classes are hashes; wrap it in an `embedding_column` or `indicator_column`.

    Args:
      key: the feature: integers of shape `(batch, steps)`, filled up by -1, or strings, filled up by "".
      hash_bucket_size, dtype: as for `categorical_column_with_hash_bucket`.
    """
    return SequenceColumn(categorical_column_with_hash_bucket(key, hash_bucket_size, dtype))


def sequence_categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str] | Sequence[int],
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> SequenceColumn:
    """A column of sequences of listed classes; wrap it in an `embedding_column` or `indicator_column`.

    A string that is not listed is a step of its sequence, as in TensorFlow: `encode` makes -2 of it, if it has no
    class, and -1 of "".

    Args:
      key: the feature: strings of shape `(batch, steps)`, filled up by "", or integers, filled up by -1.
      vocabulary_list, dtype, default_value, num_oov_buckets: as for `categorical_column_with_vocabulary_list`.
    """
    column = categorical_column_with_vocabulary_list(key, vocabulary_list, dtype, default_value, num_oov_buckets)
    return SequenceColumn(column)


def sequence_categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = str,
) -> SequenceColumn:
    """A column of sequences whose classes are the lines of a file.

    A string that is not in the file is a step of its sequence; see `sequence_categorical_column_with_vocabulary_list`.

    Args:
      key: the feature: strings of shape `(batch, steps)`, filled up by "", or integers, filled up by -1.
      vocabulary_file, vocabulary_size, num_oov_buckets, default_value, dtype: as for
        `categorical_column_with_vocabulary_file`.
    """
    return SequenceColumn(
        categorical_column_with_vocabulary_file(
            key, vocabulary_file, vocabulary_size, num_oov_buckets, default_value, dtype
        )
    )


class SequenceNumericColumn(NumericArgs, SequenceDenseColumn):
    def example_features(self) -> dict[str, Config]:
        return {self.key: VarLenFeature(self.example_dtype)}

    def sequence_values(self, features: Mapping[Any, Any]) -> tuple[jax.Array, jax.Array]:
        array = feature(features, self.key)
        expected = (*array.shape[:2], *self.shape)
        if array.ndim < 2 or (array.shape != expected and not (self.shape == (1,) and array.ndim == 2)):
            raise ValueError(
                f"The sequence numeric column {self.key!r} has shape {self.shape}, so its feature needs shape (batch, "
                f"steps, {', '.join(map(str, self.shape))}); it has {array.shape}."
            )
        array = array.reshape(expected)
        # NaN pads a sequence of floats. Integers have no NaN: all their steps count.
        missing = jnp.isnan(array) if jnp.issubdtype(array.dtype, jnp.floating) else jnp.zeros(array.shape, bool)
        default = jnp.asarray(self.default_value, self.dtype)
        # NaN has no value in an integer dtype: it is replaced before the cast.
        numbers = jnp.where(missing, default, jnp.where(missing, 0, array).astype(self.dtype))
        values = self.normalize("sequence numeric column", numbers)
        # Again after the normalizer: TensorFlow pads after normalizing, so that padding is `default_value` itself.
        values = jnp.where(missing, default.astype(values.dtype), values)
        there = ~missing.reshape(*array.shape[:2], self.width).all(axis=-1)
        return values.reshape(*array.shape[:2], self.width).astype(jnp.float32), _last_step(there)


def sequence_numeric_column(
    key: str,
    shape: int | tuple[int, ...] = (1,),
    default_value: float = 0.0,
    dtype: Any = jnp.float32,
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None,
) -> SequenceNumericColumn:
    """A column of sequences of numbers.

    Args:
      key: the feature: numbers of shape `(batch, steps, *shape)`, or also `(batch, steps)` if the shape is `(1,)`,
        filled up by NaN. A sequence ends with its last number; integers have no NaN, so all steps of them count.
      shape: of the numbers of a step.
      default_value: what padding, or a number that is missing within the sequence, becomes. As in TensorFlow, it is
        not normalized.
      dtype: the dtype of the argument of `normalizer_fn`.
      normalizer_fn: function of the feature, shape `(batch, steps, *shape)`, that keeps the shape.
    """
    if default_value is None:
        raise TypeError("`sequence_numeric_column`: default_value must be a number; got None.")
    return SequenceNumericColumn.of("sequence_numeric_column", key, shape, default_value, dtype, normalizer_fn)


def sequence_input_layer(
    features: Mapping[Any, Any], feature_columns: Iterable[SequenceDenseColumn]
) -> tuple[jax.Array, jax.Array]:
    """Concatenates columns of sequences, in the order of their names: what a recurrent network takes.

    >>> import estimator as est, numpy as np
    >>> fc = est.feature_column
    >>> colors = fc.sequence_categorical_column_with_vocabulary_list("colors", ["red", "green"])
    >>> columns = [fc.indicator_column(colors), fc.sequence_numeric_column("rating")]
    >>> features = {
    ...     "colors": np.array([["red", "green", "red"], ["green", "", ""]]),
    ...     "rating": np.array([[5.0, 3.0, 4.0], [1.0, np.nan, np.nan]], np.float32),
    ... }
    >>> inputs, lengths = fc.sequence_input_layer(fc.encode(features, columns), columns)
    >>> print(inputs[1], lengths)
    [[0. 1. 1.]
     [0. 0. 0.]
     [0. 0. 0.]] [3 1]

    To be called in a model_fn, as `tf.contrib.feature_column.sequence_input_layer`; then
    `est.layers.lstm(inputs, units, sequence_length=lengths)`. Embedding columns create their variables,
    sequence_input_layer/<name>/embedding_weights.

    Args:
      features: the features of the batch. The features of all columns have the same number of steps; see
        `est.inputs.pad_batches`, with `values={"colors": "", "rating": np.nan}` before `encode`.
      feature_columns: `sequence_numeric_column`s, and embedding and indicator columns of a
        `sequence_categorical_column_with_*`.

    Returns:
      The input, float32 of shape `(batch, steps, width)`, and the lengths of the sequences, int32 of shape `(batch,)`.
      The input of an example whose features differ in their lengths is NaN, where TensorFlow raised an error.

    Raises:
      ValueError: there are no columns, one is not of sequences, two have the same name, features differ in their number
        of steps, or one is missing.
      TypeError: a feature is not of its column's kind.
    """
    columns = named_columns(feature_columns)
    for column in columns:
        if not isinstance(column, SequenceDenseColumn):
            raise ValueError(
                "`sequence_input_layer` takes columns of sequences; wrap a `sequence_categorical_column_with_*` with "
                f"`embedding_column` or `indicator_column`. Given: {column!r}."
            )
        # Embeddings and indicators are columns of sequences only if they wrap one.
        if hasattr(column, "categorical_column"):
            sequence_of(column)
    check_features(features)
    values, lengths = [], []
    with scope(None, "sequence_input_layer"):
        for column in columns:
            with scope(column.scope_name):
                value, length = column.sequence_values(features)
            values.append(value)
            lengths.append(length)
    steps = {column.name: value.shape[1] for column, value in zip(columns, values, strict=True)}
    if len({*steps.values()}) > 1:
        raise ValueError(
            f"The features of `sequence_input_layer` must have the same number of steps; those of its columns have "
            f"{steps}. Fill them up to one length."
        )
    together = jnp.concatenate(values, axis=-1)
    if len(columns) > 1:
        # TensorFlow asserts that all columns have the same lengths; here examples whose lengths differ become NaN.
        agree = jnp.stack([length == lengths[0] for length in lengths]).all(axis=0)
        together = jnp.where(agree[:, None, None], together, jnp.nan)
    return together, lengths[0]


def _last_step(there: jax.Array) -> jax.Array:
    """The number of steps up to the last one that is there, of a mask of shape `(batch, steps)`."""
    # Up to the last step, so that a missing step before it does not shorten the sequence.
    numbers = jnp.arange(1, there.shape[1] + 1, dtype=jnp.int32)
    return jnp.where(there, numbers, 0).max(axis=1, initial=0)
