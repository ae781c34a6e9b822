"""Turns strings into integers, on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from estimator.feature_column._categorical import CrossedColumn
from estimator.feature_column._column import CategoricalColumn, Coder, check_features


def encode(features: Mapping[Any, Any], columns: Iterable[Any]) -> dict[Any, Any]:
    """The features with integers instead of strings, for an input_fn to return.

    A string in a vocabulary becomes its id; a string for a hashed or crossed column becomes an integer by CRC-32, which
    the column then hashes. The empty string, None and NaN become -1, no class. Features without strings stay as they
    are, so that encoding twice does nothing. A whole data set can be encoded at once; encode served features in the
    same way.

    >>> import estimator as est, numpy as np
    >>> fc = est.feature_column
    >>> columns = [fc.categorical_column_with_vocabulary_list("pet", ["cat", "dog"], num_oov_buckets=1)]
    >>> fc.encode({"pet": np.array([["dog", ""], ["emu", "cat"]]), "age": np.array([3, 5])}, columns)
    {'pet': array([[ 1, -1],
           [ 2,  0]], dtype=int32), 'age': array([3, 5])}

    Args:
      features: arrays of numbers or strings, of any shape, by key.
      columns: all feature columns of the model.

    Raises:
      TypeError: an array has neither numbers nor strings.
      ValueError: no column turns the strings of a feature into integers, or two columns do it in different ways.
    """
    check_features(features)
    coders = _coders(columns)
    encoded = dict(features)
    for key, value in features.items():
        array = value if hasattr(value, "dtype") else np.asarray(value)
        if getattr(array.dtype, "kind", "O") not in "OSUT":  # pandas has kinds of its own
            continue
        if key not in coders:
            raise ValueError(
                f"Feature {key!r} is of dtype {array.dtype}, but none of the feature columns turns its strings into "
                f"integers; those that do are of {sorted(coders)}. Leave the feature out, or add a column, such as "
                f"`categorical_column_with_hash_bucket({key!r}, 1000)`."
            )
        encoded[key] = _codes(key, np.asarray(array), coders[key])
    return encoded


def encode_labels(labels: Any, label_vocabulary: Sequence[str], *, many_hot: bool = False) -> np.ndarray:
    """The positions of strings in a `label_vocabulary`, for an input_fn to return as labels: int32 of their shape.

    >>> import estimator as est
    >>> species = ["setosa", "virginica"]
    >>> est.feature_column.encode_labels(np.array(["virginica", "setosa"]), species)
    array([1, 0], dtype=int32)
    >>> est.feature_column.encode_labels([["virginica", ""], ["setosa", "virginica"]], species, many_hot=True)
    array([[0, 1],
           [1, 1]], dtype=int32)

    Args:
      labels: strings, `str` or `bytes`, of any shape; integers stay as they are.
      label_vocabulary: the names of the classes, that the head or canned classifier has, too.
      many_hot: whether examples have any number of classes, the labels of an `est.MultiLabelHead`: for strings of shape
        `(batch, k)`, filled up by "", the result is 0 or 1 of shape `(batch, classes)`.

    Raises:
      ValueError: a string is not in the vocabulary.
      TypeError: a label is not a string.
    """
    array = np.asarray(labels)
    if array.dtype.kind not in "OSUT":
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
                f"{list(label_vocabulary)!r}. Add it there, or leave out its examples."
            )
    ids = np.fromiter(map(places.__getitem__, values), np.int32, array.size).reshape(array.shape)
    if not many_hot:
        return ids
    return (ids[..., None] == np.arange(len(label_vocabulary))).any(axis=-2).astype(np.int32)


def _coders(columns: Iterable[Any]) -> dict[str, Coder]:
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
                "Convert it, for example by `.astype(str)` or `.astype(np.int32)`."
            )
        return coder.code(text) if text else -1

    return np.fromiter(map(code, array.ravel().tolist()), np.int32, array.size).reshape(array.shape)
