"""Checkpoints of a training state: named arrays in `<model_dir>/ckpt-<step>`, written by orbax.

On disk a checkpoint is a flat dict of arrays (see `_named_arrays.py`). Each array is saved once, unsharded, so that
any number of devices can read it.

When `save` returns, a train step may donate the memory of the state, and the checkpoint is on disk, or,
with `wait=False`, being written by a thread.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from estimator.checkpoint._async_save import AsyncSave, CheckpointWriteError
from estimator.checkpoint._checkpoint_dir import (
    PIN,
    REPLACING,
    NotACheckpointError,
    check_is_checkpoint,
    check_sound,
    checkpoints_in,
    host_of,
    is_pinned,
    is_renamed,
    kept,
    name_of,
    named_step,
    newest_sound,
    remove,
    step_of,
)
from estimator.checkpoint._json_state import encode
from estimator.checkpoint._named_arrays import (
    COUNTERS,
    PREFIXES,
    SLOT_PREFIX,
    by_user_name,
    from_arrays,
    leaves_on_disk,
    short,
    to_arrays,
)
from estimator.checkpoint._orbax import array_metadata, read_arrays, read_on_devices, with_orbax
from estimator.checkpoint._save import save_checkpoint
from estimator.checkpoint._save_in_store import save_in_store
from estimator.core._state import State
from estimator.multihost._collective_call import run_on_chief
from estimator.optim._learning_rate import RATE, VALUES, rate_names
from estimator.storage import _files
from estimator.storage._manifest import DamagedCheckpointError, add_empty_file
from estimator.storage._own_folders import make_own, remove_own

F = TypeVar("F", bound=Callable[..., Any])

_ENDS = {"input": "INPUT_ENDED", "steps": "STEPS_ENDED"}  # files in a checkpoint, by why its run ended


class ShapeDtype(Protocol):
    """The shape and dtype of an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


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
      model_dir: the directory; the first `save` makes it.
      keep_max: how many of the newest checkpoints `save` keeps; None or 0: all.
      keep_every_n_hours: of the older ones `save` keeps the first, and each that was written N hours or more after the
        last one kept. None: it keeps none of them. The times are in the files, so another process continues to count.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        keep_max: int | None = 5,
        keep_every_n_hours: float | None = None,
    ) -> None:
        self._dir = os.fspath(model_dir)
        self._retention = keep_max, keep_every_n_hours
        self._in_flight: AsyncSave | None = None

    def paths(self) -> list[str]:
        """The paths of all sound checkpoints, oldest first; every call lists the directory again.

        It waits for the checkpoint that a thread of this object writes, as `latest` and `pinned` do.
        """
        self.finish()
        return checkpoints_in(self._dir)

    def latest(self, check: Callable[[str], object] = lambda path: None) -> str | None:
        """The path of the newest sound checkpoint, or None. Newer ones that are damaged are named in the log.

        Args:
          check: looks for more than wrong sizes, as in `newest_sound`.

        Raises:
          DamagedCheckpointError: all of them are damaged.
        """
        self.finish()
        return newest_sound(self._dir, check)

    def save(self, state: State, host: dict[str, Any] | None = None, wait: bool = True) -> str:
        """Writes `state` to `<model_dir>/ckpt-<global_step>` and returns this path.

        The sound checkpoint of a step that has one is left as it is: a training run resumes from the
        newest checkpoint, so the same step means the same state. A damaged one is replaced.

        One save is in flight at most: this one waits for the one before, and raises what went wrong in it.

        Args:
          state: jax arrays on any devices; none may have a size of zero.
          host: values other than arrays, saved in the same write (see `_json_state.py`).
          wait: whether to return when the checkpoint is on disk. Otherwise a thread writes it, from a copy in the
            host's memory; `wait()` says when it is there. Several processes always wait, since one that dies could
            keep the threads of the others waiting.

        Raises:
          ValueError: two variables have the same name on disk.
          CheckpointWriteError: this checkpoint, or the one before, could not be written.
        """
        self.wait()
        path = os.path.join(self._dir, name_of(int(state.global_step)))
        # Process 0 decides: it alone may have found by their checksums that arrays are damaged.
        if not run_on_chief("save", lambda: _is_saved(path)):
            self._start_writing(path, to_arrays(state), encode(host or {}))
            if wait or jax.process_count() > 1:
                self.wait()
        return path

    def finish(self) -> None:
        """Waits until no thread of this object writes a checkpoint any more, whatever goes wrong in it."""
        in_flight = self._in_flight  # another thread, which trains, may begin the next one meanwhile
        if in_flight is not None:
            in_flight.finish()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
          CheckpointWriteError: it could not be written; this is raised once.
        """
        self.finish()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.check()

    def give_up(self) -> None:
        """To be called when nobody waits for the last checkpoint any more."""
        if self._in_flight is not None:
            self._in_flight.give_up()

    def _start_writing(self, path: str, arrays: dict[str, Any], host: dict[str, Any]) -> None:
        import orbax.checkpoint  # noqa: F401  # by this thread, as in `with_orbax`

        def write(copied: Callable[[], None]) -> None:
            try:
                _save(path, arrays, host, *self._retention, copied=copied)
            except Exception as error:
                if jax.process_count() > 1:
                    raise
                explained = CheckpointWriteError(_explained(path, error))
                logging.error("%s", explained)  # which is raised only when training saves again, or ends
                raise explained from error

        self._in_flight = AsyncSave(path, write)
        self._in_flight.start()

    def pin(self, path: str) -> None:
        """Keeps a checkpoint on disk until `unpin`, also after a restart, beside the newest ones.

        Raises:
          ValueError: `path` is not a checkpoint.
        """
        self.finish()  # a save that is in flight may have chosen to remove it
        check_is_checkpoint(path)
        _files.write(os.path.join(path, PIN), b"")

    def unpin(self, path: str) -> None:
        """Lets a later `save` remove a checkpoint like any other.

        Raises:
          ValueError: `path` is not a checkpoint.
        """
        check_is_checkpoint(path)
        with contextlib.suppress(FileNotFoundError):
            _files.remove(os.path.join(path, PIN))

    def pinned(self) -> list[str]:
        """The paths of the pinned checkpoints, oldest first."""
        return [path for path in self.paths() if is_pinned(path)]


def _reads(function: F) -> F:
    """Decorates a function that reads a checkpoint: neither signals nor the checkpoint's removal interrupt it."""

    @functools.wraps(function)
    def read(path: str, *args: Any, **kwargs: Any) -> Any:
        with kept(path):
            return function(path, *args, **kwargs)

    return with_orbax(read)  # type: ignore[return-value]


