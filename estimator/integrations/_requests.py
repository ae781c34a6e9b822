"""The part of a SavedModel that reads requests: features by name, or serialized `tf.Example`s."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from estimator.export._export_model import name_leaves
from estimator.export._serving import ServingInputReceiver
from estimator.feature_column._column import Coder
from estimator.feature_column._sequence import UNLISTED, StepCoder
from estimator.feature_column._vocabulary import VocabularyColumn
from estimator.io._features import Config, FixedLenFeature, VarLenFeature


class Requests:
    """Makes features of a request, in functions of TensorFlow.

    Attributes:
      parses: whether a request has serialized `tf.Example`s, not features.
      tables: the lookup tables of strings, which the module has to have.

    Args:
      tf: TensorFlow.
      receiver: what clients send; if None, the features.
      folder: for vocabulary files, until the SavedModel is written.
    """

    def __init__(self, tf: Any, receiver: ServingInputReceiver | None, folder: str) -> None:
        self._tf, self._folder = tf, folder
        self._rows = None if receiver is None else receiver.batch_size
        self._spec: Mapping[str, Config] = {} if receiver is None or receiver.spec is None else receiver.spec
        self._widths: Mapping[str, str] = {} if receiver is None else receiver.widths
        self._coders: Mapping[str, Coder] = {} if receiver is None else receiver.coders
        self.parses = bool(self._spec)
        self.tables = {key: table for key in self._coders if (table := self._make_table(key)) is not None}

    def inputs(self, features: Any, serialized: str) -> dict[str, Any]:
        """The `tf.TensorSpec`s of a request by name; `serialized` is the name of serialized examples."""
        tf = self._tf
        if self.parses:
            return {serialized: tf.TensorSpec([self._rows], tf.string, name=serialized)}
        dtypes = {
            name: tf.string if key in self._coders else x.dtype for name, (key, x) in _name_inputs(features).items()
        }
        return {
            name: tf.TensorSpec(shape_of(x), dtypes[name], name=name) for name, (_, x) in _name_inputs(features).items()
        }

    def read(self, inputs: Mapping[str, Any], features: Any) -> Any:
        """The features of a request, in the dtypes and containers of `features`."""
        if self.parses:
            (serialized,) = inputs.values()
            return self._parse(serialized, features)
        leaves = [
            self._cast(self._encode(key, inputs[name]), x) if key in self._coders else inputs[name]
            for name, (key, x) in _name_inputs(features).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(features), leaves)

    def _parse(self, serialized: Any, features: Mapping[str, Any]) -> dict[str, Any]:
        # Only those that the program takes: for a part of a model they are fewer.
        spec = {key: self._spec[key] for key in features}
        parsed = self._tf.io.parse_example(serialized, {key: self._config(config) for key, config in spec.items()})
        for key in self._coders.keys() & parsed.keys():
            parsed[key] = self._map_values(lambda x, key=key: self._encode(key, x), parsed[key])
        for key, like in features.items():
            parsed[key] = self._map_values(lambda x, key=key, like=like: self._check(key, x, like), parsed[key])
        arrays = {key: self._as_dense(key, value, parsed) for key, value in parsed.items()}
        return {key: self._cast(arrays[key], like) for key, like in features.items()}

    def _config(self, config: Config) -> Any:
        """The configuration as TensorFlow's."""
        io, kinds = self._tf.io, {"int64_list": np.int64, "float_list": np.float32, "bytes_list": self._tf.string}
        if isinstance(config, VarLenFeature):
            return io.VarLenFeature(kinds[config.kind])
        if isinstance(config, FixedLenFeature):
            return io.FixedLenFeature(config.shape, kinds[config.kind], config.default_value)
        default = config.default_value
        return io.FixedLenSequenceFeature(config.shape, kinds[config.kind], config.allow_missing, default)

    def _map_values(self, function: Any, value: Any) -> Any:
        tf = self._tf
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensor(value.indices, function(value.values), value.dense_shape)
        return function(value)

    def _as_dense(self, key: str, value: Any, parsed: Mapping[str, Any]) -> Any:
        """An array of at least one column; of sparse values as `tfrecord_input_fn` makes it."""
        tf = self._tf
        if not isinstance(value, tf.SparseTensor):
            if key not in self._widths:
                return value
            missing = tf.maximum(1 - tf.shape(value)[1], 0)
            paddings = [[0, 0], [0, missing], *[[0, 0]] * (value.shape.rank - 2)]
            return tf.pad(value, paddings, constant_values=self._fill_of(key))
        together = [x for other, x in parsed.items() if self._widths.get(other) == self._widths[key]]
        longest = tf.reduce_max([x.dense_shape[1] for x in together])
        # A power of two, so that a few compiled programs serve all requests.
        powers = tf.constant([1 << i for i in range(31)], tf.int64)
        width = tf.reduce_min(tf.boolean_mask(powers, powers >= longest))
        wide = tf.SparseTensor(value.indices, value.values, [value.dense_shape[0], width])
        return tf.sparse.to_dense(wide, np.nan if value.dtype.is_floating else -1)

    def _fill_of(self, key: str) -> Any:
        if key in self._coders:
            return -1
        default = self._spec[key].default_value  # type: ignore[union-attr]
        return 0 if default is None else np.asarray(default).item()

    def _check(self, key: str, values: Any, like: Any) -> Any:
        """The integers, which have to fit into the dtype of the model, as in `predict`."""
        tf = self._tf
        if values.dtype != tf.int64 or like.dtype == np.int64:
            return values
        fit = tf.reduce_all(tf.cast(tf.cast(values, tf.int32), tf.int64) == values)
        message = f"Feature: {key} holds an integer that does not fit into 32 bits, as which the model reads it."
        with tf.control_dependencies([tf.debugging.Assert(fit, [message])]):
            return tf.identity(values)

    def _cast(self, values: Any, like: Any) -> Any:
        # -1 is the largest uint32, as `encode` has it.
        return self._tf.cast(values, like.dtype)

    def _make_table(self, key: str) -> Any:
        """The lookup table of a vocabulary; one of a file is an asset, called as the file."""
        lookup = self._tf.lookup
        coder = _inner(self._coders[key])
        if not isinstance(coder, VocabularyColumn):
            return None
        if coder.vocabulary_file is None:
            words = list(coder.vocabulary_list)
            values = lookup.KeyValueTensorInitializer(words, np.arange(len(words)))
        else:
            path = os.path.join(self._folder, key.replace(os.sep, "_"), os.path.basename(coder.vocabulary_file))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{word}\n" for word in coder.vocabulary_list)
            whole, number = lookup.TextFileIndex.WHOLE_LINE, lookup.TextFileIndex.LINE_NUMBER
            values = lookup.TextFileInitializer(path, self._tf.string, whole, np.int64, number)
        return lookup.StaticHashTable(values, default_value=-1)

    def _encode(self, key: str, strings: Any) -> Any:
        """The integers that `est.feature_column.encode` makes of strings, int64."""
        tf, coder = self._tf, self._coders[key]
        column = _inner(coder)
        if isinstance(column, VocabularyColumn):
            codes = self.tables[key].lookup(strings)
            otherwise: Any = np.int64(column.default_value)
            if column.num_oov_buckets:
                otherwise = len(column.vocabulary_list) + self._crc32(strings) % column.num_oov_buckets
            codes = tf.where(codes == -1, otherwise, codes)
            if isinstance(coder, StepCoder):
                codes = tf.where(codes == -1, np.int64(UNLISTED), codes)
        else:
            codes = self._crc32(strings)
        return tf.where(strings == "", np.int64(-1), codes)

    def _crc32(self, strings: Any) -> Any:
        """The hash of `Crc32`, which TensorFlow does not have: a byte of all strings in each step."""
        tf = self._tf
        table = np.arange(256)
        for _ in range(8):
            table = (table >> 1) ^ (0xEDB88320 * (table & 1))
        lengths = tf.strings.length(strings)
        longest = tf.reduce_max(tf.concat([[1], tf.reshape(lengths, [-1])], 0))
        data = tf.cast(tf.io.decode_raw(strings, tf.uint8, fixed_length=longest), tf.int64)

        def step(i: Any, crc: Any) -> tuple[Any, Any]:
            place = tf.bitwise.bitwise_and(tf.bitwise.bitwise_xor(crc, data[..., i]), 0xFF)
            following = tf.bitwise.bitwise_xor(tf.gather(tf.constant(table), place), tf.bitwise.right_shift(crc, 8))
            return i + 1, tf.where(i < lengths, following, crc)

        initial = 0, tf.fill(tf.shape(strings), np.int64(0xFFFFFFFF))
        _, crc = tf.while_loop(lambda i, crc: i < longest, step, initial)
        return tf.bitwise.bitwise_and(tf.bitwise.bitwise_xor(crc, 0xFFFFFFFF), 0x7FFFFFFF)


def shape_of(array: Any) -> list[int | None]:
    """A shape as TensorFlow has it, with None for any size."""
    return [size if isinstance(size, int) else None for size in array.shape]


def _inner(coder: Coder) -> Coder:
    return coder.coder if isinstance(coder, StepCoder) else coder


def _name_inputs(features: Any) -> dict[str, tuple[str, Any]]:
    """The features, and their keys, by names that TensorFlow takes for inputs: letters, digits and "_", a letter first;
    but "features_self" for "self", and "features_class" for "class" as for each word of Python."""
    inputs: dict[str, tuple[str, Any]] = {}
    for name, feature in name_leaves(features, alone="features").items():
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        # TensorFlow passes inputs to its own methods by keyword.
        is_usable = plain[:1].isalpha() and not keyword.iskeyword(plain) and plain != "self"
        plain = plain if is_usable else f"features_{plain}"
        if plain.lower() in map(str.lower, inputs):
            raise ValueError(
                f"Two features have the name {plain!r} in a SavedModel, where letters of any case, digits and '_' make "
                f"a name: {name!r} is the second one. Rename one of them."
            )
        inputs[plain] = name, feature
    return inputs
