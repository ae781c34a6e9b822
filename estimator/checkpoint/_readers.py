"""Readers of the values of variables, with one interface for checkpoints of any kind."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np

from estimator.checkpoint import _checkpoints
from estimator.checkpoint._checkpoint_dir import NotACheckpointError
from estimator.checkpoint._checkpoints import Checkpoints, ShapeDtype
from estimator.checkpoint._export_folder import ExportFolder, find_export
from estimator.checkpoint._orbax import verify
from estimator.storage._array_files import Kind, Npz, Safetensors
from estimator.storage._files import expanded
from estimator.tf_checkpoint._tf_bundle import TensorFlowBundle, tensorflow_prefix

T = TypeVar("T")

_STEP = "global_step"


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
    path = expanded(path)
    newest = Checkpoints(path).latest(verify)
    if newest is not None:
        return _Checkpoint(newest)
    if export := find_export(path):
        return _Export(export)
    if prefix := tensorflow_prefix(path):
        return _TensorFlow(prefix)
    if os.path.isfile(path):
        if path.endswith(".npz"):
            return Npz(caller, path)
        if path.endswith(".safetensors"):
            return Safetensors(caller, path)
    try:
        return _Checkpoint(path)
    except ValueError as e:
        raise ValueError(
            f"`{caller}` cannot read {path!r}: it is neither a checkpoint, nor a model_dir that has one, nor an "
            "exported model, a TensorFlow checkpoint (`model.ckpt-1000`, with `.index` and `.data-*` files), or a file "
            "`*.npz` or `*.safetensors`. Give the path of one."
        ) from e


def read_newest(caller: str, path: str | os.PathLike[str], read: Callable[[Reader], T]) -> T:
    """What is read at a path; of a model_dir whose newest checkpoint a training run removes meanwhile, from the next.

    Args and errors are as for `open_reader`.
    """
    failed = None
    while True:
        newest = Checkpoints(expanded(path)).latest() if isinstance(path, str | os.PathLike) else None
        try:
            return read(open_reader(caller, path))
        except NotACheckpointError:
            if newest == failed:
                raise
            failed = newest


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
    shapes = read_newest("est.list_variables", ckpt_dir_or_file, lambda reader: reader.shapes)
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

    def read(reader: Reader) -> np.ndarray:
        if name not in reader.shapes:
            raise ValueError(
                f"`est.load_variable`: {reader.path} has no variable {name!r}. Did you mean one of "
                f"{near(name, reader.shapes)}? `est.list_variables` lists all."
            )
        return reader.read([name])[name]

    return read_newest("est.load_variable", ckpt_dir_or_file, read)


def near(name: str, names: Collection[str]) -> list[str]:
    """A few names, those that are like one if there are any."""
    return difflib.get_close_matches(name, list(names), cutoff=0.5) or sorted(names)[:5]


def as_of_jax(array: ShapeDtype) -> ShapeDtype:
    """The shape and dtype that jax gives to an array of numpy: 64 bits become 32 without x64."""
    if np.dtype(array.dtype).kind in "fiuc":
        return Kind(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
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
        self.shapes: Mapping[str, ShapeDtype] = {
            name.removeprefix(self._PREFIX): like
            for name, like in self._folder.shapes.items()
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
        self.shapes: Mapping[str, ShapeDtype] = {name: Kind(*kind) for name, kind in self._bundle.shapes.items()}

    def variables(self) -> list[str]:
        return list(self.shapes)

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self._bundle.read(name) for name in names}
