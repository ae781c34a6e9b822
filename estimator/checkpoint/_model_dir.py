"""The model_dir: finds and lists its checkpoints, and locks it, so that one training run at a time writes to it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from absl import logging

from estimator.checkpoint._checkpoint import (
    REMOVED,
    UNFINISHED,
    Checkpoint,
    NotACheckpointError,
    name_of,
)
from estimator.runtime._table import ShownAsTable, Table, show_bytes, show_time
from estimator.storage._files import (
    exists,
    expand,
    files_in,
    is_dir,
    is_url,
    list_dir,
    lock_if_possible,
    normalize,
    remove,
    store_of,
    write,
)
from estimator.storage._sealed_folder import DamagedError, SealedFolder

LOCK_FILE = "training.lock"
_SECONDS_FOR_OWNER = 1.0  # to write its name into the file
_NOT_WRITABLE = (
    "Training cannot write its checkpoints into model_dir {!r} ({}). Choose a directory that can be created and "
    "written; evaluation and prediction only read{}"
)
_MANGLED = re.compile(r"(s3|gs|gcs|az|memory):/[^/]")
_NO_LOCK = "model_dir %s cannot be locked (%s): nothing keeps a second training run out of it."
_NOT_RELEASED = (
    "model_dir %s: %s has not released its lock. It has died, or this file system does not share locks between hosts: "
    "if it still trains here, it ends at its next checkpoint."
)
_TF_CHECKPOINT = re.compile(r".+-\d+\.(index|meta)")
_NAME = re.compile(r"ckpt-(\d+)")
_LEFTOVER = re.compile(rf"ckpt-\d+({'|'.join(map(re.escape, (UNFINISHED, REMOVED)))})")

# The locks of this process by the path of the directory: the file, and the thread that holds it.
_held: dict[str, tuple[int, int]] = {}


def check_model_dir(model_dir: str) -> str:
    """Checks the path of a model_dir; returns the absolute one, which `os.chdir` does not change, with "~" expanded.

    Raises:
      NotADirectoryError: the path is a file.
      ValueError: orbax would read the path as a pattern; the URL is not one, or nothing knows its protocol; the path is
        relative in a worker of Ray.
      ImportError: what knows the store of the URL is not installed.
    """
    if _MANGLED.match(model_dir):
        raise ValueError(
            f"`model_dir` must have two slashes in the URL of a store; got {model_dir!r}. `pathlib.Path` drops one: "
            "give a string, or an `etils.epath.Path`."
        )
    if is_url(model_dir):
        store_of(model_dir)
        model_dir = normalize(model_dir)
        if set("*?[") & set(model_dir):
            raise ValueError(
                "`model_dir` must not contain '*', '?' or '[' in the URL of a store, which fsspec would take for a "
                f"pattern; got {model_dir!r}. Choose another name."
            )
        return model_dir
    model_dir = os.path.expanduser(model_dir)
    if not os.path.isabs(model_dir) and _is_ray_worker():
        raise ValueError(
            f"`model_dir` must be an absolute path, or a URL, in a worker of Ray; got {model_dir!r}. Each worker has a "
            f"working directory of its own, here {os.getcwd()!r}, so that a relative path is not where the driver, or "
            "the next worker, looks for it. Make it absolute in the driver, by `os.path.abspath`, on storage that all "
            "nodes share."
        )
    if os.pardir in model_dir.split(os.sep):
        # After a symbolic link, normalizing a path would change the meaning of "..".
        model_dir = os.path.realpath(model_dir)
    model_dir = os.path.abspath(model_dir)
    if exists(model_dir) and not is_dir(model_dir):
        raise NotADirectoryError(f"`model_dir` must be a directory; got the file {model_dir!r}.")
    return model_dir


def check_not_of_tensorflow(model_dir: str) -> None:
    """Checks that a model_dir without a checkpoint has none of TensorFlow, which training would silently ignore."""
    names = list_dir(model_dir)
    theirs = sorted(filter(_TF_CHECKPOINT.fullmatch, names), key=lambda name: int(re.findall(r"\d+", name)[-1]))
    if theirs:
        raise ValueError(
            f"model_dir {model_dir!r} holds checkpoints of TensorFlow, such as {theirs[-1]!r}, from which training "
            "does not resume here; the model would begin with its initial values. Choose another model_dir. To begin "
            "with the values of TensorFlow, give this one as `warm_start_from=` to the Estimator, or call "
            '`est.init_from_checkpoint(directory, {"/": "/"})` in the model_fn.'
        )


def list_folders(directory: str) -> list[Checkpoint]:
    """Lists what has the name of a checkpoint in a directory, be it one or not, oldest first."""
    steps = sorted(int(m[1]) for m in map(_NAME.fullmatch, list_dir(directory)) if m)
    return [Checkpoint(os.path.join(directory, name_of(step))) for step in steps]


def list_written(directory: str) -> list[Checkpoint]:
    """Lists the checkpoints in a directory, sound or damaged, oldest first."""
    return sort_written(list_folders(directory))


def list_sound(directory: str) -> list[Checkpoint]:
    """Lists the sound checkpoints in a directory, oldest first."""
    sound = []
    for each in list_written(directory):
        with contextlib.suppress(NotACheckpointError, DamagedError):
            each.check_sound()
            sound.append(each)
    return sound


def sort_written(folders: list[Checkpoint]) -> list[Checkpoint]:
    """Sorts the checkpoints among them by step; of two of one step, the one that has its own name is last."""
    written = [each for each in folders if each.is_written()]
    # `is_renamed` would read the step from the disk again.
    return sorted(written, key=lambda each: (step := each.step, step == each.named_step))


class CheckpointInfo(NamedTuple):
    """A checkpoint on disk.

    Attributes:
      path: what `evaluate`, `predict` and `export_model` take as `checkpoint_path`.
      step: its global step.
      time: when it was written, in seconds since 1970; 0.0 where damage has taken that.
      bytes: the size of its files.
      pinned: whether it stays whatever `keep_checkpoint_max` says, as the best one of early stopping does.
      damage: the reason why it cannot be used; None if its files are there, with the sizes that were written. Their
        contents are compared when they are read, and by `python -m estimator.inspect MODEL_DIR --verify`.
    """

    path: str
    step: int
    time: float
    bytes: int
    pinned: bool
    damage: str | None = None


class CheckpointList(ShownAsTable, list[CheckpointInfo]):
    """The checkpoints in a model_dir, oldest first; printed, it is a table."""

    def _table(self) -> Table:
        rows = [
            (str(each.step), show_time(each.time), show_bytes(each.bytes))
            + (", ".join(["pinned"] * each.pinned + [f"damaged: {each.damage}"] * (each.damage is not None)),)
            for each in self
        ]
        return Table([("step", "time", "size", ""), *rows], ">>><")


def checkpoints(model_dir: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Lists the checkpoints in a model_dir, oldest first; empty where training has not saved any yet.

    A damaged one is listed, but not used: training and evaluation take the newest intact one. The training run in the
    directory, or another process, may remove any of them at any time, all but the newest.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> x = np.ones((2, 1), np.float32)
    >>> config = est.RunConfig(save_checkpoints_steps=10)
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp(), config)
    >>> _ = estimator.train(lambda: [(x, 3 * x)] * 25)
    >>> [each.step for each in est.checkpoints(estimator.model_dir)]
    [0, 10, 20, 25]
    >>> est.checkpoints(estimator.model_dir)[-1].path == estimator.latest_checkpoint()
    True

    Args:
      model_dir: the directory of an Estimator.

    Returns:
      One `CheckpointInfo` for each: a tuple of `path`, `step`, `time`, `bytes`, `pinned` and `damage`. Printed, and in
      a notebook, the list is a table.

    Raises:
      FileNotFoundError: there is no such directory.
    """
    directory = expand(model_dir)
    if not is_dir(directory):
        raise FileNotFoundError(f"There is no directory {directory!r}. Give the `model_dir` of an Estimator.")
    while True:
        folders = list_folders(directory)
        infos = [info for each in list_written(directory) if (info := _read_info(each))]
        if infos or folders == list_folders(directory):  # otherwise all were removed after newer ones were written
            return CheckpointList(infos)


