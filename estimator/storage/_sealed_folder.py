"""A folder that is whole or not there. It is filled elsewhere, sealed, and then renamed or uploaded.

The seal is a manifest with the name of the folder, the sizes and checksums of its files, and a checksum of itself. It
is written when all other files are there; then all is synced, and the folder gets its name. A store has no renames:
there the manifest is uploaded last. A mark, another file, says that this package has made a folder, and may remove it.

Checkpoints of version 0.1.0 have neither manifest nor mark. Of those, only JSON files can be checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import google_crc32c

from estimator.storage._files import (
    MISSING,
    exists,
    files_in,
    is_damage,
    is_inside,
    is_url,
    open_regular,
    read,
    remove,
    remove_dir,
    store_of,
    sync_tree,
    version_of,
    write,
)
from estimator.storage._folders import LocalCopy
from estimator.storage._json import NOT_JSON

MANIFEST = "manifest.json"
MARK = "MADE_BY_ESTIMATOR"
MARK_TEXT = b"An Estimator has made this folder, and may remove it.\n"
_BYTES_AT_A_TIME = 2**20

T = TypeVar("T")

Files = dict[str, tuple[int | None, str]]  # the size, if it is known, and the checksum of each, by name

_damage_seen: dict[str, tuple[object, str]] = {}  # while files were read: their version then, and the reason, by path
_verified: set[tuple[str, str, int, int, int]] = set()  # files, as they were when their checksums were compared


class DamagedError(ValueError):
    """A sealed folder is not what was written."""

    def __init__(self, kind: str, path: str, reason: str, mend: str) -> None:
        super().__init__(f"The {kind} {path} is damaged: {reason}. {mend}")
        self.path, self.reason = path, reason


@dataclasses.dataclass(frozen=True)
class SealedFolder:
    """A folder at a path, which need not be there. Its files are read if they are those that were written.

    >>> import tempfile
    >>> folder = SealedFolder(tempfile.mkdtemp())
    >>> write(folder.file("a"), b"one")
    >>> folder.seal()
    >>> folder.read_file("a")
    b'one'
    >>> write(folder.file("a"), b"two")
    >>> folder.read_file("a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    estimator.storage._sealed_folder.DamagedError: The folder ... is damaged: a does not have the checksum that ...

    Attributes:
      path: of the folder, or its URL.
    """

    path: str

    kind: ClassVar[str] = "folder"
    mend: ClassVar[str] = "Copy it again."
    manifest: ClassVar[str] = MANIFEST
    name_pattern: ClassVar[str] = ".*"  # a pattern of the names that it may have in its manifest
    json_files: ClassVar[tuple[str, ...]] = ()  # checked where there is no manifest

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def has(self, name: str) -> bool:
        return exists(self.file(name))

    def make_error(self, reason: str) -> DamagedError:
        return DamagedError(self.kind, self.path, reason, self.mend)

    # Filling and removing it.

    def make(self) -> None:
        """Makes a local folder that can be recognized; it may be there, if it is empty.

        Raises:
          FileExistsError: something else is there.
        """
        os.makedirs(self.path, exist_ok=True)
        if os.listdir(self.path):
            raise FileExistsError(f"{self.path} was not made by an Estimator, which needs its place. Move it away.")
        self.mark()

    def mark(self) -> None:
        with open(self.file(MARK), "wb") as file:
            file.write(MARK_TEXT)

    def is_own(self) -> bool:
        """Returns whether this package has made it."""
        return self.has(MARK)  # whatever a crash of the machine has left in that file

    def seal(self, without: Collection[str] = ()) -> None:
        """Writes the manifest of a local folder, of all files except `without`, and syncs all of it to the disk."""
        sizes = {
            name: size for name, size in sorted(files_in(self.path).items()) if name not in (self.manifest, *without)
        }
        sums = _side_by_side(lambda name: self._sum(name, self.file(name)), sizes)
        files = {name: (size, crc) for (name, size), crc in zip(sizes.items(), sums, strict=True)}
        self._write_manifest(os.path.basename(self.path), files)
        sync_tree(self.path)

    def add_empty_file(self, name: str) -> None:
        """Writes an empty file, and notes it in the manifest."""
        # The file first: a kill between the two leaves a file that is not in the manifest, which is not damage.
        write(self.file(name), b"")
        written_name, files = self.read_manifest()
        if files is not None:
            self._write_manifest(written_name, {**files, name: (0, "00000000")})

    def _write_manifest(self, name: str, files: Mapping[str, tuple[int | None, str]]) -> None:
        contents = {"name": name, "crc32c": files}
        write(
            self.file(self.manifest), json.dumps(contents | {"crc32c_of_this": _own_sum(contents)}, indent=1).encode()
        )

    def empty(self) -> None:
        """Removes what it can of all in a local folder but its mark, by which the next save removes the rest."""
        with contextlib.suppress(FileNotFoundError):
            for inner in (self.file(name) for name in os.listdir(self.path) if name != MARK):
                if os.path.isdir(inner) and not os.path.islink(inner):
                    shutil.rmtree(inner, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.remove(inner)

    def remove_files(self, first: str | None = None) -> None:
        """Removes it, if it is there: the file `first` before all others, and the mark as the last one."""
        with contextlib.suppress(FileNotFoundError):
            if first is not None:
                remove(self.file(first))
        with contextlib.suppress(FileNotFoundError):
            if is_url(self.path):
                store, base = store_of(self.path)
                # If it is killed, the mark is left, by which the next save recognizes the rest and removes it.
                names = [f"{base}/{name}" for name in files_in(self.path) if name != MARK]
                if names:
                    store.rm(names)
            else:
                self.empty()
            try:
                remove_dir(self.path)
            except OSError as error:
                # NFS and FUSE keep an open file under another name until it is closed. The next save removes the rest.
                if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                    raise

    # Checking and reading it.

    @property
    def written_name(self) -> str:
        """The name under which it was written, which it may not have any more."""
        with contextlib.suppress(OSError, DamagedError):
            return self.read_manifest()[0]
        return os.path.basename(self.path)

    def is_sealed(self) -> bool:
        return self.has(self.manifest)

    def read_manifest(self) -> tuple[str, Files | None]:
        """Reads the name and the files by name, which are None without a manifest."""
        try:
            with self.explain_errors_of(self.manifest, but=MISSING):
                text = read(self.file(self.manifest))
        except MISSING:
            if self.is_own():
                raise self.make_error(f"{self.manifest} is missing") from None
            return os.path.basename(self.path), None  # version 0.1.0 wrote neither manifest nor mark
        with self.parsing(self.manifest):
            name, files = _decode(text)
            if not re.fullmatch(self.name_pattern, name):
                raise ValueError(f"it names the folder {name!r:.50}")
        return name, files

    def check_sizes(self) -> None:
        """Compares the sizes of all files with the manifest.

        Raises:
          DamagedError: they differ, or damage was seen before while the files were read.
        """
        _, files = self.read_manifest()
        if files is None:
            for name in self.json_files:
                self._check_json(name)
        sizes = files_in(self.path)
        for name, (size, _) in (files or {}).items():
            if name not in sizes:
                raise self.make_error(f"{name:.100} is missing")
            self._check_size(name, sizes[name], size)
        # The sizes may be right where reading a file has failed before. The folder counts as damaged until one of its
        # files changes.
        if self.path in _damage_seen:
            version, reason = _damage_seen[self.path]
            if version == version_of(self.path):
                raise self.make_error(reason)

    def fetch(self, copy: LocalCopy, wants: Callable[[str], bool] = lambda name: True) -> str:
        """Returns a local folder with these files, once they are those that were written. Checksums of files that have
        not changed are compared only once.

        Args:
          copy: of the folder.
          wants: chooses files by their names.

        Raises:
          DamagedError: they differ from the manifest.
        """
        with self.explain_errors_of("a file", but=MISSING):  # in a store
            copy.fetch(wants)
        expected = {name: file for name, file in (self.read_manifest()[1] or {}).items() if wants(name)}
        todo: dict[str, tuple[str, str, int, int, int]] = {}
        for name, (size, crc) in expected.items():
            with self.explain_errors_of(name):
                stat = os.stat(os.path.join(copy.path, name))
            self._check_size(name, stat.st_size, size)
            key = os.path.join(copy.path, name), crc, stat.st_size, stat.st_mtime_ns, stat.st_ino
            if key not in _verified:
                todo[name] = key
        sums = _side_by_side(lambda item: self._sum(item[0], *item[1][:2]), todo.items())
        for name, crc in zip(todo, sums, strict=True):
            if crc != expected[name][1]:
                raise self._note(f"{name} does not have the checksum that {self.manifest} names")
        _verified.update(todo.values())
        return os.path.abspath(copy.path)

    def read_file(self, name: str) -> bytes:
        """Reads a file, and compares it with the manifest.

        Raises:
          DamagedError: they do not agree.
          FileNotFoundError: there is no such file.
        """
        with self.explain_errors_of(name, but=MISSING):
            contents = read(self.file(name))
        _, files = self.read_manifest()
        if files is None:
            self._check_json(name)
        elif name not in files or files[name] != (len(contents), f"{google_crc32c.value(contents):08x}"):
            raise self._note(f"{name} does not have the checksum that {self.manifest} names")
        return contents

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Raises errors within the block as damage, if no checksum has shown that there is none."""
        try:
            yield
        except DamagedError:
            raise
        except Exception as error:
            if not self.is_sealed():
                raise self._note(f"it cannot be read ({error})") from error
            if not isinstance(error, NOT_JSON):
                raise
            raise ValueError(f"{self.path} cannot be read, though its files are what was written: {error}") from error

    @contextlib.contextmanager
    def parsing(self, name: str) -> Iterator[None]:
        """Raises errors of parsing a file as damage."""
        try:
            yield
        except (DamagedError, OSError, MemoryError):
            raise
        except Exception as error:  # of many kinds
            raise self.make_error(f"{name} is not what was written ({error!r:.200})") from error

    @contextlib.contextmanager
    def explain_errors_of(self, name: str, but: Any = ()) -> Iterator[None]:
        """Raises errors of reading a file as damage, unless permissions, memory or files are lacking."""
        try:
            yield
        except OSError as error:
            if isinstance(error, but) or not is_damage(error):
                raise
            reason = (
                "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"
            )
            raise self.make_error(f"{name:.100} {reason}") from error

    def _check_size(self, name: str, size: int, written: int | None) -> None:
        if size < 0:
            raise self.make_error(f"{name} is not a regular file")
        if written not in (None, size):
            raise self.make_error(f"{name} has {size} bytes; {written} were written")

    def _check_json(self, name: str) -> None:
        with self.explain_errors_of(name), self.parsing(name):
            json.loads(read(self.file(name)))

    def _note(self, reason: str) -> DamagedError:
        _damage_seen[self.path] = version_of(self.path), reason
        return self.make_error(reason)

    def _sum(self, name: str, path: str, like: str = "") -> str:
        """The CRC-32C of a local file; if `like` is as long as one, the SHA-256."""
        summed = hashlib.sha256() if len(like) == 64 else google_crc32c.Checksum()
        with self.explain_errors_of(name), open_regular(path) as file:
            while contents := file.read(_BYTES_AT_A_TIME):
                summed.update(contents)
        return summed.digest().hex()


@functools.lru_cache(16)  # a call of an Estimator reads the same manifest some ten times
def _decode(text: bytes) -> tuple[str, Files]:
    """The name and the files; raises one of `NOT_JSON` if they are not what was encoded."""
    contents = json.loads(text)
    if contents.keys() == {"sha256"}:  # of an export of version 0.1.0
        return "", _check_files({file: (None, each) for file, each in contents["sha256"].items()})
    if contents.pop("crc32c_of_this") != _own_sum(contents):
        raise ValueError("it does not have its own checksum")
    return contents["name"], _check_files({file: (size, crc) for file, (size, crc) in contents["crc32c"].items()})


def _check_files(files: Files) -> Files:
    for name, (size, crc) in files.items():
        if not isinstance(size, int | None) or not isinstance(crc, str) or not is_inside(name):
            raise ValueError(f"it names the file {name!r:.50}, {size!r:.20}, {crc!r:.20}")
    return files


def _own_sum(contents: Mapping[str, Any]) -> str:
    return f"{google_crc32c.value(json.dumps(contents).encode()):08x}"


def _side_by_side(function: Callable[[T], str], items: Collection[T]) -> list[str]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(function, items))
