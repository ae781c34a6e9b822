"""The folder of an exported model."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.checkpoint._named_arrays import describe
from estimator.core._export_output import DEFAULT_SIGNATURE
from estimator.storage._array_files import Npz
from estimator.storage._files import is_url, list_dir
from estimator.storage._folders import LocalCopy
from estimator.storage._sealed_folder import SealedFolder

FORMAT = "estimator export 1"
METADATA_FILE = "metadata.json"
WEIGHTS_FILE = "weights.npz"
README_FILE = "README.md"
CHECKSUMS_FILE = "checksums.json"


def find_export(path: str) -> str | None:
    """Finds the folder of the exported model at `path`, or of the newest one in it; None if there is none."""
    if is_export(path):
        return path
    numbers = sorted((int(name) for name in list_dir(path) if name.isdecimal()), reverse=True)
    return next(filter(is_export, (os.path.join(path, str(number)) for number in numbers)), None)


class ExportFolder(SealedFolder):
    """An exported model on disk. Reading raises a `DamagedError`, which names the file that is missing or damaged.

    Attributes:
      path: the folder.
    """

    kind = "exported model at"
    manifest = CHECKSUMS_FILE
    mend = "Copy the folder again, or export the model again."

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The contents of its `metadata.json`."""
        with self.parsing(METADATA_FILE):
            metadata = dict(json.loads(self.read(METADATA_FILE)))
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{self.file(METADATA_FILE)} does not belong to an exported model of this version: its format must be "
                f"{FORMAT!r}; got {metadata.get('format')!r:.100}. Export the model again."
            )
        with self.parsing(METADATA_FILE):
            _check_signatures(metadata)
        return metadata

    @functools.cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the weights by name."""
        with self.parsing(METADATA_FILE):
            return {name: _struct(name, entry) for name, entry in self.metadata["weights"].items()}

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the dtypes of the metadata."""
        with self.parsing(WEIGHTS_FILE):
            reader = Npz("numpy.load", self.files[WEIGHTS_FILE])
            for name, like in self.shapes.items():  # before anything is unpacked
                kind = reader.shapes[name]
                if (kind.shape, kind.dtype.itemsize) != (like.shape, like.dtype.itemsize):
                    raise ValueError(f"{name!r} is {describe(kind)} instead of {describe(like)}")
            return {
                name: array.view(self.shapes[name].dtype) for name, array in reader.read_bits([*self.shapes]).items()
            }

    def read(self, name: str) -> bytearray:
        """Reads the bytes of a file that the manifest names."""
        if name not in self.files:
            raise self.make_error(f"{METADATA_FILE} names the file {name!r}, and {CHECKSUMS_FILE} does not")
        with open(self.files[name], "rb") as file:
            return bytearray(file.read())

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The local paths of the files that the manifest names, by their names from the folder on."""
        # Compared before anything is parsed: a damaged program may crash the process that reads it.
        folder, (_, names) = self.fetch(self._copy), self.read_manifest()
        if names is None:
            raise self.make_error(f"{CHECKSUMS_FILE} is missing")
        for name in (METADATA_FILE, WEIGHTS_FILE):
            if name not in names:
                raise self.make_error(f"{CHECKSUMS_FILE} does not name {name}")
        return {name: os.path.join(folder, name) for name in names}

    @functools.cached_property
    def _copy(self) -> LocalCopy:
        return LocalCopy(self.path)


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
            case {"file": str()} if _are_strings(entry.get("class_names", [])):
                if all(names is None or _are_strings(names) for names in entry.get("strings", {}).values()):
                    continue
        raise ValueError(f"the signature {name!r} needs a file, and has {entry!r:.100}")
    if DEFAULT_SIGNATURE not in metadata["signatures"]:
        raise ValueError(f"there is no signature {DEFAULT_SIGNATURE!r}")


def _are_strings(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def is_export(path: str) -> bool:
    """Returns whether a folder holds an exported model; in a store, a whole one."""
    folder = ExportFolder(path)
    has = folder.has(METADATA_FILE), folder.is_sealed()
    # In a store, only one of the files may mean an upload that is not complete. On a disk a folder gets its name when
    # it is complete: a missing file is damage, and reading raises an error.
    return all(has) if is_url(path) else any(has)
