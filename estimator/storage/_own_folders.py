"""Folders that this package has made within a user's directory, and that it alone removes: a file in each says so."""

from __future__ import annotations

import contextlib
import os
import shutil

from estimator.storage._files import files_in, is_url, read, remove, remove_dir, store_of

MARK = "MADE_BY_ESTIMATOR"
MARK_TEXT = b"An Estimator has made this folder, and may remove it.\n"


def make_own(path: str) -> None:
    """Makes a local folder that can be recognized; it may be there, if it is empty.

    Raises:
      FileExistsError: something else is there.
    """
    os.makedirs(path, exist_ok=True)
    if os.listdir(path):
        raise FileExistsError(f"{path} was not made by an Estimator, which needs its place. Move it away.")
    mark_own(path)


def mark_own(path: str) -> None:
    with open(os.path.join(path, MARK), "wb") as file:
        file.write(MARK_TEXT)


def is_own(path: str) -> bool:
    """Returns whether a folder is one that this package has made."""
    try:
        # A kill may have left the mark empty or incomplete.
        return MARK_TEXT.startswith(read(os.path.join(path, MARK)))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def empty_own(path: str) -> None:
    """Removes what it can of all in a local folder but its mark, by which the next save removes the rest."""
    with contextlib.suppress(FileNotFoundError):
        for inner in (os.path.join(path, name) for name in os.listdir(path) if name != MARK):
            if os.path.isdir(inner) and not os.path.islink(inner):
                shutil.rmtree(inner, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.remove(inner)


def remove_own(path: str, first: str | None = None) -> None:
    """Removes a folder, which need not be there: the file `first` before all others, and the mark as the last one."""
    with contextlib.suppress(FileNotFoundError):
        if first is not None:
            remove(os.path.join(path, first))
    with contextlib.suppress(FileNotFoundError):
        if is_url(path):
            store, base = store_of(path)
            # If it is killed, the mark is left, by which the next save recognizes the rest and removes it.
            names = [f"{base}/{name}" for name in files_in(path) if name != MARK]
            if names:
                store.rm(names)
        else:
            empty_own(path)
        remove_dir(path)
