"""Another process of the run has died, or failed: who and why, and the end of a process that waits for it in vain.

`LOST_PROCESS` is a state machine, and the threads of `ProcessWatch` move it:

      begin_watch          note_loss        note_raise          note_exit
    UNWATCHED -> WATCHED -----------> LOST -----------> RAISED -----------> EXITING
                    |                   |                 ^                     |
                    |        grace_secs |                 |          grace_secs | and 10 s more in process 0
                    |                   v                 |                     v
                    |              exit code 76           |                exit code 76
                    |                                     |
                    +-------------------------------------+
            note_raise: one that had ended in order was still needed

    any, by note_stall -> STALLED: exit code 76

- UNWATCHED: a single process; or jax was connected by others without its recoverability, and aborts all processes when
  one dies. Errors stay as they are.
- WATCHED: all other processes live, or have ended in order.
- LOST: one has died. This process may be in a collective with it, which nothing can interrupt.
- RAISED: a `ProcessLostError` has left the outermost call, and this process waits for no other any more. Its script may
  take its time. A loss that is noted now is only named.
- EXITING: Python ends, which may hang with what the lost process has left.
- STALLED: a process is over a limit of `RunConfig(limits=...)`, and all end. A loss is what this led to.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax
from absl import logging

from estimator.multihost._coordination_client import connected_client, coordination_client
from estimator.multihost._news import NEWS

EXIT_CODE = 76  # of a process that is ended while it waits for one that has died, or hangs itself

_LOSS = "estimator/loss"  # the first loss of a process, the same for all processes
_FAILURES = "estimator/failures"  # by process, the error that ends it
_ENDS = "estimator/ends"  # of processes that have ended in order

_LOOKS = 3  # within the time of the heartbeats
_SECS_AFTER_NEWS = 0.5  # until the next look
_SECS_BETWEEN_LAST_LOOKS = 0.2  # of a process that waits for the end of the others
_SECS_AFTER_AN_END = 3.0  # of a process, for a loss to become known that explains an error better
_SECS_FOR_OTHERS = 5.0  # to end, beyond the grace, before process 0 takes jax's service away
_SECS_TO_EXIT = 1.0  # for what ends a process in order, where that may hang
_SECS_TO_LOG = 10.0


class ProcessLostError(RuntimeError):
    """Another process of this run has died, or ended with an error; the message names it."""

    def __init__(self, loss: str) -> None:
        super().__init__(f"{loss}. Start all processes again: training resumes from the last checkpoint.")


class Stage(enum.IntEnum):
    """The states that the docstring of this module draws, in their order."""

    UNWATCHED = 0
    WATCHED = 1
    LOST = 2
    RAISED = 3
    EXITING = 4
    STALLED = 5


class LostProcess:
    """The loss of another process, as this process knows it. Any thread may call it.

    Attributes:
      stage: where this process stands.
      loss: the process that has died first, and how: "process 1 (host b, pid 4711) ended with ValueError: no such
        file".
      last_ended: the last process that has ended in order.
      end_process: ends this process at once, with exit code 76, given the reason.
    """

    def __init__(self) -> None:
        self.stage = Stage.UNWATCHED
        self.loss: str | None = None
        self.last_ended: str | None = None
        self.end_process: Callable[[str], None] = _end_unwatched
        self._names: Sequence[str] = ()
        self._secs_to_know = 0.0
        self._changes = threading.Condition()

    @property
    def is_ending(self) -> bool:
        """Returns whether a limit has passed, so that a thread ends this process."""
        return self.stage is Stage.STALLED

    def begin_watch(self, secs_to_know: float, names: Sequence[str] = ()) -> None:
        """Notes that a `ProcessWatch` will know of a loss of one of these processes within that time."""
        self._secs_to_know = secs_to_know
        self._names = names
        self._enter(Stage.WATCHED)

    def name_of(self, index: int) -> str:
        """The name of a process, for messages.

        >>> LostProcess().name_of(1)
        'process 1'
        """
        return self._names[index] if self._names else f"process {index}"

    def note_loss(self, loss: str) -> None:
        if not self.is_ending:
            self.loss = loss
            self._enter(Stage.LOST)

    def note_end(self, index: int) -> None:
        """Notes that a process has ended in order."""
        if not self.is_ending:
            self.last_ended = self._names[index]

    def note_raise(self) -> None:
        self._enter(Stage.RAISED)

    def note_exit(self) -> None:
        """Notes that Python ends. Without a loss nothing limits how long that takes."""
        if self.loss:
            self._enter(Stage.EXITING)

    def note_stall(self) -> None:
        self._enter(Stage.STALLED)

    def wait_until(self, is_so: Callable[[], bool], secs: float | None = None) -> bool:
        """Waits for a change of the state; returns whether it has come."""
        with self._changes:
            return self._changes.wait_for(is_so, secs)

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise for an error of work that processes did together: `ProcessLostError` if one has died.

        A collective raises at once, before it is known who died, so this waits until it is; not where nobody watches.
        An error of another kind, such as one of the input, stays: the loss may be what it led to.

        >>> LostProcess().explain(ValueError("no"))
        ValueError('no')
        """
        if self.stage is Stage.UNWATCHED or isinstance(error, ProcessLostError) or not isinstance(error, Exception):
            return error
        if not _follows_from_jax(error):
            return error
        loss = self.loss
        if loss is None and isinstance(error, jax.errors.JaxRuntimeError):
            NEWS.publish()  # all processes have to look who lives
            secs = _SECS_AFTER_AN_END if self.last_ended else self._secs_to_know
            self.wait_until(lambda: self.loss is not None, secs)
            loss = self.loss or self._describe_early_end()
        if loss is None:
            return error
        lost = ProcessLostError(loss)
        lost.__cause__ = error
        return lost

    def raise_if_lost(self, needs_all: bool = False) -> None:
        """Raises `ProcessLostError` if a process has died, or, if all are still needed, has ended in order."""
        if loss := self.loss or (self._describe_early_end() if needs_all else None):
            raise ProcessLostError(loss)

    def _describe_early_end(self) -> str | None:
        return f"{self.last_ended} has ended before this one" if self.last_ended else None

    def _enter(self, stage: Stage) -> None:
        with self._changes:
            self.stage = max(self.stage, stage)  # stages only advance
            self._changes.notify_all()


