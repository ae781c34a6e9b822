"""The model_dir: checks of its path, and a lock that lets one training run at a time write to it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator

from absl import logging

from estimator.checkpoint._file_lock import lock_if_possible
from estimator.storage._files import exists, is_dir, is_url, list_dir, normalized, remove, store_of, write

LOCK_FILE = "training.lock"
_SECONDS_FOR_OWNER = 1.0  # to write its name into the file
_NOT_WRITABLE = (
    "Training cannot write its checkpoints into model_dir {!r} ({}). Choose a directory that can be created and "
    "written; evaluation and prediction only read{}"
)
_MANGLED = re.compile(r"(s3|gs|gcs|az|memory):/[^/]")
_NO_LOCK = "model_dir %s cannot be locked (%s): nothing keeps a second training run out of it."
_TF_CHECKPOINT = re.compile(r".+-\d+\.(index|meta)")

# The locks of this process by the path of the directory: the file, and the thread that holds it.
_held: dict[str, tuple[int, int]] = {}


def checked_dir(model_dir: str) -> str:
    """The absolute path, which stays the same after `os.chdir`, with "~" expanded.

    It is without "..": behind a symbolic link, normalizing a path changes what ".." means.

    Raises:
      NotADirectoryError: the path is a file.
      ValueError: orbax would read the path as a pattern; the URL is not one, or nothing knows its protocol.
      ImportError: what knows the store of the URL is not installed.
    """
    if _MANGLED.match(model_dir):
        raise ValueError(
            f"`model_dir` must have two slashes in the URL of a store; got {model_dir!r}. `pathlib.Path` drops one: "
            "give a string, or an `etils.epath.Path`."
        )
    if is_url(model_dir):
        store_of(model_dir)
        model_dir = normalized(model_dir)
        if set("*?[") & set(model_dir):
            raise ValueError(
                "`model_dir` must not contain '*', '?' or '[' in the URL of a store, which fsspec would take for a "
                f"pattern; got {model_dir!r}. Choose another name."
            )
        return model_dir
    model_dir = os.path.expanduser(model_dir)
    if os.pardir in model_dir.split(os.sep):
        model_dir = os.path.realpath(model_dir)
    model_dir = os.path.abspath(model_dir)
    if exists(model_dir) and not is_dir(model_dir):
        raise NotADirectoryError(f"`model_dir` must be a directory; got the file {model_dir!r}.")
    return model_dir


def check_not_of_tensorflow(model_dir: str) -> None:
    """To be called if there is no checkpoint.

    Raises:
      ValueError: there is a checkpoint of TensorFlow, which training would silently ignore.
    """
    names = list_dir(model_dir)
    theirs = sorted(filter(_TF_CHECKPOINT.fullmatch, names), key=lambda name: int(re.findall(r"\d+", name)[-1]))
    if theirs:
        raise ValueError(
            f"model_dir {model_dir!r} holds checkpoints of TensorFlow, such as {theirs[-1]!r}, from which training "
            "does not resume here; the model would begin with its initial values. Choose another model_dir. To begin "
            "with the values of TensorFlow, give this one as `warm_start_from=` to the Estimator, or call "
            '`est.init_from_checkpoint(directory, {"/": "/"})` in the model_fn.'
        )


@contextlib.contextmanager
def training_in(model_dir: str, is_chief: bool) -> Iterator[None]:
    """Locks a directory for one training run, and creates it if it does not exist. The thread that holds the lock may
    enter again. In a run of several processes, process 0 holds it for all.

    The operating system locks a file that names its owner, and releases it when the process ends, however it ends. A
    store has no locks.

    Raises:
      RuntimeError: another training run holds the lock.
      OSError: the directory cannot be written.
    """
    if is_url(model_dir):
        if is_chief:
            _check_writable(model_dir)
            logging.log_first_n(logging.WARNING, _NO_LOCK, 1, model_dir, "stores have no locks")
        yield
        return
    key = os.path.realpath(model_dir)
    is_mine = key in _held and _held[key][1] == threading.get_ident()
    lock = None if is_mine or not is_chief else _locked(model_dir, key)
    if lock is None:
        yield
        return
    _held[key] = lock, threading.get_ident()
    try:
        yield
    finally:
        if _held.pop(key, None) is not None:  # not in a forked child
            with contextlib.suppress(OSError):
                os.remove(os.path.join(model_dir, LOCK_FILE))
            os.close(lock)


def _locked(model_dir: str, key: str) -> int | None:
    """The locked file; None if the file system has no locks."""
    path = os.path.join(model_dir, LOCK_FILE)
    while True:
        try:
            os.makedirs(model_dir, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise type(error)(error.errno, _NOT_WRITABLE.format(model_dir, error.strerror, "")) from error
        try:
            why_not = lock_if_possible(lock, exclusive=True)
        except BlockingIOError:
            owner = _owner(lock, key)
            os.close(lock)
            raise RuntimeError(
                f"model_dir {model_dir!r} is in use: {owner} trains in it. Two training runs in one directory would "
                "mix their checkpoints. Wait for the other one or end it, or choose another model_dir."
            ) from None
        if why_not is not None:
            logging.warning(_NO_LOCK, model_dir, why_not)
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            os.close(lock)
            return None
        # A former owner may have removed the file in between.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                os.truncate(lock, 0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                with contextlib.suppress(OSError):  # a full disk, on which a checkpoint says that it cannot be saved
                    os.pwrite(lock, f"process {os.getpid()} on host {socket.gethostname()}, since {since},".encode(), 0)
                return lock
        os.close(lock)


def _check_writable(url: str) -> None:
    try:
        write(os.path.join(url, LOCK_FILE), b"")
        remove(os.path.join(url, LOCK_FILE))
    except Exception as error:  # of many kinds
        raise OSError(_NOT_WRITABLE.format(url, error, ". Look for the bucket and for your credentials.")) from error


def _owner(lock: int, key: str) -> str:
    if key in _held:
        return "another thread of this process"
    deadline = time.monotonic() + _SECONDS_FOR_OWNER
    while not (owner := os.pread(lock, 1000, 0)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return owner.decode() or "another process"


def _leave_to_parent() -> None:
    """A forked child must not keep the locks: it may live longer."""
    for lock, _ in _held.values():
        os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