@_reads
def restore(path: str, like: State, partial: bool = False) -> State:
    """Returns the state saved at `path`, with every array placed as in `like`.

    Names, shapes and dtypes are compared first; no array is read where they differ.

    Args:
      path: a checkpoint, as `Checkpoints.latest` returns it.
      like: the state of `jax.ShapeDtypeStruct`s to fill. An array goes to the `sharding` of its
        leaf, or to the default device where that is None.
      partial: whether the checkpoint may hold arrays that `like` has not, which are not read:
        evaluation has no slots, and a model may create fewer variables there.

    Raises:
      ValueError: `path` is not a checkpoint, or it has other variables than `like`.
    """
    model = to_arrays(like)
    default = jnp.zeros(()).sharding
    shardings = {name: leaf.sharding or default for name, leaf in leaves_on_disk(like).items()}
    saved = array_metadata(path)
    new_counters = COUNTERS & (model.keys() - saved.keys())
    zeros = {name: jnp.zeros((), model[name].dtype, device=shardings[name]) for name in new_counters}
    for name in new_counters:
        del model[name]
    saved = {name: x for name, x in saved.items() if name in model or name not in COUNTERS}
    _check_same(path, saved, model, partial)
    return from_arrays(read_on_devices(path, model, shardings) | zeros, like)


@with_orbax
def take_values(path: str, source: str) -> None:
    """Replaces the variables and slots of the checkpoint at `path` by the ones of another checkpoint; the step and
    everything else in it stay. The old one is removed when the new one is written.

    Raises:
      CheckpointWriteError: the new one could not be written; the old one stays.
    """
    values = read_arrays(source, [key for key in array_metadata(source) if key.startswith(PREFIXES)])
    others = read_arrays(path, [key for key in array_metadata(path) if not key.startswith(PREFIXES)])
    host = encode(host_of(path))
    marks = [mark for mark in (PIN, *_ENDS.values()) if _files.exists(os.path.join(path, mark))]
    aside = path + REPLACING
    new = path if _files.is_url(path) else os.path.join(aside, os.path.basename(path))
    try:
        if new != path:
            make_own(aside)
        _save(new, values | others, host, together=False)
        for mark in marks:
            _files.write(os.path.join(new, mark), b"") if mark == PIN else add_empty_file(new, mark)
        if new != path:
            remove(path)
            _files.rename(new, path)
    except Exception as error:
        raise CheckpointWriteError(_explained(path, error)) from error
    finally:
        if new != path:
            remove_own(aside)


def _is_saved(path: str) -> bool:
    try:
        check_sound(path)
    except DamagedCheckpointError as error:
        logging.warning("The checkpoint %s, which is damaged, is replaced: %s.", path, error.reason)
        return False
    except NotACheckpointError:
        return False
    if is_renamed(path):
        logging.warning("The checkpoint %s, which was written at step %d, is replaced.", path, step_of(path))
        return False
    return True


