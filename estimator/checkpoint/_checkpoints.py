"""Checkpoints of a training state: named arrays in `<model_dir>/ckpt-<step>`, written by orbax.

On disk a checkpoint is one flat dict from names to arrays: "variables/dense/w",
"slots/adam/0/mu/dense/w", "global_step" and "key". Each is there once, whole, whatever devices it
was on, so that any number of devices can read it.

Saving is synchronous: a train step may take the memory of the state as soon as `save` has returned,
and what `save` returned is on disk. A checkpoint is written under another name and then renamed,
and renamed again before it is removed, so what has the name of a checkpoint is always a whole one.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import type_handlers

from estimator.checkpoint._file_lock import lock_if_possible
from estimator.checkpoint._json_state import decode, encode
from estimator.core._state import ON_NAN_SLOTS
from estimator.optim._learning_rate import _RATE, _VALUES, _names
from estimator.optim._non_finite import NonFinite
from estimator.runtime._uninterrupted import uninterrupted

F = TypeVar("F", bound=Callable[..., Any])
State = Any  # estimator.steps._transform.State, of arrays or of jax.ShapeDtypeStructs.

_INFO = 20  # the standard library's number
_NAME = re.compile(r"ckpt-(\d+)")
_LEFTOVER = re.compile(r"ckpt-\d+\..+")
_METADATA_FILE = "_METADATA"
_PIN = "PINNED"  # a file in a checkpoint that stays; removed and copied with it
_PREFIXES = ("variables/", "slots/")
# What a checkpoint may lack (it is zero then) or have in excess: on_nan can be switched on and off.
_COUNTERS = {f"slots/{ON_NAN_SLOTS}/{field}" for field in NonFinite._fields}


_HOST = "host"  # what is no array, in one
_INPUT_ENDED = "INPUT_ENDED"  # a file in a checkpoint


class NotACheckpointError(ValueError):
    """There is no checkpoint at a path; or no more, since a training, or somebody, has removed it."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not a checkpoint. Give the path of one, as `latest_checkpoint()` returns it: "
            "`<model_dir>/ckpt-<step>`. Training removes all but the newest: see `RunConfig(keep_checkpoint_max=...)`."
        )