def _read_info(checkpoint: Checkpoint) -> CheckpointInfo | None:
    """Reads what is listed of a checkpoint; None if it was removed meanwhile."""
    path = checkpoint.path
    try:
        damage = checkpoint.find_damage()
        time, size = _read_time(checkpoint, damage), sum(size for size in files_in(path).values() if size > 0)
    except (NotACheckpointError, FileNotFoundError):
        return None
    return CheckpointInfo(path, checkpoint.step, time, size, checkpoint.is_pinned(), damage)


def _read_time(checkpoint: Checkpoint, damage: str | None) -> float:
    try:
        return checkpoint.written_ns / 1e9
    except (DamagedError, NotACheckpointError):
        if damage is None:
            raise
        return 0.0


def remove_leftovers(directory: str) -> None:
    """Removes what killed processes have left unfinished: what has such a name and was made by an Estimator."""
    for name in filter(_LEFTOVER.fullmatch, list_dir(directory)):
        folder = SealedFolder(os.path.join(directory, name))
        if folder.is_own():
            folder.remove_files()
        else:
            with contextlib.suppress(OSError):  # of a process killed before it was marked: only if it is empty
                os.rmdir(folder.path)


def check_places(directory: str, first: int, last: int | None) -> None:
    """Checks that the checkpoints of the steps from `first` to `last` may be written.

    Raises:
      FileExistsError: something else has the name of one of them.
    """
    for each in list_folders(directory):
        if first <= each.named_step and (last is None or each.named_step <= last):
            each.check_place()


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
    lock = None if is_mine or not is_chief else _lock_file(model_dir, key)
    if lock is None:
        yield
        return
    _held[key] = lock, threading.get_ident()
    try:
        yield
    finally:
        if key in _held:  # not in a forked child
            # Removed before it is unlocked: afterwards the file could belong to the next owner.
            with contextlib.suppress(OSError, RuntimeError):
                check_lock(model_dir)
                os.remove(os.path.join(model_dir, LOCK_FILE))
            del _held[key]
            os.close(lock)


