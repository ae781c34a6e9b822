"""Folders of a store; programs that only know local files see copies of them."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Sequence

from estimator.storage._files import exists, files_in, is_url, store_of


def upload(folder: str, url: str, first: Sequence[str] = (), last: Sequence[str] = ()) -> None:
    """Copies the files of a local folder to a store, those called `first` before all others, `last` after."""
    # A store has no renames: only the order makes sure that a folder with the last file is complete.
    store, base = store_of(url)
    names = files_in(folder)
    others = sorted(names.keys() - {*first, *last})
    for some in (*([name] for name in first if name in names), others, *([name] for name in last if name in names)):
        if some:
            store.put([os.path.join(folder, name) for name in some], [f"{base}/{name}" for name in some])


def download(url: str, folder: str, names: Collection[str]) -> None:
    """Copies files of a folder in a store to a local folder.

    Raises:
      FileNotFoundError: one is not there, or no longer.
    """
    store, base = store_of(url)
    if names:
        store.get([f"{base}/{name}" for name in names], [os.path.join(folder, name) for name in names])


class LocalCopy:
    """A folder to read: itself, or, where it is in a store, a copy that lives as long as this object.

    Attributes:
      path: of the folder.
    """

    def __init__(self, path: str) -> None:
        self._url = path if is_url(path) else None
        self.path = path if self._url is None else _temporary_folder(self)
        self._here: set[str] = set()
        self._lock = threading.Lock()

    def fetch(self, wants: Callable[[str], bool] = lambda name: True) -> None:
        """Copies those files whose names from the folder on are wanted, and that are not here yet."""
        if self._url is None:
            return
        with self._lock:
            missing = set(filter(wants, files_in(self._url))) - self._here
            download(self._url, self.path, missing)
            self._here |= missing  # after the download, which may fail


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