def _end_unwatched(why: str) -> None:
    """Ends a process that jax was connected in by others."""
    if jax.process_index() == 0:
        time.sleep(_SECS_FOR_OTHERS)
    _say_why(why)
    os._exit(EXIT_CODE)


def _say_why(why: str) -> None:
    line = f"initialize_distributed: {why}. It ends with exit code {EXIT_CODE}.\n"
    os.write(2, line.encode())  # `sys.stderr` may be locked by a thread that hangs
    _run_briefly(sys.stdout.flush)


def _run_briefly(work: Callable[[], Any]) -> None:
    """Calls `work`, which may hang with what the process waits for, and leaves it then."""
    thread = threading.Thread(target=work, daemon=True)
    with contextlib.suppress(RuntimeError):  # Python is at its exit
        thread.start()
        thread.join(_SECS_TO_EXIT)


LOST_PROCESS = LostProcess()


def _follows_from_jax(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of jax's collectives or of its coordination service."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def publish_loss(loss: str) -> None:
    """Tells all processes of a loss, unless one has told them of another before."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        connected_client().key_value_set(_LOSS, loss)
        NEWS.publish()


class ProcessWatch:
    """Threads that ask jax's coordination service who lives, tell `LOST_PROCESS`, and end this process in time.

    jax's call waits until each process that lives has made it, or until the heartbeats of one have stopped; so it is
    made in all. The first loss that any of them sees is the one that all name. A process that still waits for the lost
    one after `grace_secs` is ended by a thread here, since a collective cannot be interrupted: with one line on stderr
    and exit code 76.

    The service is in process 0, and jax aborts all others when that goes: at its end it waits for them.

    Args:
      names: the names of all processes of the run, for messages.
      index: the number of this process.
      heartbeat_secs: seconds after which jax takes a process for dead.
      grace_secs: seconds that a process may wait for one that is lost.
    """

    def __init__(self, names: Sequence[str], index: int, heartbeat_secs: float, grace_secs: float) -> None:
        self._names = names
        self._index = index
        self._heartbeat = heartbeat_secs
        self._grace = grace_secs
        self._pid = os.getpid()
        self._has_failed = False
        self._gone: set[int] = set()  # processes that have ended, in order or not
        self._looked_at = -1  # the news, when this last asked who has ended
        self._disconnects = threading.Lock()
        self._is_connected = True
        self._stops = False
        self._period = heartbeat_secs / _LOOKS  # between looks, where there are no news
        self._is_alone = threading.Event()
        self._excepthook: Callable[..., Any] = sys.excepthook
        NEWS.listen()
        LOST_PROCESS.begin_watch(heartbeat_secs + self._period + _SECS_FOR_OTHERS, names)
        LOST_PROCESS.end_process = self._end_stalled
        sys.excepthook = self._fail
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._watch, name="process-watch", daemon=True)
        self._thread.start()
        # Started now, since Python 3.12 may not start threads at its exit.
        threading.Thread(target=self._end_in_time, name="process-watch-end", daemon=True).start()

    def _watch(self) -> None:
        secs = _SECS_AFTER_NEWS
        while not self._stops:
            news = NEWS.count
            try:
                self._look()
            except jax.errors.JaxRuntimeError as error:  # where process 0 has died, jax is about to end this one
                logging.debug("The coordination service does not answer: %s", error)
            secs = min(secs, self._period)
            NEWS.wait_for(news, lambda: self._stops, secs)
            # What the news are about, such as the end of a process, may come a little later.
            secs = 2 * secs if news == NEWS.count else _SECS_AFTER_NEWS

    def _look_often(self) -> None:
        self._period = _SECS_BETWEEN_LAST_LOOKS
        NEWS.publish()  # the thread may wait for the next look

    def _look(self) -> None:
        client, news = coordination_client(), NEWS.count
        if client is None:  # the program has called `jax.distributed.shutdown`: nobody is left to watch
            self._stops = True
            self._is_alone.set()
            return
        live = client.get_live_nodes(list(range(len(self._names))))
        missing = set(range(len(self._names))) - live.keys()
        if news != self._looked_at or missing - self._gone:
            self._look_at_ends(missing)
            self._looked_at = news
        if not live.keys() - {self._index}:
            self._is_alone.set()

    def _look_at_ends(self, missing: set[int]) -> None:
        client = connected_client()
        # Ends before deaths: a process that has ended in order sends no heartbeats either. Errors before missing
        # heartbeats, since they say more.
        for key, _ in client.key_value_dir_get(_ENDS):
            self._gone.add(_index_in(key))
        for key, error in client.key_value_dir_get(_FAILURES):
            self._lose(_index_in(key), f"ended with {error}")
        for index in sorted(missing - self._gone):
            self._lose(index, f"has died, or its host has: nothing was heard of it for {self._heartbeat:g} s")
        if others := self._gone - {self._index}:
            LOST_PROCESS.note_end(max(others))

    def _lose(self, index: int, how: str) -> None:
        if index in self._gone or LOST_PROCESS.is_ending:
            return
        self._gone.add(index)
        publish_loss(f"{self._names[index]} {how}")
        loss = connected_client().blocking_key_value_get(_LOSS, 1000)  # another process may have seen another one
        if index == self._index and not self._has_failed:
            # This process was suspended, or another run has its number: jax is about to abort it.
            self._end_now(loss)
        if LOST_PROCESS.loss is None and not self._has_failed:
            LOST_PROCESS.note_loss(loss)

    def _end_in_time(self) -> None:
        """Ends this process if it takes longer than the grace to notice a loss, or to exit after it."""
        LOST_PROCESS.wait_until(lambda: LOST_PROCESS.loss is not None)
        if LOST_PROCESS.wait_until(lambda: LOST_PROCESS.stage >= Stage.RAISED, self._grace):
            LOST_PROCESS.wait_until(lambda: LOST_PROCESS.stage is Stage.EXITING)
            # In process 0 `_wait_for_others` may take the grace and 5 s.
            time.sleep(self._grace + (2 * _SECS_FOR_OTHERS if self._index == 0 else 0.0))
        self._end_now(f"{LOST_PROCESS.loss}; this process still waits for it after {self._grace:g} s")

    def _end_now(self, why: str) -> None:
        if self._index == 0:
            self._look_often()
            self._is_alone.wait(_SECS_FOR_OTHERS)
        _say_why(why)
        _run_briefly(self._disconnect)
        os._exit(EXIT_CODE)

    def _end_stalled(self, why: str) -> None:
        """Ends this process, and tells those that have left the call, and wait for it at their exit, why."""
        _run_briefly(lambda: self._publish(_FAILURES, f"exit code {EXIT_CODE}: {why}"))
        self._end_now(why)

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Publishes the error that ends this process; where it follows from a loss, says so here."""
        if os.getpid() == self._pid:  # and not in a forked process, such as a worker of a loader
            if isinstance(error, jax.errors.JaxRuntimeError):
                error = LOST_PROCESS.explain(error)
            self._has_failed = True
            text = " ".join(str(error).split("\n", 1)[0].split())[:300]
            self._publish(_FAILURES, f"{type(error).__name__}: {text}" if text else type(error).__name__)
            LOST_PROCESS.note_exit()
        self._excepthook(type(error), error, error.__traceback__ or traceback)

    def _leave(self) -> None:
        """Says goodbye at the exit of Python."""
        if os.getpid() != self._pid:
            return
        if not self._has_failed:
            self._publish(_ENDS, "")
        LOST_PROCESS.note_exit()
        if self._index == 0:
            self._wait_for_others()
        self._disconnect()

    def _wait_for_others(self) -> None:
        began, has_logged = time.monotonic(), False
        self._look_often()
        while not self._is_alone.wait(0.05):
            secs = time.monotonic() - began
            if (LOST_PROCESS.loss or self._has_failed) and secs > self._grace + _SECS_FOR_OTHERS:
                return
            if not has_logged and secs > _SECS_TO_LOG:
                has_logged = True
                others = ", ".join(str(i) for i in range(len(self._names)) if i not in self._gone | {0})
                logging.info("Process 0 has ended, and waits for processes that it serves: %s.", others)

    def _disconnect(self) -> None:
        self._stops = True
        NEWS.notify()
        self._thread.join(_SECS_TO_EXIT)
        with self._disconnects:  # jax aborts a process that disconnects twice, as the exit and `_end_now` may
            if self._is_connected:
                self._is_connected = False
                jax.distributed.shutdown()

    def _publish(self, folder: str, text: str) -> None:
        try:
            connected_client().key_value_set(f"{folder}/{self._index:06}", text)
            NEWS.publish()
        except jax.errors.JaxRuntimeError as error:
            logging.debug("The coordination service does not answer: %s", error)


def _index_in(key: str) -> int:
    """The number of the process that has published a key."""
    return int(key.rpartition("/")[2])
