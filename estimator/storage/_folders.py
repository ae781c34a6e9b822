"""Folders of a store, of which programs that know local files only see copies."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Sequence

from estimator.storage._files import exists, files_in, is_url, remove, remove_dir, store_of


def upload(folder: str, url: str, last: Sequence[str] = ()) -> None:
    """Copies the files of a local folder to a store, those called `last` after all others.

    So a folder that has the very last one is whole.
    """
    store, base = store_of(url)
    names = sorted(files_in(folder), key=lambda name: (name in last, name))
    count = len(names) - len(set(last) & set(names))
    for some in (names[:count], *([name] for name in last if name in names)):
        if some:
            store.put([os.path.join(folder, name) for name in some], [f"{base}/{name}" for name in some])


def download(url: str, folder: str, names: Collection[str] | None = None) -> None:
    """Copies files of a folder in a store, or all of them, to a local folder.

    Raises:
      FileNotFoundError: one is not there, or no longer.
    """
    store, base = store_of(url)
    some = sorted(files_in(url) if names is None else names)
    if some:
        store.get([f"{base}/{name}" for name in some], [os.path.join(folder, name) for name in some])


def remove_marked(url: str, mark: str) -> None:
    """Removes a folder of a store, the file first that says it is whole."""
    with contextlib.suppress(FileNotFoundError):
        remove(os.path.join(url, mark))
    with contextlib.suppress(FileNotFoundError):
        remove_dir(url)


class LocalCopy:
    """A folder to read: itself, or, where it is in a store, a copy that lives as long as this object.

    Attributes:
      path: of the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if is_url(path):
            self.path = _temporary_folder(self)
            download(path, self.path)


class WorkingFolder:
    """A folder whose files are appended to: a directory, or, where it is in a store, a local copy of some of its files.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> WorkingFolder(directory).path == directory
    True

    Args:
      directory: made if it does not exist.
      names: of the files to begin with, where they are there; of a directory: all.

    Attributes:
      path: of the folder.
    """

    def __init__(self, directory: str, names: Sequence[str] = ()) -> None:
        self._url = directory if is_url(directory) else None
        if self._url is None:
            self.path = directory
            os.makedirs(directory, exist_ok=True)
            return
        self.path = _temporary_folder(self)
        download(directory, self.path, [name for name in names if exists(os.path.join(directory, name))])

    def upload(self) -> None:
        """Copies the files back."""
        if self._url is not None:
            upload(self.path, self._url)


def _temporary_folder(owner: object) -> str:
    """A new folder, removed with its owner or when the process ends."""
    folder, process = tempfile.mkdtemp(), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    weakref.finalize(owner, remove)
    return folder
