"""The checkpoints of a training run: saves states, by a thread while training continues, and returns the newest one.

When `save` returns, a train step may donate the memory of the state, and the checkpoint is on disk, or,
with `wait=False`, being written by a thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError, name_of
from estimator.checkpoint._model_dir import check_lock, list_sound
from estimator.checkpoint._named_arrays import PREFIXES, to_arrays
from estimator.checkpoint._newest import newest_readable
from estimator.checkpoint._orbax import with_orbax
from estimator.checkpoint._save import hold_arrays, save_checkpoint
from estimator.core._state import State
from estimator.multihost._collective_call import run_on_chief
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.runtime._uninterrupted import Work, give_up
from estimator.storage._json import encode
from estimator.storage._sealed_folder import DamagedError


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; the text says why. Earlier checkpoints stay."""


class Checkpoints:
    """The checkpoints of one directory, which may be written and read by different processes.

    >>> import collections, jax.numpy as jnp, tempfile
    >>> State = collections.namedtuple("State", "variables slots global_step key")
    >>> state = State({"w": jnp.ones((2,))}, {}, jnp.int32(7), jax.random.key(0))
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> path = checkpoints.save(state)
    >>> path == checkpoints.latest()
    True

    Args:
      model_dir: the directory; the first `save` makes it.
      keep_max: how many of the newest checkpoints `save` keeps; all if None or 0.
      keep_every_n_hours: of the older ones `save` keeps the first, and each that was written N hours or more after the
        last one kept. If None, it keeps none. The times are in the files, so another process continues to count.
    """

    def __init__(
        self, model_dir: str | os.PathLike[str], keep_max: int | None = 5, keep_every_n_hours: float | None = None
    ) -> None:
        self._dir = os.fspath(model_dir)
        self._retention = keep_max, keep_every_n_hours
        self._in_flight: AsyncSave | None = None

    def latest(self, check: Callable[[Checkpoint], Checkpoint] = Checkpoint.check_sound) -> str | None:
        """The path of the newest sound checkpoint, or None. Newer ones that are damaged are named in the log.

        It waits for the checkpoint that a thread of this object writes.

        Args:
          check: as `read` of `newest_readable`.

        Raises:
          DamagedError: all of them are damaged.
        """
        self.finish()
        newest = newest_readable(self._dir, check)
        return None if newest is None else newest.path

    def save(
        self,
        state: State,
        host: dict[str, Any] | None = None,
        wait: bool = True,
        group: ProcessGroup | None = None,
        later: bool = False,
    ) -> str:
        """Writes `state` to `<model_dir>/ckpt-<global_step>` and returns this path.

        The sound checkpoint of a step that has one is left as it is: a training run resumes from the
        newest checkpoint, so the same step means the same state. A damaged one is replaced.

        One save is in flight at most: this one waits for the one before, and raises what went wrong in it.

        Args:
          state: jax arrays on any devices; none may have a size of zero.
          host: values other than arrays, saved in the same write (see `storage/_json.py`).
          wait: whether to return when the checkpoint is on disk. Otherwise a thread writes it, from a copy in the
            host's memory; `wait()` says when it is there.
          group: the processes that save together, for the thread alone; if None, a single process.
          later: whether the first save of this process waits for `start`, or for whoever waits for it: the first loss
            of a small CNN in `benchmarks/first_step.py` comes after 1.8 s of CPU, not after 2.2 (with orbax's import).

        Raises:
          ValueError: two variables have the same name on disk.
          CheckpointWriteError: this checkpoint, or the one before, could not be written.
          RuntimeError: a run on another host, which does not share locks with this one, has begun in the directory.
        """
        self.wait()
        path = os.path.join(self._dir, name_of(int(state.global_step)))
        # Process 0 decides: only it may have found by their checksums that arrays are damaged.
        if not run_on_chief("save", lambda: self._is_saved(Checkpoint(path))):
            arrays = to_arrays(state)
            held = hold_arrays(arrays) if later and "orbax.checkpoint" not in sys.modules else None
            self._in_flight = self._writing(path, held or arrays, encode(host or {}), group or SingleProcess())
            if held is None:
                self.start()
            if wait:
                self.wait()
        return path

    def _is_saved(self, checkpoint: Checkpoint) -> bool:
        check_lock(self._dir)
        try:
            checkpoint.check_sound()
        except DamagedError as error:
            logging.warning("The checkpoint %s, which is damaged, is replaced: %s.", checkpoint.path, error.reason)
            return False
        except NotACheckpointError:
            return False
        if checkpoint.is_renamed:
            step = checkpoint.step
            logging.warning("The checkpoint %s, which was written at step %d, is replaced.", checkpoint.path, step)
            return False
        return True

    def start(self) -> None:
        """Starts to write what `save` has left for later."""
        if self._in_flight is not None:
            self._in_flight.start()

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
        """Lets the process end while the last checkpoint is being written: nobody waits for it any more."""
        if self._in_flight is not None:
            self._in_flight.give_up()

    def _writing(self, path: str, arrays: dict[str, Any], host: dict[str, Any], group: ProcessGroup) -> AsyncSave:
        def write(copied: Callable[[], None]) -> None:
            try:
                save_checkpoint(path, arrays, host, *self._retention, copied=copied, group=group)
            except Exception as error:
                group.publish_failure(error)
                if jax.process_count() > 1:
                    logging.error("The checkpoint %s could not be written: %s", path, error)
                    raise
                explained = CheckpointWriteError(_explain(path, error))
                logging.error("%s", explained)  # which is raised only when training saves again, or ends
                raise explained from error

        return AsyncSave(path, write)


