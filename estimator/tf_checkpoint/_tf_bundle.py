"""Checkpoints of TensorFlow (1.0 and later), read without TensorFlow.

`<prefix>.index` is a table (see `_sstable.py`) from the names of tensors to protocol buffers, which say where in the
files `<prefix>.data-*` their bytes are. A variable that a partitioner has cut has an entry of its own for each slice.
Everything has a checksum; what this module does not know is an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import google_crc32c
import jax.numpy as jnp
import numpy as np

from estimator.storage._array_files import check_size
from estimator.storage._files import is_inside
from estimator.tf_checkpoint._sstable import read_table, read_varint, unmask_crc

_DTYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64"}
_DTYPES |= {10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64"}
_DTYPES |= {24: "float8_e5m2", 25: "float8_e4m3fn"}
_FIX = (
    "Where TensorFlow is installed, `tf.train.load_checkpoint(path).get_tensor(name)` gives values of it; save them by "
    "`np.savez`."
)
_FILE = re.compile(r"(.+)\.(index|meta|data-\d{5}-of-\d{5})")


class _UnreadableError(ValueError):
    """The checkpoint cannot be read; the message names it."""


class _Entry(NamedTuple):
    """The place of a tensor; `slices`: its parts, each by (start, length) for each dimension."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    slices: list[list[tuple[int, int]]]


