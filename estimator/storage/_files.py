"""Files by their paths: on the local file system, or by URL in a store that fsspec knows, such as `s3://bucket/run`.

A store writes a file whole or not at all. It has no directories but the names of its files, and no appends, renames
and locks; so whoever writes several files writes the one last that says they are whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

from estimator.runtime._extras import install

if TYPE_CHECKING:
    import fsspec

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of this package, by the protocol of a URL
MISSING = (FileNotFoundError, NotADirectoryError)
_DAMAGES = {"ELOOP", "EIO", "ESTALE", "EINVAL", "ENXIO", "ENAMETOOLONG", "EBADMSG", "EUCLEAN"}
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
        how = install(extra) if extra else "Install the package that fsspec names"
        raise ImportError(f"{url!r} is in a store that needs another package. {how}. ({error})") from error
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
    """The sizes of the files in a directory and those below it, by their names from there; -1 of what is not a regular
    file, such as a pipe."""
    if not is_url(path):
        start = len(os.path.join(path, ""))
        return {
            file[start:].replace(os.sep, "/"): x.st_size if x and stat.S_ISREG(x.st_mode) else -1
            for file, x in _stats(path)
        }
    store, base = store_of(path)
    infos: dict[str, Any] = store.find(base, detail=True)
    return {name[len(base) :].lstrip("/"): info["size"] for name, info in infos.items()}


def _stats(directory: str) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yields what is known of each local file below a directory; None of one that cannot be reached, as a link to
    itself."""
    for file in (os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names):
        try:
            yield file, os.stat(file)
        except FileNotFoundError:  # another process has renamed or removed it since the listing
            continue
        except OSError as error:
            if not is_damage(error):
                raise
            yield file, None


def version_of(directory: str) -> object:
    """A value that changes when a file in a directory or below it is written."""
    if is_url(directory):
        store, base = store_of(directory)
        return repr(sorted(store.find(base, detail=True).items()))
    return {file: x and (x.st_size, x.st_mtime_ns, x.st_ctime_ns, x.st_ino) for file, x in _stats(directory)}


def is_damage(error: OSError) -> bool:
    """Returns whether an error is of the file that was to be read, and not of permissions, memory or the network."""
    # Errors of a store may have no number.
    return isinstance(error, (*MISSING, IsADirectoryError)) or errno.errorcode.get(error.errno or 0) in _DAMAGES


def is_inside(name: object) -> bool:
    """Returns whether a name that was read from a file names something in a folder, and nothing outside of it."""
    if not isinstance(name, str) or name in ("", ".") or "\0" in name:
        return False
    return not os.path.isabs(name) and os.pardir not in name.replace(os.sep, "/").split("/")


def open_regular(path: str) -> BinaryIO:
    """Opens a local file for reading. Anything but a regular file, such as a pipe, is an error: it may have no end."""

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its other end

    file = open(path, "rb", opener=open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "It is not a regular file", path)
    return file


def read(path: str) -> bytes:
    if not is_url(path):
        with open_regular(path) as file:
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
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.remove(new)
        if isinstance(error, OSError):
            error.filename = path  # which that of a full disk lacks
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


def lock_if_possible(file: int, exclusive: bool, wait: bool = False) -> str | None:
    """Locks an open file until it is closed here and in child processes; returns the reason if there are no locks.

    It waits for a lock that is not exclusive, and, if `wait`, for any.

    Raises:
      BlockingIOError: `exclusive`, not `wait`, and somebody else has a lock.
    """
    if fcntl is None:
        return "the system has no file locks"
    try:
        # The operating system releases the lock when the process ends, also if it is killed.
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB) if exclusive else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return None
