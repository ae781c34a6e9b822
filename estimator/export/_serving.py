"""Serving input receivers: what a client of a SavedModel sends, and the features that the model_fn gets of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from estimator.core._batch import abstract
from estimator.feature_column._column import ID_DTYPE, Coder, as_columns
from estimator.feature_column._encode import string_coders
from estimator.feature_column._hash import Crc32
from estimator.feature_column._parse_spec import features_of_one_width
from estimator.io._features import Config, FixedLenFeature, FixedLenSequenceFeature
from estimator.io._parse import check_features


@dataclasses.dataclass(frozen=True)
class ServingInputReceiver:
    """A request, as the functions of this module describe it.

    Attributes:
      features: an example of what the model_fn gets by key, `jax.ShapeDtypeStruct`s.
      batch_size: the number of examples in a request; if None, any.
      spec: the features of a serialized `tf.Example` by key; if None, a request has the features themselves.
      coders: how the strings of a feature become integers, by key.
      widths: the name of the second dimension of a feature, by key, where it differs between requests.
    """

    features: dict[str, jax.ShapeDtypeStruct]
    batch_size: int | None
    spec: Mapping[str, Config] | None
    coders: Mapping[str, Coder]
    widths: Mapping[str, str]


ReceiverFn = Callable[[], ServingInputReceiver]


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Config], default_batch_size: int | None = None, *, columns: Iterable[Any] | None = None
) -> ReceiverFn:
    """Returns a serving_input_receiver_fn of clients that send serialized `tf.Example`s.

    In the SavedModel TensorFlow parses the examples, and strings become the integers that `encode` makes of them. A
    `VarLenFeature` gets the form that `est.inputs.tfrecord_input_fn` gives it: an array of shape `(batch, k)`, filled
    up, where k is a power of two.

    >>> import estimator as est, numpy as np
    >>> columns = [est.feature_column.numeric_column("age")]
    >>> feature_spec = est.feature_column.make_parse_example_spec(columns)
    >>> receiver_fn = build_parsing_serving_input_receiver_fn(feature_spec, columns=columns)
    >>> receiver_fn().features
    {'age': ShapeDtypeStruct(shape=(1, 1), dtype=float32)}

    Args:
      feature_spec: by key, what `est.io.parse_example` takes. A client has to send those that have no default, so that
        labels do not belong here.
      default_batch_size: the number of examples in each request; if None, any.
      columns: the feature columns of the model, which turn strings into integers. In TensorFlow the model did that.

    Returns:
      A function without arguments, for `Estimator.export_saved_model`, `export_model` and exporters.

    Raises:
      ValueError: the features are missing, a key is not a string, a feature is of strings that no column turns into
        integers, or the batch size is not positive.
      TypeError: a feature is not one of `est.io`'s.
    """
    caller = "build_parsing_serving_input_receiver_fn"
    if not feature_spec:
        raise ValueError(f"Missing: features was {feature_spec}. Give `{caller}` a dict of `est.io` features by key.")
    _check_keys(feature_spec)
    check_features(caller, feature_spec, Config)
    rows = _checked_rows(default_batch_size)
    columns = [] if columns is None else as_columns(columns)
    coders = string_coders(columns)
    alone = features_of_one_width(columns)
    features: dict[str, jax.ShapeDtypeStruct] = {}
    widths: dict[str, str] = {}
    for key, config in feature_spec.items():
        shape = list(getattr(config, "shape", ()))
        if not isinstance(config, FixedLenFeature):
            shape.insert(0, 1)
            # Ids and their weights, or the steps of several sequences, have one number of columns.
            is_alone = key in alone or isinstance(config, FixedLenSequenceFeature)
            widths[key] = f"k{len(widths) + 1}" if is_alone else "k"
        dtype = {"int64_list": np.int64, "float_list": np.float32}.get(config.kind)
        features[key] = _struct(caller, key, (rows or 1, *shape), dtype, coders)
    used = {key: coder for key, coder in coders.items() if key in features and feature_spec[key].kind == "bytes_list"}
    receiver = ServingInputReceiver(features, rows, dict(feature_spec), used, widths)
    return lambda: receiver


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: int | None = None, *, columns: Iterable[Any] | None = None
) -> ReceiverFn:
    """Returns a serving_input_receiver_fn of clients that send the features themselves, each as one array.

    >>> import numpy as np
    >>> build_raw_serving_input_receiver_fn({"x": np.zeros((8, 3), np.float32)})().features
    {'x': ShapeDtypeStruct(shape=(8, 3), dtype=float32)}

    Args:
      features: of a batch, by key: arrays, or `jax.ShapeDtypeStruct`s, of which only shapes and dtypes count. Arrays of
        strings stand for strings that clients send.
      default_batch_size, columns: as for `build_parsing_serving_input_receiver_fn`.

    Returns:
      A function without arguments, for `Estimator.export_saved_model`, `export_model` and exporters.

    Raises:
      ValueError, TypeError: as for `build_parsing_serving_input_receiver_fn`.
    """
    caller = "build_raw_serving_input_receiver_fn"
    if features is None:
        raise ValueError("features must be defined.")
    if not isinstance(features, Mapping):
        raise TypeError(
            f"`{caller}` takes features in a dict by key; got {type(features).__name__}. Export a single array by "
            '`estimator.export_model(export_dir_base, array, format="saved_model")`.'
        )
    _check_keys(features)
    rows = _checked_rows(default_batch_size)
    coders = string_coders([] if columns is None else as_columns(columns))
    structs, used = {}, {}
    for key, value in features.items():
        array = value if hasattr(value, "dtype") else np.asarray(value)
        if getattr(array.dtype, "kind", "") not in "OSUT":
            like = abstract(array)
            structs[key] = like if rows is None else like.update(shape=(rows, *like.shape[1:]))
            continue
        shape = (array.shape[0] if rows is None else rows, *array.shape[1:])
        structs[key] = _struct(caller, key, shape, None, coders)
        used[key] = coders[key]
    receiver = ServingInputReceiver(structs, rows, None, used, {})
    return lambda: receiver


def is_receiver(value: Any) -> bool:
    """Returns whether a value stands for a receiver, not for features."""
    return callable(value) or isinstance(value, ServingInputReceiver)


def as_receiver(caller: str, receiver_fn: Callable[[], Any]) -> ServingInputReceiver:
    """Calls a serving_input_receiver_fn, which must be one of this module's."""
    receiver = receiver_fn() if callable(receiver_fn) else receiver_fn
    if not isinstance(receiver, ServingInputReceiver):
        raise TypeError(
            f"`{caller}` needs a serving_input_receiver_fn that `est.export.build_parsing_serving_input_receiver_fn` "
            f"or `build_raw_serving_input_receiver_fn` has made; got {receiver_fn!r}. For features as they are, give "
            "`export_model` and exporters example_features: `next(iter(input_fn()))[0]`."
        )
    return receiver


def _struct(
    caller: str, key: str, shape: tuple[int, ...], dtype: Any, coders: Mapping[str, Coder]
) -> jax.ShapeDtypeStruct:
    """What the model_fn gets of a feature; its dtype is None for strings."""
    if dtype is None and key not in coders:
        raise ValueError(
            f"`{caller}`: the feature {key!r} is of strings, which no compiled program takes. Give `columns=columns`, "
            "with the feature column that turns them into integers, or leave the feature out."
        )
    if dtype is None:
        dtype = np.int32 if isinstance(coders[key], Crc32) else ID_DTYPE
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def _check_keys(features: Mapping[Any, Any]) -> None:
    for key in features:
        if not isinstance(key, str):
            raise ValueError(f"feature keys must be strings: {key}.")


def _checked_rows(default_batch_size: Any) -> int | None:
    is_int = isinstance(default_batch_size, int) and not isinstance(default_batch_size, bool)
    if default_batch_size is not None and (not is_int or default_batch_size < 1):
        raise ValueError(f"default_batch_size must be a positive int, or None for any; got {default_batch_size!r}.")
    return default_batch_size