def _lock_file(model_dir: str, key: str) -> int | None:
    """Locks the file of a directory, and returns it; None if the file system has no locks."""
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
        # The owner before may have removed the file after it was opened here: then the locked file has no name, and the
        # next run would lock another one.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                before = os.pread(lock, 1000, 0).decode()
                if before and f" on host {_host()}, " not in before:  # on this host it has died
                    logging.warning(_NOT_RELEASED, model_dir, before)
                os.truncate(lock, 0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                with contextlib.suppress(OSError):  # a full disk, on which a checkpoint says that it cannot be saved
                    os.pwrite(lock, f"{_own_name()} since {since},".encode(), 0)
                return lock
        os.close(lock)


def check_lock(model_dir: str) -> None:
    """Checks that the run of this process, if there is one in a directory, is still the owner of its lock.

    Raises:
      RuntimeError: a run on another host is, which does not see the locks of this one.
    """
    owner = b""
    if os.path.realpath(model_dir) in _held:
        with contextlib.suppress(OSError), open(os.path.join(model_dir, LOCK_FILE), "rb") as file:
            owner = file.read(1000)
    if owner and not owner.startswith(_own_name().encode()):
        raise RuntimeError(
            f"model_dir {model_dir!r} is in use: {owner.decode()} trains in it, too, as its file system does not share "
            "locks between hosts. This run, which began before, saves nothing more. Let one of them begin again, in "
            "another model_dir."
        )


def _own_name() -> str:
    return f"process {os.getpid()} on host {_host()},"


@functools.cache  # a name that changes during a run does not take its lock away
def _host() -> str:
    return socket.gethostname()


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
    """Closes the locks in a forked child."""
    # A lock belongs to the open file, which the child shares: the child would keep the lock after the parent has ended.
    for lock, _ in _held.values():
        os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _is_ray_worker() -> bool:
    from estimator.multihost._cluster import is_ray_worker

    return is_ray_worker()
