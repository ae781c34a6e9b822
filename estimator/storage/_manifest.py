"""The manifest of a checkpoint: its name, and the sizes and checksums of its files and of itself, which show damage.

It is written when all other files are there, before the checkpoint gets its name. Checkpoints of version 0.1.0 have
none; an Estimator did not mark them as its own either. Of those, only the JSON files can be checked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c

from estimator.storage._files import exists, files_in, read, sync_tree, version_of, write
from estimator.storage._own_folders import is_own

MANIFEST = "manifest.json"
_BYTES_AT_A_TIME = 2**20
_JSON_FILES = ("_CHECKPOINT_METADATA", "arrays/_METADATA")

_Files = dict[str, tuple[int, int]]  # the size and the checksum of each, by name
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError)  # of a manifest: not text, not JSON, of another form

_damage_seen: dict[str, tuple[object, str]] = {}  # while files were read: their version then, and the reason, by path
_verified: set[tuple[str, int, int, int, int]] = set()  # files, as they were when their checksums were compared


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"The checkpoint {path} is damaged: {reason}. Copy it from where it is whole, or use another one: "
            "`python -m estimator.inspect MODEL_DIR --verify` says which are sound. Training does not begin at step 0 "
            "where all are damaged; for that, choose another model_dir, or remove them."
        )
        self.path, self.reason = path, reason


def write_manifest(folder: str, without: Collection[str]) -> None:
    """Writes the manifest of a local folder, of all files except `without`, and syncs all of it to the disk."""
    names = sorted(files_in(folder).keys() - {MANIFEST, *without})
    sums = _checksums([os.path.join(folder, name) for name in names])
    files = {name: (os.path.getsize(os.path.join(folder, name)), crc) for name, crc in zip(names, sums, strict=True)}
    write(os.path.join(folder, MANIFEST), _encode(os.path.basename(folder), files))
    sync_tree(folder)


def add_empty_file(path: str, name: str) -> None:
    """Writes an empty file into a checkpoint, and notes it in the manifest."""
    # The file first: a kill between the two leaves a file that is not in the manifest, which is not damage.
    write(os.path.join(path, name), b"")
    files = _files(path)
    if files is not None:
        write(os.path.join(path, MANIFEST), _encode(written_name(path), {**files, name: (0, 0)}))


def written_name(path: str) -> str:
    """Returns the name under which a checkpoint was written, which its folder may not have any more."""
    with contextlib.suppress(OSError, *_DAMAGES):  # no manifest, or a damaged one
        return _decode(read(os.path.join(path, MANIFEST)))[0]
    return os.path.basename(path)


def check_sizes(path: str) -> None:
    """Compares the sizes of all files with the manifest.

    Raises:
      DamagedCheckpointError: they differ, or damage was seen before while the arrays were read.
    """
    files = _files(path)
    if files is None:
        for name in _JSON_FILES:
            _check_json(path, name)
    sizes = files_in(path)
    for name, (size, _) in (files or {}).items():
        if name not in sizes:
            raise DamagedCheckpointError(path, f"{name} is missing")
        if sizes[name] != size:
            raise DamagedCheckpointError(path, f"{name} has {sizes[name]} bytes; {size} were written")
    # The sizes may be right where reading an array has failed before. The checkpoint counts as damaged until one of its
    # files changes.
    if path in _damage_seen:
        version, reason = _damage_seen[path]
        if version == version_of(path):
            raise DamagedCheckpointError(path, reason)


def check_sums(path: str, folder: str, wants: Callable[[str], bool] = lambda name: True) -> None:
    """Compares the checksums of files of a checkpoint with the manifest, those that have not changed since only once.

    Args:
      path: the checkpoint.
      folder: itself, or a local copy of it.
      wants: chooses files by their names.

    Raises:
      DamagedCheckpointError: they differ.
    """
    expected = {name: file for name, file in (_files(path) or {}).items() if wants(name)}
    todo: dict[str, tuple[str, int, int, int, int]] = {}
    for name, (size, crc) in expected.items():
        try:
            stat = os.stat(os.path.join(folder, name))
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedCheckpointError(path, f"{name} is missing") from None
        if stat.st_size != size:
            raise DamagedCheckpointError(path, f"{name} has {stat.st_size} bytes; {size} were written")
        key = os.path.join(folder, name), crc, stat.st_size, stat.st_mtime_ns, stat.st_ino
        if key not in _verified:
            todo[name] = key
    for name, crc in zip(todo, _checksums([key[0] for key in todo.values()]), strict=True):
        if crc != expected[name][1]:
            raise _note(path, f"{name} does not have the checksum that {MANIFEST} names")
    _verified.update(todo.values())


def read_checked(path: str, name: str) -> bytes:
    """Reads a file of a checkpoint, and compares it with the manifest.

    Raises:
      DamagedCheckpointError: they do not.
      FileNotFoundError: there is no such file.
    """
    contents = read(os.path.join(path, name))
    files = _files(path)
    if files is None:
        _check_json(path, name)
    elif name not in files or files[name] != (len(contents), google_crc32c.value(contents)):
        raise _note(path, f"{name} does not have the checksum that {MANIFEST} names")
    return contents


@contextlib.contextmanager
def explain_errors(path: str) -> Iterator[None]:
    """Raises errors within the block as damage, if no checksum has shown that there is none."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except Exception as error:
        if has_manifest(path):
            raise
        raise _note(path, f"it cannot be read ({error})") from error