class Checkpoints:
    """The checkpoints of one directory, which may be written and read by different processes.

    >>> import collections, tempfile
    >>> State = collections.namedtuple("State", "variables slots global_step key")
    >>> state = State({"w": jnp.ones((2,))}, {}, jnp.int32(7), jax.random.key(0))
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> path = checkpoints.save(state)
    >>> path == checkpoints.latest()
    True
    >>> names(path)
    ['global_step', 'w']
    >>> read(path, "w")
    array([1., 1.], dtype=float32)
    >>> restore(path, jax.eval_shape(lambda: state)).variables
    {'w': Array([1., 1.], dtype=float32)}

    Args:
      model_dir: the directory; made by the first `save`.
      keep_max: how many of the newest checkpoints `save` leaves; None or 0: all.
      keep_every_n_hours: of the older ones `save` leaves the first, and each that was written so many hours after the
        last one left. None: none of them. The time is that of the files, so another process goes on counting.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        keep_max: int | None = 5,
        keep_every_n_hours: float | None = None,
    ) -> None:
        self._dir = os.fspath(model_dir)
        self._keep_max = keep_max
        self._keep_every_ns = None if keep_every_n_hours is None else keep_every_n_hours * 3600e9
        self._swept = False

    def paths(self) -> list[str]:
        """The paths of all whole checkpoints, oldest first; looked up anew by every call."""
        if not os.path.isdir(self._dir):
            return []
        steps = sorted(int(m[1]) for m in map(_NAME.fullmatch, os.listdir(self._dir)) if m)
        return [path for path in map(self._path, steps) if _is_checkpoint(path)]

    def latest(self) -> str | None:
        """The path of the newest whole checkpoint, or None where there is none."""
        paths = self.paths()
        return paths[-1] if paths else None

    def save(self, state: State, host: dict[str, Any] | None = None) -> str:
        """Returns the path `<model_dir>/ckpt-<global_step>`, to which it has written `state`.

        A step that has a checkpoint already is left as it is: a training run goes on from the
        newest checkpoint, so the same step means the same state.

        Args:
          state: what to save, of jax arrays on any devices; none may have a size of zero.
          host: what else to save with it, in the same write (see `_host_state.py`).

        Raises:
          ValueError: two variables have the same name on disk.
        """
        path = self._path(int(state.global_step))
        if not _is_checkpoint(path):
            arrays = jax.tree.map(_key_data, _flatten(state))
            if host:
                arrays[_HOST] = encode(host)
            _write(path, arrays, together=True)
            if jax.process_index() == 0:
                self._remove_old(path)
        return path

    def pin(self, path: str) -> None:
        """Keeps a checkpoint on disk until `unpin`, also after a restart; it does not count among the newest.

        Raises:
          ValueError: `path` is not a checkpoint.
        """
        _check_is_checkpoint(path)
        with open(os.path.join(path, _PIN), "w"):
            pass

    def unpin(self, path: str) -> None:
        """Lets a later `save` remove a checkpoint, as any other.

        Raises:
          ValueError: `path` is not a checkpoint.
        """
        _check_is_checkpoint(path)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(path, _PIN))

    def pinned(self) -> list[str]:
        """The paths of the pinned checkpoints, oldest first."""
        return [path for path in self.paths() if _is_pinned(path)]

    def _path(self, step: int) -> str:
        return os.path.join(self._dir, f"ckpt-{step}")

    def _remove_old(self, written: str) -> None:
        if not self._swept:  # What a killed process was writing or removing.
            for name in filter(_LEFTOVER.fullmatch, os.listdir(self._dir)):
                shutil.rmtree(os.path.join(self._dir, name), ignore_errors=True)
            self._swept = True
        if not self._keep_max:
            return
        last_kept = None
        for path in self.paths()[: -self._keep_max]:
            at = written_ns(path)
            if self._keep_every_ns is not None and (last_kept is None or at - last_kept >= self._keep_every_ns):
                last_kept = at
            elif path != written and not _is_pinned(path):
                _remove(path)


def written_ns(path: str) -> int:
    """When the checkpoint at `path` was written, in nanoseconds: tells it from another one of the same name.

    Raises:
      NotACheckpointError: there is none any more.
    """
    try:
        return os.stat(os.path.join(path, _METADATA_FILE)).st_mtime_ns
    except FileNotFoundError:
        raise NotACheckpointError(path) from None


@contextlib.contextmanager
def kept(path: str) -> Iterator[None]:
    """Keeps trainings from removing a checkpoint within the block, where the file system has locks.

    Raises:
      NotACheckpointError: it is not there, or, where there are no locks, was removed while it was read.
    """
    with _locked(path, exclusive=False) as is_there:
        if not is_there():
            raise NotACheckpointError(path)
        try:
            yield
        except Exception as error:
            if not is_there():
                raise NotACheckpointError(path) from error
            raise
        if not is_there():  # what was read may be half of it
            raise NotACheckpointError(path)


def _remove(path: str) -> None:
    """Removes a checkpoint; one that somebody reads stays, until the next call."""
    try:
        with _locked(path, exclusive=True):
            os.rename(path, f"{path}.removed")
    except BlockingIOError:
        return
    shutil.rmtree(f"{path}.removed")


@contextlib.contextmanager
def _locked(path: str, exclusive: bool) -> Iterator[Callable[[], bool]]:
    """Locks a checkpoint, by a file in it, if there are locks; gives a function that says whether it is still there.

    Raises:
      BlockingIOError: somebody has a lock on it, and this one is to be exclusive.
    """
    metadata = os.path.join(path, _METADATA_FILE)
    try:
        file = os.open(metadata, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpointError(path) from None

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(metadata))
        except FileNotFoundError:
            return False

    try:
        lock_if_possible(file, exclusive)
        yield is_there
    finally:
        os.close(file)


def _reads(function: F) -> F:
    """A function that reads a checkpoint: not interrupted by signals, nor by the removal of what it reads."""

    @functools.wraps(function)
    def read(path: str, *args: Any, **kwargs: Any) -> Any:
        with kept(path):
            return function(path, *args, **kwargs)

    return uninterrupted(read)  # type: ignore[return-value]


@_reads
def restore(path: str, like: State, partial: bool = False) -> State:
    """Returns the state saved at `path`, with every array placed as `like` says.

    Names, shapes and dtypes are compared first; no array is read where they differ.

    Args:
      path: a checkpoint, as `Checkpoints.latest` returns it.
      like: the state of `jax.ShapeDtypeStruct`s to fill. An array goes to the `sharding` of its
        leaf, or to the default device where that is None.
      partial: whether the checkpoint may hold more than `like`, of which nothing is read:
        evaluation has no slots, and a model may make fewer variables there.

    Raises:
      ValueError: `path` is not a checkpoint, or its variables are not those of `like`.
    """
    wanted = _flatten(like)
    data = {name: _like_key_data(leaf) for name, leaf in wanted.items()}
    default = jnp.zeros(()).sharding
    with _checkpointer() as checkpointer:
        saved = _metadata(checkpointer, path)
        new = {name: data.pop(name) for name in _COUNTERS & (data.keys() - saved.keys())}
        saved = {name: was for name, was in saved.items() if name in data or name not in {*_COUNTERS, _HOST}}
        _check_same(path, saved, data, partial)
        restore_args = {name: ocp.ArrayRestoreArgs(sharding=wanted[name].sharding or default) for name in data}
        arrays = checkpointer.restore(
            os.path.abspath(path),
            args=ocp.args.PyTreeRestore(data, restore_args, partial_restore=True),
        )
    arrays |= {name: jnp.zeros((), x.dtype, device=wanted[name].sharding or default) for name, x in new.items()}
    leaves = [_wrap_key_data(arrays[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@uninterrupted
def take_values(path: str, source: str) -> None:
    """Gives the checkpoint at `path` the variables and slots of another one; the number of steps and what else is in
    it stay."""
    with _checkpointer() as checkpointer:

        def arrays(path: str, values: bool) -> dict[str, np.ndarray]:
            keys = [key for key in _metadata(checkpointer, path) if key.startswith(_PREFIXES) is values]
            as_numpy = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys}
            args = ocp.args.PyTreeRestore(dict.fromkeys(keys, 0), as_numpy, partial_restore=True)
            return checkpointer.restore(os.path.abspath(path), args=args)

        merged = {**arrays(source, values=True), **arrays(path, values=False)}
    _write(path, merged)


@_reads
def names(path: str) -> list[str]:
    """Returns the sorted names of variables, optimizer slots and global step saved at `path`.

    Raises:
      ValueError: `path` is not a checkpoint.
    """
    with _checkpointer() as checkpointer:
        return sorted(_by_readable_name(_metadata(checkpointer, path)))


@_reads
def shapes(path: str, slots: bool = True) -> dict[str, Any]:
    """Returns by name (see `names`) what is saved at `path`, as objects with `shape` and `dtype`.

    The counters of `on_nan` are left out, and, unless `slots`, all optimizer slots.

    Raises:
      ValueError: `path` is not a checkpoint.
    """
    with _checkpointer() as checkpointer:
        saved = _metadata(checkpointer, path)
    readable = _by_readable_name(saved).items()
    left_out = _COUNTERS if slots else {key for key in saved if key.startswith("slots/")}
    return {name: saved[key] for name, key in readable if key not in left_out}


@_reads
def progress(path: str) -> tuple[int, dict[str, Any]]:
    """Returns the global step of the checkpoint at `path`, and what was given to `save` as `host`.

    Raises:
      ValueError: `path` is not a checkpoint.
    """
    with _checkpointer() as checkpointer:
        keys = {"global_step", _HOST} & _metadata(checkpointer, path).keys()
        restore_args = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys}
        args = ocp.args.PyTreeRestore(dict.fromkeys(keys, 0), restore_args, partial_restore=True)
        arrays = checkpointer.restore(os.path.abspath(path), args=args)
    return int(arrays["global_step"]), decode(arrays[_HOST]) if _HOST in keys else {}


def note_end_of_input(path: str) -> None:
    """Says of a checkpoint that the run which saved it came to the end of its input: the next run begins anew."""
    with open(os.path.join(path, _INPUT_ENDED), "w"):
        pass


def is_end_of_input(path: str) -> bool:
    return os.path.exists(os.path.join(path, _INPUT_ENDED))


def read(path: str, name: str) -> np.ndarray:
    """Returns the array called `name` (see `names`) of the checkpoint at `path`.

    Raises:
      ValueError: `path` is not a checkpoint, or it has no such array.
    """
    return read_all(path, [name])[name]


@_reads
def read_all(path: str, patterns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns by name the arrays of the checkpoint at `path` that `patterns` name.

    Args:
      path: the checkpoint.
      patterns: names (see `names`), or globs such as "dense/*", whose "*" stands for "/" too.

    Raises:
      ValueError: `path` is not a checkpoint, or it has nothing that one of the patterns names.
    """
    with _checkpointer() as checkpointer:
        on_disk = _by_readable_name(_metadata(checkpointer, path))
        keys: dict[str, str] = {}
        for pattern in patterns:
            found = [pattern] if pattern in on_disk else fnmatch.filter(sorted(on_disk), pattern)
            if not found:
                near = difflib.get_close_matches(pattern, on_disk, cutoff=0.5) or sorted(on_disk)[:5]
                raise ValueError(
                    f"Checkpoint {path} has no variable {pattern!r}. Did you mean one of {near}? "
                    f"It has {len(on_disk)} names in all."
                )
            keys |= {name: on_disk[name] for name in found}
        if not keys:
            return {}
        restore_args = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys.values()}
        args = ocp.args.PyTreeRestore(dict.fromkeys(restore_args, 0), restore_args, partial_restore=True)
        arrays = checkpointer.restore(os.path.abspath(path), args=args)
    return {name: arrays[key] for name, key in keys.items()}


