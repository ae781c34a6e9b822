"""A checkpoint that a thread writes while training continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from absl import logging

from estimator.runtime._uninterrupted import Work, give_up


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written, perhaps because the disk is full. Earlier checkpoints stay."""


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
                copied.set()

        self._copied = copied
        self._work = Work(call)

    def start(self) -> None:
        """Starts the thread, and waits until the memory of the state may be donated.

        An exception out of a signal's handler ends the wait, but not the thread.
        """
        try:
            self._work.thread.start()
        except RuntimeError:  # there are too many threads
            self._work.done.set()
            raise
        self._copied.wait()

    def finish(self) -> None:
        """Waits for the thread, whatever goes wrong in it. In a forked child, which has no such thread, it does not."""
        if os.getpid() == self._process:
            self._work.done.wait()

    def check(self) -> None:
        """To be called after `finish`; raises what went wrong in the thread, once."""
        if os.getpid() == self._process:
            self._work.result()

    def give_up(self) -> None:
        """To be called when nobody waits for the thread any more: the process may end while it is at work."""
        logging.warning("The checkpoint %s is still being written. It is lost if the process ends now.", self.path)
        give_up(self._work)
