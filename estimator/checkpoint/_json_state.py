"""Values other than arrays in a checkpoint, the input position and the state of hooks: JSON beside the arrays.

A position may be bytes, as of grain's loaders, for which JSON has no type. Tuples become lists.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

_BYTES = "__bytes__"


def encode(state: Any) -> Any:
    """`state` in the types that JSON has.

    >>> encode({"position": b"ab", "batches": 3})
    {'position': {'__bytes__': 'YWI='}, 'batches': 3}
    >>> decode(json.dumps(encode({"position": b"ab", "batches": 3})))
    {'position': b'ab', 'batches': 3}

    Raises:
      TypeError: it has anything other than dicts with strings as keys, lists, numbers, strings, bytes and None.
    """
    return _to_json(state, "")


def decode(text: str) -> Any:
    """The values in a JSON text that contains what `encode` returned."""
    return json.loads(text, object_hook=lambda d: base64.b64decode(d[_BYTES]) if d.keys() == {_BYTES} else d)


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, dict) and all(isinstance(key, str) and key != _BYTES for key in value):
        return {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    plain = value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(
        "A checkpoint holds positions and states of hooks as dicts with strings as keys, lists, numbers, strings, "
        f"bytes and None; got {value!r} of type {type(value).__name__} in {where}. Let `get_state` return these."
    )
