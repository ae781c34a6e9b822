"""Turns strings into integers, on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from estimator.feature_column._categorical import CrossedColumn
from estimator.feature_column._column import ID_DTYPE, CategoricalColumn, Coder, KeyColumn, as_columns, check_features
from estimator.feature_column._data_frame import column_arrays, is_data_frame
from estimator.feature_column._dense import NumericArgs
from estimator.feature_column._hash import Crc32


def encode(features: Any, columns: Iterable[Any]) -> dict[Any, Any]:
    """The features with integers instead of strings, for an input_fn to return.

    A string in a vocabulary becomes its id, a uint32, which tells it from integers of a data set: a column with a
    vocabulary of strings takes no others. A string for a hashed or crossed column becomes an int32 by CRC-32, which the
    column then hashes. The empty string, None and NaN become -1, no class; as a uint32 it is 4294967295. Other features
    stay as they are, so that encoding twice does nothing. A whole data set can be encoded at once; encode served
    features in the same way.

    >>> import estimator as est, numpy as np
    >>> fc = est.feature_column
    >>> columns = [fc.categorical_column_with_vocabulary_list("pet", ["cat", "dog"], num_oov_buckets=1)]
    >>> fc.encode({"pet": np.array([["dog", ""], ["emu", "cat"]]), "age": np.array([3, 5])}, columns)
    {'pet': array([[         1, 4294967295],
           [         2,          0]], dtype=uint32), 'age': array([3, 5])}

    Args:
      features: arrays of numbers or strings, of any shape, by key; or a pandas `DataFrame`, whose missing numbers
        become NaN, and missing classes -1. The integers of its numeric columns become floats, as pandas has them where
        one is missing.
      columns: all feature columns of the model.

    Raises:
      TypeError: an array has neither numbers nor strings, or numbers for a column whose vocabulary is of strings.
      ValueError: no column turns the strings of a feature into integers, two columns do it in different ways, or an
        item of `columns` is not a feature column.
    """
    columns = as_columns(columns)
    coders = string_coders(columns)
    if is_data_frame(features):
        features = _arrays_of(features, columns, coders)
    check_features(features)
    encoded = dict(features)
    unread = []
    for key, value in features.items():
        array = value if hasattr(value, "dtype") else np.asarray(value)
        if getattr(array.dtype, "kind", "O") not in "OSUT":  # pandas has kinds of its own
            if not isinstance(coders.get(key, Crc32()), Crc32) and array.dtype != ID_DTYPE:
                raise TypeError(
                    f"Feature {key!r} is of dtype {array.dtype}, but the classes of its column are strings. Write "
                    f"`.astype(str)` if numbers are among their names, or `.astype(np.{ID_DTYPE})` for ids of classes."
                )
            continue
        if key not in coders:
            unread.append(key)
            continue
        encoded[key] = _codes(key, np.asarray(array), coders[key])
    if unread:
        raise ValueError(
            f"The features {unread} hold strings or objects, but none of the feature columns turns them into integers; "
            f"those that do are of {sorted(coders)}. Leave them out, of a DataFrame by `frame.drop(columns={unread})`, "
            f"or add a column, such as `categorical_column_with_hash_bucket({unread[0]!r}, 1000)`; write "
            "`.astype(np.int32)` for integers in an array of objects."
        )
    return encoded


def encode_labels(labels: Any, label_vocabulary: Sequence[str], *, many_hot: bool = False) -> np.ndarray:
    """The positions of strings in a `label_vocabulary`, for an input_fn to return as labels: uint32 of their shape.

    The dtype tells them from integers of a data set, which heads with a `label_vocabulary` refuse.

    >>> import estimator as est
    >>> species = ["setosa", "virginica"]
    >>> est.feature_column.encode_labels(np.array(["virginica", "setosa"]), species)
    array([1, 0], dtype=uint32)
    >>> est.feature_column.encode_labels([["virginica", ""], ["setosa", "virginica"]], species, many_hot=True)
    array([[0, 1],
           [1, 1]], dtype=int32)

    Args:
      labels: strings, `str` or `bytes`, of any shape; positions that are encoded stay as they are.
      label_vocabulary: the names of the classes, that the head or canned classifier has, too.
      many_hot: whether examples have any number of classes, the labels of an `est.MultiLabelHead`: for strings of shape
        `(batch, k)`, filled up by "", the result is 0 or 1 of shape `(batch, classes)`, int32; so may be labels.

    Raises:
      ValueError: a string is not in the vocabulary.
      TypeError: a label is not a string.
    """
    array = np.asarray(labels)
    if array.dtype.kind not in "OSUT":
        if not many_hot and array.dtype != ID_DTYPE:
            raise TypeError(
                f"`encode_labels` got labels of dtype {array.dtype}; label_vocabulary holds strings, such as "
                f"{label_vocabulary[0]!r}. Write `.astype(str)` if numbers are their names, or "
                f"`.astype(np.{ID_DTYPE})` for positions in label_vocabulary."
            )
        return array
    places: dict[Any, int] = {}
    for i, name in enumerate(label_vocabulary):
        # Strings may be bytes, too, as readers of records return them.
        places[name] = places[name.encode()] = i
    if many_hot:
        places[""] = places[b""] = -1
    values = array.ravel().tolist()
    for value in values:
        if value not in places:
            kind = ValueError if isinstance(value, str | bytes) else TypeError
            raise kind(
                f"`encode_labels` got the label {value!r}, which is not in label_vocabulary, "
                f"{list(label_vocabulary)!r}. Add it there, or leave out its examples; write `.astype(str)` if numbers "
                "are names of classes."
            )
    ids = np.fromiter(map(places.__getitem__, values), np.int32, array.size).reshape(array.shape)
    if not many_hot:
        return ids.astype(ID_DTYPE)
    return (ids[..., None] == np.arange(len(label_vocabulary))).any(axis=-2).astype(np.int32)


def _arrays_of(frame: Any, columns: Iterable[Any], coders: Mapping[str, Coder]) -> dict[Any, np.ndarray]:
    """The columns of a frame, in dtypes that do not depend on which of their values are missing."""
    arrays = column_arrays("features", frame)
    parts = [part for column in columns for part in _parts(column)]
    classes = {part if isinstance(part, str) else part.key for part in parts if isinstance(part, str | KeyColumn)}
    numbers = {part.key for part in parts if isinstance(part, NumericArgs)}
    for key, array in arrays.items():
        kind = array.dtype.kind
        is_empty = kind in "fO" and frame[key].isna().all()  # then pandas knows no dtype
        if key in numbers - classes and (is_empty or kind in "biu"):
            arrays[key] = array.astype(float)
        elif key in coders and is_empty:
            arrays[key] = array.astype(object)
        elif key in classes - numbers and (is_empty or kind == "f"):
            ids = np.where(frame[key].isna(), -1, array).astype(float)
            if np.isfinite(ids).all() and (ids == ids.astype(int)).all():
                arrays[key] = ids.astype(int)
    return arrays


def _parts(column: Any) -> Iterator[Any]:
    """A column, those in it, and the features of a cross."""
    yield column
    wrapped = (getattr(column, name, None) for name in ("categorical_column", "source_column"))
    for part in (*filter(None, wrapped), *getattr(column, "keys", ())):
        yield from _parts(part)


def string_coders(columns: Iterable[Any]) -> dict[str, Coder]:
    """The encoders of strings of feature columns, by feature."""
    coders: dict[str, Coder] = {}
    crossed: dict[str, Coder] = {}  # by name: any integers will do, so another column's ids
    for column in columns:
        categorical = column if isinstance(column, CategoricalColumn) else getattr(column, "categorical_column", None)
        for key, coder in categorical.coders().items() if isinstance(categorical, CategoricalColumn) else ():
            if isinstance(categorical, CrossedColumn) and key in categorical.keys:
                crossed[key] = coder
            elif coders.setdefault(key, coder) != coder:
                raise ValueError(
                    f"The feature columns turn the strings of feature {key!r} into integers in different ways. Give "
                    "one of them a copy of the feature under another key."
                )
    return crossed | coders


def _codes(key: Any, array: np.ndarray, coder: Coder) -> np.ndarray:
    # Columns of strings have many equal ones: each is hashed or looked up once.
    @functools.cache
    def code(value: Any) -> int:
        text = value.decode() if isinstance(value, bytes) else value
        if text is None or (isinstance(text, float) and np.isnan(text)):
            # pandas has None and NaN for a missing string.
            text = ""
        if not isinstance(text, str):
            raise TypeError(
                f"Feature {key!r} must hold numbers or strings alone; got {value!r} of type {type(value).__name__}. "
                "Convert it by `.astype(str)`, or by `.astype(np.int32)` for a hashed or crossed column."
            )
        return coder.code(text) if text else -1

    codes = np.fromiter(map(code, array.ravel().tolist()), np.int32, array.size).reshape(array.shape)
    return codes if isinstance(coder, Crc32) else codes.astype(ID_DTYPE)