class AsyncSave:
    """The thread that writes a checkpoint.

    >>> written = []
    >>> def write(copied):
    ...     copied()  # the memory of the state may be donated now
    ...     written.append("ckpt-7")
    >>> save = AsyncSave("ckpt-7", write)
    >>> save.start()
    >>> save.finish()
    >>> written
    ['ckpt-7']

    Args:
      path: of the checkpoint.
      write: writes it, and calls its argument when it no longer needs the memory of the state.
    """

    def __init__(self, path: str, write: Callable[[Callable[[], None]], None]) -> None:
        self.path = path
        self._process = os.getpid()
        copied = threading.Event()

        def call() -> None:
            try:
                write(copied.set)
            finally:
                copied.set()  # also if the write fails: `start` waits for it

        self._copied = copied
        self._work = Work(call)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the thread, if it has not begun, and waits until the memory of the state may be donated.

        An exception out of a signal's handler ends the wait, but not the thread.
        """
        import orbax.checkpoint  # noqa: F401  # by this thread, as in `with_orbax`

        with self._lock:
            if self._is_left():
                try:
                    self._work.thread.start()
                except RuntimeError:  # there are too many threads
                    self._work.done.set()
                    raise
        if not self._work.done.is_set():
            self._copied.wait()

    def _is_left(self) -> bool:
        return self._work.thread.ident is None and not self._work.done.is_set()

    def finish(self) -> None:
        """Waits for the thread, whatever goes wrong in it. A forked child, which has no such thread, does not wait."""
        if os.getpid() == self._process:
            if self._is_left():
                self.start()
            self._work.done.wait()

    def check(self) -> None:
        """Raises what went wrong in the thread, once; after `finish`."""
        if os.getpid() == self._process:
            self._work.result()

    def give_up(self) -> None:
        """Lets the process end while the thread is at work."""
        if self._work.done.is_set():
            return
        logging.warning("The checkpoint %s is still being written. It is lost if the process ends now.", self.path)
        with self._lock:
            if self._is_left():
                self._work.done.set()
        give_up(self._work)


@with_orbax
def take_values(path: str, source: str) -> None:
    """Replaces the variables and slots of the checkpoint at `path` by the ones of another checkpoint; the step and
    everything else in it stay, and it says where its values are from (`Checkpoint.restored_from`). The old one is
    removed when the new one is written: a kill right after leaves neither, and training resumes from the one before.

    Raises:
      CheckpointWriteError: the new one could not be written; the old one stays.
    """
    old, best = Checkpoint(path), Checkpoint(source)
    values = best.read_on_disk(lambda key: key.startswith(PREFIXES))
    others = old.read_on_disk(lambda key: not key.startswith(PREFIXES))
    marks = old.list_marks()
    try:
        save_checkpoint(path, values | others, encode({**old.host, "restored_from": best.step}))
        for mark in marks:
            old.add_mark(mark)
    except Exception as error:
        raise CheckpointWriteError(_explain(path, error)) from error


def _explain(path: str, error: Exception) -> str:
    newest = list_sound(os.path.dirname(path))[-1:]
    # TensorStore raises ValueErrors for all that goes wrong; an error of the system is in their message.
    is_of_disk = isinstance(error, OSError) or "os_error" in str(error)
    return (
        f"The checkpoint of step {Checkpoint(path).named_step} could not be written to {path}: "
        f"{type(error).__name__}: {error}\n"
        + (f"The newest checkpoint is {newest[0].path}." if newest else "There is no other checkpoint.")
        + " Look whether the disk is full, or the directory is gone or cannot be written." * is_of_disk
    )
