"""Parses serialized `tf.Example`s and `tf.SequenceExample`s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from estimator.io._features import (
    Config,
    FixedLenFeature,
    FixedLenSequenceFeature,
    SparseTensorValue,
    VarLenFeature,
)
from estimator.io._find_features import find_features
from estimator.io._flat import KINDS, Flat, read_columns
from estimator.io._messages import Example, SequenceExample, UnreadSequenceExample

Parsed = dict[str, np.ndarray | SparseTensorValue]


def parse_example(
    serialized: Sequence[bytes], features: Mapping[str, Config], name: str | None = None, example_names: Any = None
) -> Parsed:
    """The features of a batch of serialized `tf.Example`s, on the host.

    >>> import estimator as est, numpy as np
    >>> record = est.io.Example()
    >>> record.features.feature["x"].float_list.value.extend([1.0, 2.0])
    >>> record.features.feature["tags"].bytes_list.value.append(b"red")
    >>> serialized = [record.SerializeToString()] * 2
    >>> parsed = parse_example(serialized, {"x": FixedLenFeature([2], np.float32), "tags": VarLenFeature(str)})
    >>> parsed["x"].tolist(), parsed["tags"].to_dense().tolist()
    ([[1.0, 2.0], [1.0, 2.0]], [[b'red'], [b'red']])

    Args:
      serialized: `bytes`, one for each example.
      features: by key, a `FixedLenFeature`, `VarLenFeature` or `FixedLenSequenceFeature`. Others are not read.
      name, example_names: of TensorFlow's op; without effect here.

    Returns:
      By key, an array of int64, float32 or `bytes` objects, or a `SparseTensorValue` for a `VarLenFeature`.

    Raises:
      ValueError: an example is not one, lacks a feature that has no default, or has one of another dtype or length; in
        TensorFlow's words.
      TypeError: `serialized` is not a list of `bytes`, or a feature is of another kind.
    """
    del name, example_names
    check_features("parse_example", features, Config)
    data = _as_list(serialized)
    with _explain_error(Example, "parse_example", data):
        columns = dict(zip(features, find_features(data, [*features]), strict=True))
        flat: dict[str, Flat | None] = {}
        for kind in KINDS:
            keys = [key for key, config in features.items() if config.kind == kind]
            flat |= zip(keys, read_columns(kind, [columns[key] for key in keys]), strict=True)
        return {key: config.parse(key, columns[key], flat[key]) for key, config in features.items()}


def parse_single_example(
    serialized: bytes, features: Mapping[str, Config], name: str | None = None, example_names: Any = None
) -> Parsed:
    """The features of one serialized `tf.Example`, as `parse_example` returns them for a batch, without its dimension.

    Args and errors are as for `parse_example`.
    """
    del name, example_names
    return {key: _without_batch(value) for key, value in parse_example([serialized], features).items()}


def parse_single_sequence_example(
    serialized: bytes,
    context_features: Mapping[str, FixedLenFeature | VarLenFeature] | None = None,
    sequence_features: Mapping[str, FixedLenSequenceFeature | VarLenFeature] | None = None,
    example_name: Any = None,
    name: str | None = None,
) -> tuple[Parsed, Parsed]:
    """The context and the sequences of one serialized `tf.SequenceExample`.

    Args:
      serialized: the `bytes` of the example.
      context_features: as `features` of `parse_single_example`.
      sequence_features: by key, a `FixedLenSequenceFeature`, parsed into an array of shape `(steps, *shape)`, or a
        `VarLenFeature`, parsed into a `SparseTensorValue` of shape `(steps, k)`.
      example_name, name: of TensorFlow's op; without effect here.

    Returns:
      `(context, sequences)`, each by key.

    Raises:
      ValueError, TypeError: as `parse_example` does.
    """
    del example_name, name
    caller, context, sequences = "parse_single_sequence_example", context_features or {}, sequence_features or {}
    check_features(caller, context, FixedLenFeature | VarLenFeature)
    check_features(caller, sequences, FixedLenSequenceFeature | VarLenFeature)
    [data] = _as_list([serialized])
    steps: Parsed = {}
    with _explain_error(SequenceExample, caller, [data]):
        message = UnreadSequenceExample.FromString(data)
        found, lists = message.context.feature, message.feature_lists.feature_list
        parsed = {key: _without_batch(config.parse(key, [found.get(key, b"")])) for key, config in context.items()}
        for key, config in sequences.items():
            features = list(lists[key].feature) if key in lists else None
            if isinstance(config, FixedLenSequenceFeature):
                steps[key] = config.parse_steps(key, features)
            else:
                steps[key] = config.parse(key, features or ())
    return parsed, steps


@contextlib.contextmanager
def _explain_error(kind: Any, caller: str, data: Sequence[bytes]) -> Iterator[None]:
    """Makes a ValueError of protobuf's error, with the example that it is about."""
    try:
        yield
    except DecodeError:
        for each in data:
            try:
                kind.FromString(each)
            except DecodeError as error:
                raise ValueError(
                    f"Could not parse example input, value: {each!r:.100}. `{caller}` takes serialized "
                    f"{kind.DESCRIPTOR.name}s."
                ) from error
        raise


def _as_list(serialized: Any) -> list[bytes]:
    if isinstance(serialized, str | bytes):
        raise TypeError("`parse_example` takes a list of serialized examples; for one, use `parse_single_example`.")
    given = serialized.ravel().tolist() if isinstance(serialized, np.ndarray) else list(serialized)
    for each in given:
        if not isinstance(each, bytes):
            raise TypeError(f"A serialized example is `bytes`; got {each!r:.100}.")
    return given


def check_features(caller: str, features: Any, kinds: Any) -> None:
    """Raises a TypeError for a feature that is none of those kinds."""
    for key, config in features.items():
        if not isinstance(config, kinds):
            named = " or ".join(kind.__name__ for kind in kinds.__args__)
            raise TypeError(f"`{caller}` needs a {named} for {key!r}; got {config!r}.")


def _without_batch(value: np.ndarray | SparseTensorValue) -> np.ndarray | SparseTensorValue:
    if isinstance(value, SparseTensorValue):
        return SparseTensorValue(value.indices[:, 1:], value.values, value.dense_shape[1:])
    return value[0, ...]