def _explained(path: str, error: Exception) -> str:
    newest = checkpoints_in(os.path.dirname(path))[-1:]
    return (
        f"The checkpoint of step {named_step(path)} could not be written to {path}: {error}\n"
        + (f"The newest checkpoint is {newest[0]}. " if newest else "There is no other checkpoint. ")
        + "Look whether the disk is full, or the directory is gone or cannot be written."
    )


def _save(path: str, *args: Any, **kwargs: Any) -> None:
    (save_in_store if _files.is_url(path) else save_checkpoint)(path, *args, **kwargs)


@_reads
def names(path: str) -> list[str]:
    """Returns the sorted names of variables, optimizer slots and global step saved at `path`.

    Raises:
      ValueError: `path` is not a checkpoint.
    """
    return sorted(by_user_name(array_metadata(path)))


@_reads
def shapes(path: str, slots: bool = True) -> dict[str, ShapeDtype]:
    """Returns the shapes and dtypes of the arrays saved at `path`, by name (see `names`).

    They do not include the counters of `on_nan`, nor, unless `slots`, the optimizer slots.

    Raises:
      ValueError: `path` is not a checkpoint.
    """
    saved = array_metadata(path)
    excluded = COUNTERS if slots else {key for key in saved if key.startswith(SLOT_PREFIX)}
    return {name: saved[key] for name, key in by_user_name(saved).items() if key not in excluded}


@_reads
def progress(path: str) -> tuple[int, dict[str, Any]]:
    """Returns the global step of the checkpoint at `path`, and the `host` values saved with it.

    Raises:
      ValueError: `path` is not a checkpoint, or damaged.
    """
    return step_of(path), host_of(path)


def note_end(path: str, reason: str | None) -> None:
    """Marks the last checkpoint of a run, for the next run's input, which begins again after the end of the "input",
    and also where a run that made all its "steps" left no batch. Other reasons leave no mark."""
    if reason in _ENDS:
        add_empty_file(path, _ENDS[reason])


def is_end(path: str, reason: str) -> bool:
    """Whether a run ended at this checkpoint for that reason: "input" or "steps"."""
    return _files.exists(os.path.join(path, _ENDS[reason]))


def read(path: str, name: str) -> np.ndarray:
    """Returns the array called `name` (see `names`) of the checkpoint at `path`.

    Raises:
      ValueError: `path` is not a checkpoint, or it has no such array.
    """
    return read_all(path, [name])[name]


@_reads
def read_all(path: str, patterns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of the checkpoint at `path` that match `patterns`, by name.

    Args:
      path: the checkpoint.
      patterns: names (see `names`), or globs such as "dense/*", whose "*" matches "/" too.

    Raises:
      ValueError: `path` is not a checkpoint, or one of the patterns matches nothing in it.
    """
    on_disk = by_user_name(array_metadata(path))
    keys: dict[str, str] = {}
    for pattern in patterns:
        matches = [pattern] if pattern in on_disk else fnmatch.filter(sorted(on_disk), pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, on_disk, cutoff=0.5) or sorted(on_disk)[:5]
            raise ValueError(
                f"Checkpoint {path} has no variable {pattern!r}. Did you mean one of {near}? "
                f"It has {len(on_disk)} names in all."
            )
        keys |= {name: on_disk[name] for name in matches}
    if not keys:
        return {}
    arrays = read_arrays(path, keys.values())
    return {name: arrays[key] for name, key in keys.items()}


def _check_same(path: str, saved: dict[str, Any], model: dict[str, Any], partial: bool) -> None:
    """Raises one error that names every difference between a checkpoint and a model."""
    lines = []
    for key in sorted(model.keys() | saved.keys()):
        was, now = describe(saved.get(key)), describe(model.get(key))
        if key not in saved:
            lines.append(f"  missing: {short(key)}, {now} in the model")
        elif key not in model and not partial:
            lines.append(f"  unexpected: {short(key)}, {was} in the checkpoint")
        elif key in model and was != now:
            lines.append(f"  mismatched: {short(key)}, {was} in the checkpoint, {now} in the model")
    if lines:
        raise ValueError(
            f"The variables of checkpoint {path} are not those of the model:\n"
            + "\n".join(lines)
            + "\nMake the model_fn create the same variables and optimizers as when the checkpoint "
            "was saved, or use another model_dir to start from scratch (from its variables by `warm_start_from`)."
        )


def describe(array: ShapeDtype | None) -> str:
    return "" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"


def saved_learning_rates(path: str) -> dict[str, float]:
    """The `learning_rates` of the state in the checkpoint at `path`."""
    end = f"/{VALUES}/{RATE}"
    slots = shapes(path).keys() - shapes(path, slots=False).keys()
    values = read_all(path, sorted(name for name in slots if name.endswith(end)))
    places = [name.removesuffix(end).split("/") for name in values]
    names = rate_names((optimizer, rest) for optimizer, *rest in places)
    return {name: float(np.ravel(value)[0]) for name, value in zip(names, values.values(), strict=True)}
