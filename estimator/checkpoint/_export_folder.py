"""The folder of an exported model: the names of its files, and their checksums."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._export_output import DEFAULT_SIGNATURE
from estimator.storage._files import exists, files_in, is_url, list_dir
from estimator.storage._folders import LocalCopy

FORMAT = "estimator export 1"
METADATA_FILE = "metadata.json"
WEIGHTS_FILE = "weights.npz"
CHECKSUMS_FILE = "checksums.json"
README_FILE = "README.md"
_UNCHECKED = (CHECKSUMS_FILE, README_FILE)


def write_checksums(folder: str) -> None:
    """Writes the checksums of the files in a folder, once all of them are there."""
    sums = {name: _sha256(os.path.join(folder, name)) for name in sorted(files_in(folder)) if name not in _UNCHECKED}
    with open(os.path.join(folder, CHECKSUMS_FILE), "w", encoding="utf-8") as file:
        json.dump({"sha256": sums}, file, indent=1)


def find_export(path: str) -> str | None:
    """Finds the folder of the exported model at `path`, or of the newest one in it; None if there is none."""
    if is_export(path):
        return path
    numbers = sorted((int(name) for name in list_dir(path) if name.isdecimal()), reverse=True)
    return next(filter(is_export, (os.path.join(path, str(number)) for number in numbers)), None)


class ExportFolder:
    """An exported model on disk.

    Attributes:
      path: the folder.
      metadata: the contents of its `metadata.json`.
      shapes: the shapes and dtypes of the weights by name.

    Raises:
      ValueError: a file is missing or damaged, or of another version; the message names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._copy = LocalCopy(path)
        self._copy.fetch()
        # Before anything is parsed: a damaged program may crash the process that reads it.
        self._check_files()
        with self._name_errors(METADATA_FILE), open(self._file(METADATA_FILE), encoding="utf-8") as file:
            self.metadata: dict[str, Any] = dict(json.load(file))
        if self.metadata.get("format") != FORMAT:
            raise ValueError(
                f"{os.path.join(self.path, METADATA_FILE)} does not belong to an exported model of this version: its "
                f"format must be {FORMAT!r}; got {self.metadata.get('format')!r}. Export the model again."
            )
        with self._name_errors(METADATA_FILE):
            self.shapes = {name: _struct(name, entry) for name, entry in self.metadata["weights"].items()}
            _check_signatures(self.metadata)

    def read(self, name: str) -> bytearray:
        """Reads the bytes of a file that the checksums name."""
        if name not in self._sums:
            raise self.make_error(f"{METADATA_FILE} names the file {name!r}, and {CHECKSUMS_FILE} does not")
        with open(self._file(name), "rb") as file:
            return bytearray(file.read())

    def files(self) -> dict[str, str]:
        """The paths of the files that the checksums name, by their names from the folder on."""
        return {name: self._file(name) for name in self._sums}

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the dtypes of the metadata."""
        with self._name_errors(WEIGHTS_FILE), np.load(self._file(WEIGHTS_FILE)) as saved:
            weights = {name: saved[name].view(like.dtype) for name, like in self.shapes.items()}
            for name, like in self.shapes.items():
                if weights[name].shape != like.shape:
                    raise ValueError(f"{name!r} has the shape {weights[name].shape} instead of {like.shape}")
            return weights

    def _file(self, name: str) -> str:
        return os.path.join(self._copy.path, name)

    def _check_files(self) -> None:
        self._sums = sums = self._checksums()
        for name in {METADATA_FILE: None, WEIGHTS_FILE: None, **sums}:
            if name not in sums:
                raise self.make_error(f"{CHECKSUMS_FILE} does not name {name}")
            try:
                is_same = _sha256(self._file(name)) == sums[name]
            except PermissionError:
                raise
            except (OSError, ValueError):  # there cannot be a file of any name
                raise self.make_error(f"{name:.100}, which {CHECKSUMS_FILE} names, is missing") from None
            if not is_same:
                raise self.make_error(f"{name} is not what was written, or {CHECKSUMS_FILE} is not: they do not agree")

    def _checksums(self) -> dict[str, str]:
        with self._name_errors(CHECKSUMS_FILE), open(self._file(CHECKSUMS_FILE), encoding="utf-8") as file:
            return dict(json.load(file)["sha256"])

    @contextlib.contextmanager
    def _name_errors(self, name: str) -> Iterator[None]:
        """Raises all that goes wrong with the bytes of a file as one ValueError, which names it."""
        try:
            yield
        except FileNotFoundError:
            raise self.make_error(f"{name} is missing") from None
        except PermissionError:
            raise
        except Exception as e:  # parsing bytes raises many kinds
            raise self.make_error(f"{name} is not what was written ({e!r:.200})") from e

    def make_error(self, what: str) -> ValueError:
        """The error for a file that is not what was written."""
        return ValueError(
            f"The exported model at {self.path} is damaged: {what}. Copy the folder again, or export the model again."
        )


def _struct(name: str, entry: dict[str, Any]) -> jax.ShapeDtypeStruct:
    match entry:
        case {"shape": [*sizes], "dtype": str(dtype)} if all(type(n) is int and n >= 0 for n in sizes):
            return jax.ShapeDtypeStruct(tuple(sizes), jnp.dtype(dtype))
    raise ValueError(f"the weight {name!r} needs a shape and a dtype, and has {entry!r:.100}")


def _check_signatures(metadata: dict[str, Any]) -> None:
    if not isinstance(metadata["versions"]["jax"], str):
        raise ValueError(f"the version of jax is {metadata['versions']['jax']!r:.100}")
    for name, entry in metadata["signatures"].items():
        match entry:
            case {"file": str(), "class_names": [*names]} if all(isinstance(x, str) for x in names):
                continue
            case {"file": str()} if "class_names" not in entry:
                continue
        raise ValueError(f"the signature {name!r} needs a file, and has {entry!r:.100}")
    if DEFAULT_SIGNATURE not in metadata["signatures"]:
        raise ValueError(f"there is no signature {DEFAULT_SIGNATURE!r}")


def is_export(path: str) -> bool:
    """Returns whether a folder holds an exported model; in a store, a whole one."""
    has = [exists(os.path.join(path, name)) for name in (METADATA_FILE, CHECKSUMS_FILE)]
    # In a store, only one of the files may mean an upload that is not complete. On a disk a folder gets its name when
    # it is complete: a missing file is damage, and reading raises an error.
    return all(has) if is_url(path) else any(has)


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
