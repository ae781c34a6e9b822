"""Files of arrays by name, `.npz` and `.safetensors`: all that a file says of itself is checked before it is used."""

from __future__ import annotations

import abc
import contextlib
import io
import itertools
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.lib import format as npy

SAFETENSORS_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
_LONGEST_HEADER = 100_000_000  # bytes, as the format has it
_MOST_VALUES = 1_000_000  # in a header, some ten for each array; as objects of Python they take 30 times their bytes
_LONGEST_NPY_HEADER = 2**14  # bytes; numpy refuses longer ones after it has read them


class Kind(NamedTuple):
    """The shape and dtype of an array, which may be one that jax has not."""

    shape: tuple[int, ...]
    dtype: Any


class Reader(abc.ABC):
    """A source of arrays by name.

    Attributes:
      path: of it.
      shapes: the shapes and dtypes of all arrays in it, by name.
    """

    path: str
    shapes: Mapping[str, Any]

    def variables(self) -> list[str]:
        """Lists the names without slots, where it is known which are slots."""
        return list(self.shapes)

    @abc.abstractmethod
    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]: ...


class Npz(Reader):
    """A file that `np.savez` wrote."""

    def __init__(self, caller: str, path: str) -> None:
        self.path = path
        self._caller = caller
        with _name_errors(caller, path), zipfile.ZipFile(path) as file:
            self._members = {member.filename.removesuffix(".npy"): member for member in file.infolist()}
            self.shapes = {name: _npy_kind(name, file, x) for name, x in self._members.items()}

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        if unnamed := [name for name in names if self.shapes[name].dtype.kind == "V"]:
            raise ValueError(
                f"`{self._caller}` cannot read {unnamed} in {self.path!r}: numpy does not write their dtype into a "
                "file, as of bfloat16. Save them as float32, or in a .safetensors file."
            )
        return self.read_bits(names)

    def read_bits(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads arrays; their dtypes may be those by which numpy stands for others, such as "V2" for bfloat16."""
        values = {}
        with _name_errors(self._caller, self.path), zipfile.ZipFile(self.path) as file:
            for name in names:
                with file.open(self._members[name]) as array:
                    values[name] = npy.read_array(array)
        return values


class Safetensors(Reader):
    """A file of the safetensors format: the length of a header, the header in JSON, and the bytes of the arrays."""

    # Read here, so that the package of that name is not needed.

    def __init__(self, caller: str, path: str) -> None:
        self.path = path
        self._caller = caller
        with _name_errors(caller, path):
            header, self._begin = _header(path)
            size = os.path.getsize(path) - self._begin
            self.shapes = {name: _kind(name, entry, size) for name, entry in header.items()}
            self._places = {name: entry["data_offsets"] for name, entry in header.items()}
            # The format allows no overlaps: a file with overlaps is damaged.
            for one, other in itertools.pairwise(sorted(self._places, key=lambda name: self._places[name])):
                if self._places[other][0] < self._places[one][1]:
                    raise ValueError(f"its arrays {one!r} and {other!r} overlap")

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        values = {}
        with _name_errors(self._caller, self.path), open(self.path, "rb") as file:
            for name in names:
                begin, end = self._places[name]
                file.seek(self._begin + begin)
                values[name] = np.ndarray(self.shapes[name].shape, self.shapes[name].dtype, file.read(end - begin))
        return values


@contextlib.contextmanager
def _name_errors(caller: str, path: str) -> Iterator[None]:
    """Raises any error of reading the bytes of a file as a ValueError that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as e:  # parsing bytes raises many kinds
        what = str(e) or type(e).__name__
        raise ValueError(f"`{caller}` cannot read {path!r}, which is damaged: {what}. Copy it again.") from e


def check_size(name: str, shape: Sequence[Any], dtype: Any, size: int) -> None:
    """Raises a ValueError if an array cannot have that shape, or needs another number of bytes."""
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its array {name!r} has the shape {list(shape)}")
    needed = math.prod(shape) * dtype.itemsize
    if needed != size:
        raise ValueError(f"its array {name!r}, {dtype}{list(shape)}, needs {needed} bytes and has {size}")


def _npy_kind(name: str, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> Kind:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack all that they can
        raise ValueError(f"its array {name!r} is compressed in a way that numpy does not write")
    with file.open(member) as whole:
        # Only the header, so that listing the names of a large file reads none of its arrays.
        array = io.BytesIO(whole.read(_LONGEST_NPY_HEADER))
        version = npy.read_magic(array)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(array)
        if dtype.hasobject:
            raise ValueError(f"its array {name!r} holds objects of Python, which may run code when they are read")
        check_size(name, shape, dtype, member.file_size - array.tell())
    return Kind(shape, dtype)


def _header(path: str) -> tuple[dict[str, Any], int]:
    """The entries of a header, and where it ends."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if 8 + length > os.path.getsize(path):
            raise ValueError("its header is not complete")
        if length > _LONGEST_HEADER:  # checked before the header is read into memory
            raise ValueError(f"its header has {length} bytes, and may have {_LONGEST_HEADER}")
        text = file.read(length)
        if (count := sum(map(text.count, (b",", b"[", b"{")))) > _MOST_VALUES:
            raise ValueError(f"its header has {count} values, and may have {_MOST_VALUES}")
        header = json.loads(text, object_pairs_hook=_without_repeats)
    if not isinstance(header, dict):
        raise ValueError("its header is not a dict of arrays")
    header.pop("__metadata__", None)
    return header, 8 + length


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"its header has a name twice, one of {sorted(entries)[:5]}")
    return entries


def _kind(name: str, entry: Any, size: int) -> Kind:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if code not in SAFETENSORS_DTYPES:
                raise ValueError(f"its arrays of the kinds {[code]} are not known here")
            if not 0 <= begin <= end:
                raise ValueError(f"its array {name!r} lies from {begin} to {end}")
            if end > size:
                raise ValueError("its end is missing")
            dtype = jnp.dtype(SAFETENSORS_DTYPES[code])
            check_size(name, shape, dtype, end - begin)
            return Kind(tuple(shape), dtype)
    raise ValueError(f"its header says of {name!r}: {entry!r:.100}")