def has_manifest(path: str) -> bool:
    return exists(os.path.join(path, MANIFEST))


def _note(path: str, reason: str) -> DamagedCheckpointError:
    _damage_seen[path] = version_of(path), reason
    return DamagedCheckpointError(path, reason)


def _files(path: str) -> _Files | None:
    """Reads the files by name; None without a manifest."""
    try:
        text = read(os.path.join(path, MANIFEST))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if is_own(path):
            raise DamagedCheckpointError(path, f"{MANIFEST} is missing") from None
        return None  # version 0.1.0 wrote neither manifest nor mark
    try:
        return _decode(text)[1]
    except _DAMAGES as error:
        raise DamagedCheckpointError(path, f"{MANIFEST} is not what was written ({error!r})") from None


def _encode(name: str, files: _Files) -> bytes:
    sums = {file: [size, f"{crc:08x}"] for file, (size, crc) in files.items()}
    contents = {"name": name, "crc32c": sums}
    return json.dumps(contents | {"crc32c_of_this": _own_sum(contents)}, indent=1).encode()


@functools.lru_cache(16)  # a call of an Estimator reads the same manifest some ten times
def _decode(text: bytes) -> tuple[str, _Files]:
    """The name and the files; raises one of `_DAMAGES` if they are not what was encoded."""
    contents = json.loads(text)
    if contents.pop("crc32c_of_this") != _own_sum(contents):
        raise ValueError("it does not have its own checksum")
    return contents["name"], {file: (size, int(crc, 16)) for file, (size, crc) in contents["crc32c"].items()}


def _own_sum(contents: Mapping[str, Any]) -> str:
    return f"{google_crc32c.value(json.dumps(contents).encode()):08x}"


def _check_json(path: str, name: str) -> None:
    try:
        json.loads(read(os.path.join(path, name)))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DamagedCheckpointError(path, f"{name} is missing") from None
    except ValueError as error:
        raise DamagedCheckpointError(path, f"{name} is not what was written ({error})") from None


def _checksums(files: Collection[str]) -> list[int]:
    """The CRC-32Cs of local files, read side by side."""
    if len(files) < 2:
        return list(map(_checksum, files))
    with ThreadPoolExecutor(min(4, len(files))) as threads:
        return list(threads.map(_checksum, files))


def _checksum(file: str) -> int:
    crc = 0
    with open(file, "rb", buffering=0) as opened:
        while contents := opened.read(_BYTES_AT_A_TIME):
            crc = google_crc32c.extend(crc, contents)
    return crc
