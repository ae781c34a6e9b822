"""Where values of variables are read from: checkpoints of any kind, by one interface."""

from __future__ import annotations

import difflib
import json
import os
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib import format as npy

from estimator.checkpoint import _checkpoints
from estimator.checkpoint._checkpoints import Checkpoints, ShapeDtype
from estimator.checkpoint._export_folder import ExportFolder, find_export
from estimator.tf_checkpoint._tf_bundle import TensorFlowBundle, tensorflow_prefix

_STEP = "global_step"
_SAFETENSORS = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}


class Reader(Protocol):
    """What holds values by name.

    Attributes:
      path: of it.
      shapes: the shapes and dtypes of all arrays in it, by name.
    """

    path: str
    shapes: Mapping[str, ShapeDtype]

    def variables(self) -> list[str]:
        """The names without slots, where it is known which are slots."""

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]: ...


def open_reader(caller: str, path: str | os.PathLike[str]) -> Reader:
    """The reader for a path.

    Args:
      caller: for the message.
      path: a model_dir or a checkpoint; an exported model, or the folder around several; a checkpoint of TensorFlow,
        one of its files, or its directory; an .npz or .safetensors file.

    Raises:
      TypeError: it is not a path.
      ValueError: none of these is there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`{caller}` needs a path, a string; got {path!r}.")
    path = os.fspath(path)
    newest = Checkpoints(path).latest()
    if newest is not None:
        return _Checkpoint(newest)
    if export := find_export(path):
        return _Export(export)
    if prefix := tensorflow_prefix(path):
        return _TensorFlow(prefix)
    if os.path.isfile(path):
        try:
            if path.endswith(".npz"):
                return _Npz(path)
            if path.endswith(".safetensors"):
                return _Safetensors(path)
        except (ValueError, KeyError, EOFError, struct.error, zipfile.BadZipFile) as e:
            raise ValueError(f"`{caller}` cannot read {path!r}, which is damaged: {e}. Copy it again.") from e
    try:
        return _Checkpoint(path)
    except ValueError as e:
        raise ValueError(
            f"`{caller}` cannot read {path!r}: it is neither a checkpoint, nor a model_dir that has one, nor an "
            "exported model, a TensorFlow checkpoint (`model.ckpt-1000`, with `.index` and `.data-*` files), or a file "
            "`*.npz` or `*.safetensors`. Give the path of one."
        ) from e


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """The names and shapes of what a checkpoint holds, sorted by name, as `tf.train.list_variables`.

    >>> import estimator as est, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> np.savez(path, **{"dense/kernel": np.zeros((3, 2)), "dense/bias": np.zeros(2)})
    >>> est.list_variables(path)
    [('dense/bias', [2]), ('dense/kernel', [3, 2])]

    Args:
      ckpt_dir_or_file: a model_dir, for its newest checkpoint, or the path of a checkpoint; a checkpoint of TensorFlow
        (its prefix, such as "model.ckpt-1000", or its directory), which is read without TensorFlow; an .npz or
        .safetensors file; or a folder that `export_model` wrote.

    Raises:
      ValueError: none of these is there, or it is damaged.
    """
    shapes = open_reader("est.list_variables", ckpt_dir_or_file).shapes
    return [(name, list(shapes[name].shape)) for name in sorted(shapes)]


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray:
    """A value in a checkpoint, an array of numpy, as `tf.train.load_variable`.

    >>> import estimator as est, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> np.savez(path, **{"dense/bias": np.array([1.0, 2.0])})
    >>> est.load_variable(path, "dense/bias")
    array([1., 2.])

    Args:
      ckpt_dir_or_file: as for `est.list_variables`.
      name: as `est.list_variables` lists it.

    Raises:
      ValueError: there is no such checkpoint, no such name in it, or it is damaged.
    """
    reader = open_reader("est.load_variable", ckpt_dir_or_file)
    if name not in reader.shapes:
        raise ValueError(
            f"`est.load_variable`: {reader.path} has no variable {name!r}. Did you mean one of "
            f"{near(name, reader.shapes)}? `est.list_variables` lists all."
        )
    return reader.read([name])[name]


def near(name: str, names: Collection[str]) -> list[str]:
    """A few names, those that are like one if there are any."""
    return difflib.get_close_matches(name, list(names), cutoff=0.5) or sorted(names)[:5]


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def as_of_jax(array: ShapeDtype) -> ShapeDtype:
    """The shape and dtype that jax gives to an array of numpy: 64 bits become 32 without x64."""
    if np.dtype(array.dtype).kind in "fiuc":
        return _Kind(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
    return array


class _Checkpoint:
    def __init__(self, path: str) -> None:
        self.path = path
        self.shapes: Mapping[str, ShapeDtype] = _checkpoints.shapes(path)

    def variables(self) -> list[str]:
        return list(_checkpoints.shapes(self.path, slots=False))

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return _checkpoints.read_all(self.path, names)


class _Export:
    """An exported model; it has no slots."""

    _PREFIX = "variables/"

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = ExportFolder(path)
        arrays = self._folder.metadata["weights"].items()
        self.shapes: Mapping[str, ShapeDtype] = {
            name.removeprefix(self._PREFIX): jax.ShapeDtypeStruct(x["shape"], jnp.dtype(x["dtype"]))
            for name, x in arrays
            if name == _STEP or name.startswith(self._PREFIX)
        }

    def variables(self) -> list[str]:
        return list(self.shapes)

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        weights = self._folder.weights
        return {name: weights[name if name == _STEP else self._PREFIX + name] for name in names}


class _TensorFlow:
    """A checkpoint of TensorFlow. Its slots have names like any other."""

    def __init__(self, prefix: str) -> None:
        self.path = prefix
        self._bundle = TensorFlowBundle(prefix)
        self.shapes: Mapping[str, ShapeDtype] = {name: _Kind(*kind) for name, kind in self._bundle.shapes.items()}

    def variables(self) -> list[str]:
        return list(self.shapes)

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self._bundle.read(name) for name in names}


class _Npz:
    """What `np.savez` wrote."""

    def __init__(self, path: str) -> None:
        self.path = path
        shapes: dict[str, ShapeDtype] = {}
        with zipfile.ZipFile(path) as file:
            for member in file.namelist():
                with file.open(member) as array:
                    version = npy.read_magic(array)
                    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                    shape, _, dtype = read(array)
                shapes[member.removesuffix(".npy")] = _Kind(shape, dtype)
        self.shapes: Mapping[str, ShapeDtype] = shapes

    def variables(self) -> list[str]:
        return list(self.shapes)

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        with np.load(self.path) as file:
            return {name: file[name] for name in names}


class _Safetensors:
    """A file of the safetensors format: the length of a header, the header, which is JSON, and the bytes of the arrays.

    Read here, not by the package of that name: its arrays of numpy have no bfloat16.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._begin = 8 + length
            if self._begin > os.path.getsize(path):
                raise ValueError("its header is not complete")
            self._header = json.loads(file.read(length))
        self._header.pop("__metadata__", None)
        end = max((x["data_offsets"][1] for x in self._header.values()), default=0)
        if os.path.getsize(path) < self._begin + end:
            raise ValueError("its end is missing")
        unknown = sorted({x["dtype"] for x in self._header.values()} - _SAFETENSORS.keys())
        if unknown:
            raise ValueError(f"its arrays of the kinds {unknown} are not known here")
        self.shapes: Mapping[str, ShapeDtype] = {
            name: _Kind(tuple(x["shape"]), jnp.dtype(_SAFETENSORS[x["dtype"]])) for name, x in self._header.items()
        }

    def variables(self) -> list[str]:
        return list(self.shapes)

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        values = {}
        with open(self.path, "rb") as file:
            for name in names:
                begin, end = self._header[name]["data_offsets"]
                file.seek(self._begin + begin)
                shape, dtype = self.shapes[name].shape, self.shapes[name].dtype
                values[name] = np.frombuffer(file.read(end - begin), dtype).reshape(shape)
        return values