class TensorFlowBundle:
    """A checkpoint of TensorFlow.

    Args:
      prefix: its path without ".index".

    Attributes:
      shapes: the shapes and dtypes of what is in it, by name; objects stand for strings, which are not read.

    Raises:
      ValueError: a file is damaged, or has something that this module does not know.
    """

    def __init__(self, prefix: str) -> None:
        self.path = prefix
        with self._naming():
            try:
                table = read_table(f"{prefix}.index")
            except ValueError as error:
                self._fail(str(error), fix="")
            header = dict(_fields(table.pop(b"", b"")))
            if header.get(2, 0) != 0:
                self._fail("its numbers are big-endian")
            self._shards = header.get(1, 1)
            self._slices = {key: _entry(value) for key, value in table.items() if key.startswith(b"\0")}
            self._entries = {k.decode(): _entry(value) for k, value in table.items() if k not in self._slices}
            self.shapes = {name: (entry.shape, self._dtype(entry)) for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        with self._naming():
            entry = self._entries[name]
            return self._put_together(name, entry) if entry.slices else self._array(name, entry)

    def _put_together(self, name: str, entry: _Entry) -> np.ndarray:
        """The array of a variable that a partitioner has cut."""
        parts = []
        for extents in entry.slices:
            part = self._slices.get(_slice_key(name, extents))
            if part is None:
                self._fail(f"it has no entry for the slice {extents} of the variable {name!r}")
            parts.append((extents, part))
        filled, size = sum(math.prod(part.shape) for _, part in parts), math.prod(entry.shape)
        if filled != size:  # otherwise a part would not be initialized
            self._fail(f"its slices of the variable {name!r} have {filled} of {size} values")
        whole = np.empty(entry.shape, self._dtype(entry))
        for extents, part in parts:
            sizes = [(start, size if size >= 0 else n) for (start, size), n in zip(extents, entry.shape, strict=True)]
            whole[tuple(slice(start, start + size) for start, size in sizes)] = self._array(name, part)
        return whole

    def _array(self, name: str, entry: _Entry) -> np.ndarray:
        dtype = self._dtype(entry)
        if dtype.hasobject:
            self._fail(f"{name!r} holds no numbers: its type is number {entry.dtype} of TensorFlow's")
        file = f"{self.path}.data-{entry.shard:05d}-of-{self._shards:05d}"
        if not os.path.exists(file):
            self._fail(f"the file {os.path.basename(file)!r} is not beside it", fix="Copy all its files.")
        check_size(name, entry.shape, dtype, entry.size)
        if entry.offset + entry.size > os.path.getsize(file):  # before they are read
            self._fail(f"{file} is not complete", fix="Copy it again.")
        with open(file, "rb") as data:
            data.seek(entry.offset)
            values = data.read(entry.size)
        if len(values) != entry.size or google_crc32c.value(values) != unmask_crc(entry.crc):
            self._fail(f"{file} is damaged where {name!r} is", fix="Copy it again.")
        return np.frombuffer(values, np.dtype(dtype).newbyteorder("<")).reshape(entry.shape).astype(dtype)

    def _dtype(self, entry: _Entry) -> Any:
        return jnp.dtype(_DTYPES[entry.dtype]) if entry.dtype in _DTYPES else np.dtype(object)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Raises any error of parsing bytes as one that names the checkpoint."""
        try:
            yield
        except (OSError, _UnreadableError):
            raise
        except Exception as error:  # of many kinds
            self._fail(str(error) or type(error).__name__, fix="Copy it again.")

    def _fail(self, what: str, fix: str = _FIX) -> NoReturn:
        raise _UnreadableError(f"The TensorFlow checkpoint {self.path!r} cannot be read: {what}. {fix}".rstrip())


def tensorflow_prefix(path: str) -> str | None:
    """Finds the checkpoint of TensorFlow that a path means; None if there is none.

    Args:
      path: a prefix, one of the files, or a directory, whose newest one it is.
    """
    if os.path.isdir(path):
        try:
            with open(os.path.join(path, "checkpoint"), encoding="utf-8") as file:
                newest = re.search(r'^model_checkpoint_path: "(.+)"', file.read(), re.M)
        except (FileNotFoundError, UnicodeDecodeError):
            newest = None
        # The file has the path where the checkpoint was written, which may have been copied since then. Nothing outside
        # of the directory is read.
        names = [] if newest is None else [newest[1], newest[1].split("/")[-1]]
        prefixes = [os.path.join(path, name) for name in filter(is_inside, names)]
    else:
        match = _FILE.fullmatch(path)
        prefixes = [path, match[1] if match else path]
    return next((prefix for prefix in prefixes if os.path.isfile(f"{prefix}.index")), None)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Reads the numbers and values of a protocol buffer's fields: integers, or bytes."""
    at, value = 0, None  # type: int, Any
    while at < len(message):
        tag, at = read_varint(message, at)
        if tag & 7 == 0:
            value, at = read_varint(message, at)
        elif tag & 7 == 5:
            value, at = struct.unpack_from("<I", message, at)[0], at + 4
        else:
            length, at = read_varint(message, at)
            value, at = message[at : at + length], at + length
        yield tag >> 3, value


def _entry(message: bytes) -> _Entry:
    fields = list(_fields(message))
    one = dict(fields)
    shape = tuple(dict(_fields(dim)).get(1, 0) for number, dim in _fields(one.get(2, b"")) if number == 2)
    slices = [[_extent(extent) for _, extent in _fields(value)] for number, value in fields if number == 7]
    return _Entry(one.get(1, 0), shape, one.get(3, 0), one.get(4, 0), one.get(5, 0), one.get(6, 0), slices)


def _extent(message: bytes) -> tuple[int, int]:
    """Reads start and length; the length -1 stands for the whole dimension."""
    fields = dict(_fields(message))
    return fields.get(1, 0), fields.get(2, -1)


def _slice_key(name: str, extents: list[tuple[int, int]]) -> bytes:
    """The key of a slice: 0, the name and the number of dimensions, then start and length of each, in bytes that sort
    as the values do."""
    escaped = name.encode().replace(b"\0", b"\0\xff") + b"\0\1"
    return b"\0" + escaped + _sortable_size(len(extents)) + b"".join(_sortable(n) for extent in extents for n in extent)


def _sortable_size(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _sortable(value: int) -> bytes:
    """Encodes an integer in bytes that sort as integers do."""
    # The number of bits before the first one that differs from the sign is the number of bytes.
    length = (~value if value < 0 else value).bit_length() // 7 + 1
    header = (0xFF << 8 >> length & 0xFF) << 8 * (length - 1)
    return (value & (1 << 8 * length) - 1 ^ header).to_bytes(length, "big")
