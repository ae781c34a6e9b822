"""Readers of the values of variables, with one interface for checkpoints of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._export_folder import ExportFolder, find_export
from estimator.checkpoint._named_arrays import ShapeDtype, close_matches, describe
from estimator.checkpoint._newest import newest_readable
from estimator.storage._array_files import Kind, Npz, Reader, Safetensors
from estimator.storage._files import expand
from estimator.storage._torch_file import TorchFile
from estimator.variables._initial_value import cast

T = TypeVar("T")

_STEP = "global_step"
_TORCH = (".pt", ".pth", ".bin")


def read_newest(caller: str, path: str | os.PathLike[str], read: Callable[[Reader], T]) -> T:
    """Reads at a path; of a model_dir, the newest checkpoint that can be read.

    Args:
      caller: for the message.
      path: a model_dir or a checkpoint; an exported model, or the folder around several; a checkpoint of TensorFlow,
        one of its files, or its directory; an .npz or .safetensors file; or one of PyTorch.
      read: reads what it needs.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`{caller}` needs a path, a string; got {path!r}.")
    path = expand(path)
    # A folder may hold several of these: checkpoints of this library come first.
    found = newest_readable(path, lambda each: (read(_SavedState(each.verify())),))
    return read(_open_other(caller, path)) if found is None else found[0]


def _open_other(caller: str, path: str) -> Reader:
    if export := find_export(path):
        return _Export(export)
    from estimator.tf_checkpoint._tf_bundle import tensorflow_prefix

    if prefix := tensorflow_prefix(path):
        return _TensorFlow(prefix)
    if os.path.isfile(path):
        if path.endswith(".npz"):
            return Npz(caller, path)
        if path.endswith(".safetensors"):
            return Safetensors(caller, path)
        if path.endswith(_TORCH):
            return TorchFile(caller, path)
    # Any other path is read as a checkpoint, whose error says what is wrong.
    try:
        return _SavedState(Checkpoint(path))
    except NotACheckpointError as e:
        raise ValueError(
            f"`{caller}` cannot read {path!r}: it is neither a checkpoint, nor a model_dir that has one, nor an "
            "exported model, a TensorFlow checkpoint (`model.ckpt-1000`, with `.index` and `.data-*` files), or a file "
            "`*.npz`, `*.safetensors`, or of PyTorch, `*.pt`, `*.pth` or `*.bin`. Give the path of one."
        ) from e


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Lists the names and shapes of what a checkpoint holds, sorted by name, as `tf.train.list_variables`.

    >>> import estimator as est, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> np.savez(path, **{"dense/kernel": np.zeros((3, 2)), "dense/bias": np.zeros(2)})
    >>> est.list_variables(path)
    [('dense/bias', [2]), ('dense/kernel', [3, 2])]

    Args:
      ckpt_dir_or_file: a model_dir, for its newest checkpoint, or the path of a checkpoint; a checkpoint of TensorFlow
        (its prefix, such as "model.ckpt-1000", or its directory), which is read without TensorFlow; an .npz or
        .safetensors file; the state_dict of a module of PyTorch, a file .pt, .pth or .bin, for which torch has to be
        installed; or a folder that `export_model` wrote.

    Raises:
      ValueError: none of these is there, or it is damaged.
    """
    shapes = read_newest("est.list_variables", ckpt_dir_or_file, lambda reader: reader.shapes)
    return [(name, list(shapes[name].shape)) for name in sorted(shapes)]


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray:
    """Reads a value in a checkpoint, an array of numpy, as `tf.train.load_variable`.

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
                f"{close_matches(name, reader.shapes)}? `est.list_variables` lists all."
            )
        return reader.read([name])[name]

    return read_newest("est.load_variable", ckpt_dir_or_file, read)


def as_of_jax(array: ShapeDtype) -> ShapeDtype:
    """The shape and dtype that jax gives to an array of numpy: 64 bits become 32 without x64."""
    if np.dtype(array.dtype).kind in "fiuc":
        return Kind(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
    return array


def find_mismatches(
    there: Mapping[str, ShapeDtype], here: Mapping[str, ShapeDtype], dtypes: bool
) -> dict[str, tuple[str, str]]:
    """Finds the arrays that do not fit into a model: returns how each is described in the source, and in the model.

    Args:
      there: the arrays in the source, by the names in the model.
      here: those in the model.
      dtypes: whether dtypes have to be the same; otherwise `read_values` casts.
    """
    described = {name: (describe(array), describe(here[name])) for name, array in there.items()}
    if dtypes:
        return {name: kinds for name, kinds in described.items() if kinds[0] != kinds[1]}
    return {name: kinds for name, kinds in described.items() if tuple(there[name].shape) != tuple(here[name].shape)}


def read_values(
    reader: Reader, names: Mapping[str, str], like: Mapping[str, Any], prefix: str = ""
) -> dict[str, jax.Array]:
    """Reads the arrays of a model from a source.

    Args:
      reader: of the source.
      names: the names in the source, by the names in the model.
      like: the arrays of the model, to whose dtypes the values are cast.
      prefix: of the message.

    Raises:
      ValueError: a value does not fit into the dtype.
    """
    arrays = reader.read(sorted(set(names.values())))  # two arrays of the model may begin with one value
    return {
        name: cast(f"{prefix}{old!r} in {reader.path}", arrays[old], like[name].dtype) for name, old in names.items()
    }


class _SavedState(Reader):
    """A checkpoint of this library."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.path = checkpoint.path
        self.shapes = checkpoint.shapes()
        checkpoint.log_if_renamed()

    def variables(self) -> list[str]:
        return list(self._checkpoint.shapes(slots=False))

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return self._checkpoint.read_all(names)


class _Export(Reader):
    """An exported model; it has no slots."""

    _PREFIX = "variables/"

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = ExportFolder(path)
        self.shapes = {
            name.removeprefix(self._PREFIX): like
            for name, like in self._folder.shapes.items()
            if name == _STEP or name.startswith(self._PREFIX)
        }

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        weights = self._folder.weights
        return {name: weights[name if name == _STEP else self._PREFIX + name] for name in names}


class _TensorFlow(Reader):
    """A checkpoint of TensorFlow. Its slots have names like any other."""

    def __init__(self, prefix: str) -> None:
        from estimator.tf_checkpoint._tf_bundle import TensorFlowBundle

        self.path = prefix
        self._bundle = TensorFlowBundle(prefix)
        self.shapes = {name: Kind(*kind) for name, kind in self._bundle.shapes.items()}

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self._bundle.read(name) for name in names}