@contextlib.contextmanager
def _checkpointer(together: bool = False) -> Iterator[ocp.Checkpointer]:
    """Orbax's checkpointer, without the two dozen INFO lines it would put among those of the training.

    Where there are several processes they all write `together`; each reads for itself.
    """
    # Replica-parallel writing cuts a replicated array into a piece per device: with 8 devices that
    # doubles the time of a small save, and the first one compiles the cuts for half a second.
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, type_handlers.NumpyHandler()),
    )
    logger = logging.get_absl_logger()
    level = logger.level
    if logger.getEffectiveLevel() == _INFO:
        logger.setLevel("WARNING")
    try:
        processes = ocp.options.MultiprocessingOptions()
        if not together and jax.process_count() > 1:
            me = jax.process_index()
            processes = ocp.options.MultiprocessingOptions(
                primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
            )
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=processes)
        with ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


@uninterrupted
def _write(path: str, arrays: dict[str, Any], together: bool = False) -> None:
    with _checkpointer(together) as checkpointer:
        # force: something that is no checkpoint may be in the way.
        checkpointer.save(os.path.abspath(path), args=ocp.args.PyTreeSave(arrays), force=True)


def _is_checkpoint(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _METADATA_FILE))


def _check_is_checkpoint(path: str) -> None:
    if not _is_checkpoint(path):
        raise NotACheckpointError(path)


