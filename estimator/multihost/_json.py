"""JSON messages between processes, in which bytes and numpy arrays are written as base64."""

from __future__ import annotations

import base64
import json
from typing import Any

import jax
import numpy as np

_BYTES = "__bytes__"
_ARRAY = "__array__"


def to_json(value: object) -> str:
    """The text of a value.

    >>> from_json(to_json({"step": np.int32(7), "names": ("a", "b"), "key": b"k", "x": np.arange(2)}))
    {'step': 7, 'names': ['a', 'b'], 'key': b'k', 'x': array([0, 1])}

    Raises:
      TypeError: it is neither made of what JSON knows, nor bytes, nor an array.
    """
    return json.dumps(value, default=_plain)


def from_json(text: str | bytes) -> Any:
    """The value of a text; tuples have become lists, and scalars of numpy numbers."""
    return json.loads(text, object_hook=_original)


def _plain(value: object) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        if not array.ndim:
            return array.item()
        if not array.dtype.hasobject:
            return {_ARRAY: [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]}
    raise TypeError(
        "Processes send each other what JSON knows, bytes and arrays; got "
        f"{value!r} of type {type(value).__name__}. Return numbers, strings, lists and dicts."
    )


def _original(value: dict[str, Any]) -> Any:
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES])
    if value.keys() == {_ARRAY}:
        dtype, shape, data = value[_ARRAY]
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return value
