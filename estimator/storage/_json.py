"""Values as JSON text, in which bytes, and arrays where they are asked for, are written as base64.

A value that JSON has no type for is a dict of one key, which no other dict may have. Tuples become lists.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

NOT_JSON = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)  # of a text that is not what was encoded

_BYTES = "__bytes__"
_ARRAY = "__array__"


def encode(state: Any) -> Any:
    """Writes the values beside the arrays of a checkpoint, such as a position, in the types that JSON has.

    >>> encode({"position": b"ab", "batches": 3})
    {'position': {'__bytes__': 'YWI='}, 'batches': 3}
    >>> decode(json.dumps(encode({"position": b"ab", "batches": 3})))
    {'position': b'ab', 'batches': 3}

    Raises:
      TypeError: it has anything other than dicts with strings as keys, lists, numbers, strings, bytes and None.
    """
    return _encode(state, "")


def encode_leaf(value: object, arrays: bool = False) -> Any:
    """Writes bytes, scalars of numpy and, with `arrays`, arrays in types that JSON has; returns others as they are.

    >>> encode_leaf(np.int32(7)), encode_leaf(b"ab"), encode_leaf("ab")
    (7, {'__bytes__': 'YWI='}, 'ab')
    >>> decode(json.dumps(encode_leaf(np.arange(2), arrays=True)), arrays=True)
    array([0, 1])
    """
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic | np.ndarray):
        if value.ndim == 0:
            return value.item()
        if arrays and not value.dtype.hasobject:
            return {_ARRAY: [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    return value


def decode(text: str | bytes, arrays: bool = False) -> Any:
    """Reads the values in a JSON text that contains encoded ones."""

    def restore(value: dict[str, Any]) -> Any:
        if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        # A checkpoint has no arrays in its JSON: there such a dict is the user's own.
        if arrays and value.keys() == {_ARRAY}:
            dtype, shape, data = value[_ARRAY]
            return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()  # the buffer is read-only
        return value

    return json.loads(text, object_hook=restore)


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, dict) and all(isinstance(key, str) and key != _BYTES for key in value):
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    plain = encode_leaf(value)
    if plain is None or isinstance(plain, bool | int | float | str) or isinstance(value, bytes):
        return plain
    raise TypeError(
        "A checkpoint holds positions and states of hooks as dicts with strings as keys, lists, numbers, strings, "
        f"bytes and None; got {value!r} of type {type(value).__name__} in {where}. Let `get_state` return these."
    )
