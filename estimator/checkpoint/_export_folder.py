"""The folder of an exported model: the names of its files, and their checksums."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from typing import Any

import numpy as np

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
    """The folder of the exported model at `path`, or of the newest one in it; None if there is none."""
    if _is_export(path):
        return path
    numbers = sorted((int(name) for name in list_dir(path) if name.isdecimal()), reverse=True)
    return next(filter(_is_export, (os.path.join(path, str(number)) for number in numbers)), None)


class ExportFolder:
    """An exported model on disk. All its files except the README are compared with their checksums first: a damaged
    program may crash the process that reads it.

    Attributes:
      path: the folder.
      metadata: the contents of its `metadata.json`.

    Raises:
      ValueError: a file is missing or damaged, or of another version; the message names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._copy = LocalCopy(path)
        self._copy.fetch()
        self._check_files()
        with open(self._file(METADATA_FILE), encoding="utf-8") as file:
            self.metadata: dict[str, Any] = json.load(file)
        if self.metadata.get("format") != FORMAT:
            raise ValueError(
                f"{os.path.join(self.path, METADATA_FILE)} does not belong to an exported model of this version: its "
                f"format must be {FORMAT!r}; got {self.metadata.get('format')!r}. Export the model again."
            )

    def read(self, name: str) -> bytearray:
        with open(self._file(name), "rb") as file:
            return bytearray(file.read())

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the dtypes of the metadata."""
        with np.load(self._file(WEIGHTS_FILE)) as saved:
            return {name: saved[name].view(array["dtype"]) for name, array in self.metadata["weights"].items()}

    def _file(self, name: str) -> str:
        return os.path.join(self._copy.path, name)

    def _check_files(self) -> None:
        sums = self._checksums()
        for name in {METADATA_FILE: None, WEIGHTS_FILE: None, **sums}:
            if name not in sums:
                raise self._damaged(f"{CHECKSUMS_FILE} does not name {name}")
            try:
                is_same = _sha256(self._file(name)) == sums[name]
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise self._damaged(f"{name}, which {CHECKSUMS_FILE} names, is missing") from None
            if not is_same:
                raise self._damaged(f"{name} is not what was written, or {CHECKSUMS_FILE} is not: they do not agree")

    def _checksums(self) -> dict[str, str]:
        try:
            with open(self._file(CHECKSUMS_FILE), encoding="utf-8") as file:
                sums = json.load(file)["sha256"]
        except FileNotFoundError:
            raise self._damaged(f"{CHECKSUMS_FILE} is missing") from None
        except (ValueError, LookupError, TypeError) as e:  # not text, not JSON, not a dict, or without the key
            raise self._damaged(f"{CHECKSUMS_FILE} is not what was written ({e!r})") from e
        if not isinstance(sums, dict):
            raise self._damaged(f"{CHECKSUMS_FILE} is not what was written ({sums!r})")
        return sums

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"The exported model at {self.path} is damaged: {what}. Copy the folder again, or export the model again."
        )


def _is_export(path: str) -> bool:
    has = [exists(os.path.join(path, name)) for name in (METADATA_FILE, CHECKSUMS_FILE)]
    return all(has) if is_url(path) else any(has)  # one alone: it is being uploaded, or damaged


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