def _is_pinned(path: str) -> bool:
    return os.path.exists(os.path.join(path, _PIN))


def _metadata(checkpointer: ocp.Checkpointer, path: str) -> dict[str, Any]:
    """What is saved at `path`: names on disk, and objects with `shape` and `dtype`."""
    return checkpointer.metadata(os.path.abspath(path)).item_metadata.tree


def _flatten(state: State) -> dict[str, Any]:
    """The leaves of a state by their names on disk, in the order of `jax.tree.leaves`."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(
                f"Two variables have the name {name!r} in a checkpoint: one is called so, the "
                "other is part of a variable that is a tree. Rename one of them."
            )
        leaves[name] = leaf
    return leaves


def named_leaves(state: State) -> dict[str, Any]:
    """The leaves of a state by the names that users see (see `names`), less PRNG keys and the counters of `on_nan`."""
    leaves = _flatten(state)
    named = {name: (key, leaves[key]) for name, key in _by_readable_name(leaves).items()}
    return {name: leaf for name, (key, leaf) in named.items() if key not in _COUNTERS and not _is_key(leaf)}


def with_named_leaves(state: State, new: dict[str, Any]) -> State:
    """The state with other arrays for some of its `named_leaves`."""
    leaves = _flatten(state)
    leaves |= {key: new[name] for name, key in _by_readable_name(leaves).items() if name in new}
    return jax.tree.unflatten(jax.tree.structure(state), leaves.values())


def _by_readable_name(on_disk: dict[str, Any]) -> dict[str, str]:
    """Names on disk by the names that users see, which leave "variables/" and "slots/" away."""
    readable = {"global_step": "global_step"}
    for prefix in _PREFIXES:
        for key in on_disk:
            if key.startswith(prefix):
                name = _short(key)
                readable[key if name in readable else name] = key
    return readable


def _short(key: str) -> str:
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def _check_same(path: str, saved: dict[str, Any], model: dict[str, Any], partial: bool) -> None:
    """Raises one error that names every difference between a checkpoint and a model."""
    lines = []
    for key in sorted(model.keys() | saved.keys()):
        was, now = describe(saved.get(key)), describe(model.get(key))
        if key not in saved:
            lines.append(f"  missing: {_short(key)}, {now} in the model")
        elif key not in model and not partial:
            lines.append(f"  unexpected: {_short(key)}, {was} in the checkpoint")
        elif key in model and was != now:
            lines.append(f"  mismatched: {_short(key)}, {was} in the checkpoint, {now} in the model")
    if lines:
        raise ValueError(
            f"The variables of checkpoint {path} are not those of the model:\n"
            + "\n".join(lines)
            + "\nMake the model_fn create the same variables and optimizers as when the checkpoint "
            "was saved, or use another model_dir to start anew (from its variables by `warm_start_from`)."
        )


def describe(array: Any) -> str:
    return "" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    """The numbers of a typed PRNG key, which orbax can save; any other array as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like_key_data(like: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like


def _wrap_key_data(array: Any, like: Any) -> Any:
    if not _is_key(like):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impls[0])


def saved_learning_rates(path: str) -> dict[str, float]:
    """The `learning_rates` of the state in a checkpoint."""
    end = f"/{_VALUES}/{_RATE}"
    slots = shapes(path).keys() - shapes(path, slots=False).keys()
    values = read_all(path, sorted(name for name in slots if name.endswith(end)))
    places = [name.removesuffix(end).split("/") for name in values]
    names = _names((optimizer, rest) for optimizer, *rest in places)
    return {name: float(np.ravel(value)[0]) for name, value in zip(names, values.values(), strict=True)}
