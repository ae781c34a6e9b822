"""Files by their paths: on the local file system, or by URL in a store that fsspec knows, such as `s3://bucket/run`.

A store writes a file whole or not at all. It has no directories but the names of its files, and no appends, renames
and locks; so whoever writes several files writes the one last that says they are whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import fsspec

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of this package, by the protocol of a URL
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names something in a store.

    >>> is_url("s3://bucket/run"), is_url("/tmp/run")
    (True, False)
    """
    return "://" in os.fspath(path)


def store_of(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The store of a URL, and the path in it."""
    protocol = url.partition("://")[0]
    try:
        import fsspec.core

        # Listings are not cached: other processes write, too.
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        how = f"pip install 'replicate-model-fn[{extra}]'" if extra else "install the package that fsspec names"
        raise ImportError(f"{url!r} is in a store that needs another package: {how}. ({error})") from error
    except ValueError as error:
        raise ValueError(
            f"{url!r} is neither a local path nor a URL that fsspec knows, such as 's3://bucket/run': {error}"
        ) from error


def expand(path: str | os.PathLike[str]) -> str:
    """Expands "~" in a path that a user gives, as in a model_dir."""
    text = os.fspath(path)
    return text if is_url(text) else os.path.expanduser(text)


def normalize(path: str | os.PathLike[str]) -> str:
    """Returns the path in the one form that is compared."""
    text = os.fspath(path)
    return text.rstrip("/") if is_url(text) else os.path.normpath(text)


def make_absolute(path: str | os.PathLike[str]) -> str:
    return normalize(path) if is_url(path) else os.path.abspath(path)


def exists(path: str) -> bool:
    if not is_url(path):
        return os.path.exists(path)
    store, name = store_of(path)
    return store.exists(name)


def is_dir(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is such a directory; in a store, whether a file has a name that begins so."""
    path = os.fspath(path)
    if not is_url(path):
        return os.path.isdir(path)
    store, name = store_of(path)
    return store.isdir(name)


def list_dir(path: str) -> list[str]:
    """Lists the names in a directory, which need not exist."""
    if not is_url(path):
        return os.listdir(path) if os.path.isdir(path) else []
    store, name = store_of(path)
    try:
        return sorted({os.path.basename(each.rstrip("/")) for each in store.ls(name, detail=False)} - {""})
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_in(path: str) -> dict[str, int]:
    """The sizes of the files in a directory and those below it, by their names from there."""
    if not is_url(path):
        sizes, start = {}, len(os.path.join(path, ""))
        for file in (os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names):
            with contextlib.suppress(FileNotFoundError):  # another process has renamed or removed it since the listing
                sizes[file[start:].replace(os.sep, "/")] = os.path.getsize(file)
        return sizes
    store, base = store_of(path)
    infos: dict[str, Any] = store.find(base, detail=True)
    return {name[len(base) :].lstrip("/"): info["size"] for name, info in infos.items()}


def version_of(directory: str) -> object:
    """A value that changes when a file in a directory or below it is written."""
    if is_url(directory):
        store, base = store_of(directory)
        return repr(sorted(store.find(base, detail=True).items()))
    version = {}
    for file in (os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names):
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(file)
            version[file] = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return version


def read(path: str) -> bytes:
    if not is_url(path):
        with open(path, "rb") as file:
            return file.read()
    store, name = store_of(path)
    return store.cat_file(name)


def write(path: str, contents: bytes) -> None:
    """Writes a file, which has its old contents or the new ones at any time; on return the new ones are on the disk."""
    if is_url(path):
        store, name = store_of(path)
        store.pipe_file(name, contents)
        return
    new = f"{path}.{uuid.uuid4().hex}.new"  # each writer has its own file
    try:
        with open(new, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        # The contents are on the disk before the rename, and the new name before the caller continues: a crash of the
        # machine at any time leaves the old file or the new one.
        os.replace(new, path)
        _sync(os.path.dirname(os.path.abspath(path)))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(new)
        raise


def rename(old: str, new: str) -> None:
    """Renames a local file or directory; the new name is on the disk when this returns."""
    os.rename(old, new)
    _sync(os.path.dirname(os.path.abspath(new)))


def sync_tree(directory: str) -> None:
    """Waits until a local directory, with all that is in it, is on the disk."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(os.path.join(parent, name))
        _sync(parent)


def _sync(path: str) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # some file systems sync no directories
            raise
    finally:
        os.close(opened)


def remove(path: str) -> None:
    """Removes a file.

    Raises:
      FileNotFoundError: it does not exist.
    """
    if not is_url(path):
        os.remove(path)
        return
    store, name = store_of(path)
    store.rm_file(name)


def remove_dir(path: str) -> None:
    """Removes a directory and all in it.

    Raises:
      FileNotFoundError: it does not exist.
    """
    if not is_url(path):
        shutil.rmtree(path)
        return
    store, name = store_of(path)
    store.rm(name, recursive=True)


def lock_if_possible(file: int, exclusive: bool) -> str | None:
    """Locks an open file until it is closed here and in child processes; returns the reason if there are no locks.

    It waits for a lock that is not exclusive.

    Raises:
      BlockingIOError: `exclusive`, and somebody else has a lock.
    """
    if fcntl is None:
        return "the system has no file locks"
    try:
        # The operating system releases the lock when the process ends, also if it is killed.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return None
