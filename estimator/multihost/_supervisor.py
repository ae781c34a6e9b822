"""The supervisor of this process: what it knows of failures, stalls and ends, of itself and of other processes.

Whoever waits for another process waits here, and is woken by these events:

    news     another process has published something. Each process waits for the key <news>/<n>, raises `news`, and
             waits for <news>/<n + 1>: who has looked at a key need not look again before `news` has grown. A request
             to jax's service, which keeps the keys, costs both sides 60 context switches; one that waits costs nothing
    answer   a request that was made by `ask`, in a thread of its own, has come back
    loss     a process has died, or ended with an error
    end      a process has ended in order

The value of a key of news is empty, or asks who lives. The thread that waits for news answers, whatever else its
process does. So a process that does not answer has died, or is suspended: `look_who_answers` knows this in
`SECS_TO_ANSWER`, and not only when its heartbeats have stopped. It is asked where somebody waits for a process that may
not come any more: after an error of a collective, and when this process is to save and stop.

One thread acts. It looks after the runs of this process, which `_limit_watch.py` reports when a phase of theirs passes
its limit. And it ends this process where that lasts too long after a loss, since a collective cannot be interrupted:

    note_loss     grace_secs later; unless until then
    note_raise    never: a `ProcessLostError` has left the outermost call, and the script may take its time
    note_exit     grace_secs after Python's exit has begun, as that may hang with what the lost process has left

with a line on stderr, and exit code 76.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
from absl import logging

from estimator.multihost._coordination_client import await_value, connected_client, coordination_client
from estimator.runtime._uninterrupted import Work

T = TypeVar("T")

EXIT_CODE = 76  # of a process that is ended while it waits for one that has died, or hangs itself
SECS_FOR_OTHERS = 5.0  # to end, before process 0 takes jax's service away
SECS_TO_ANSWER = 5.0  # of a process that lives, on a host with more to do than CPUs

_NEWS = "estimator/news"
_ASKS = "who lives?"  # as the value of news
_ANSWERS = "estimator/answers"  # by process, the number of the last news that asked
_SECS_BETWEEN_ANSWERS = 0.1
_SECS_AFTER_AN_END = 3.0  # of a process, for a loss to become known that explains an error better
_SECS_TO_EXIT = 1.0  # for what ends a process in order, where that may hang


class ProcessLostError(RuntimeError):
    """Another process of this run has died, or ended with an error; the message names it."""

    def __init__(self, loss: str) -> None:
        super().__init__(f"{loss}. Start all processes again: training resumes from the last checkpoint.")


class Peers(NamedTuple):
    """The other processes, as a loss among them concerns this one.

    Attributes:
      end: ends this process at once, with exit code 76, given the reason.
      look: asks who lives, and notes a loss.
      names: the names of all processes, for messages.
      grace_secs: seconds for which this process may wait for one that was lost.
      secs_to_exit: seconds for which Python may take to end after a loss.
    """

    end: Callable[[str], None]
    look: Callable[[], None] = lambda: None
    names: Sequence[str] = ()
    grace_secs: float = 0.0
    secs_to_exit: float = 0.0

    def name_of(self, index: int) -> str:
        return self.names[index] if self.names else f"process {index}"


class Watched(Protocol):
    """A run that the supervisor looks after."""

    def look(self, now: float) -> float:
        """Reports the run if it is over a limit; returns when to look again, by `time.monotonic()`."""


class Supervisor:
    """The supervisor of a process. Any thread may call it.

    Attributes:
      news: the number of news so far.
      loss: the process that has died first, and how: "process 1 (host b, pid 4711) ended with ValueError: no such
        file".
      last_ended: the last process that has ended in order.
      is_stalled: whether a limit has passed, so that this process is being ended: a loss is what this led to.
      peers: the other processes. If nobody watches them, errors stay as they are.
    """

    def __init__(self) -> None:
        self.news = 0
        self.loss: str | None = None
        self.last_ended: str | None = None
        self.is_stalled = False
        self.peers = _NOBODY
        self._has_raised = self._is_exiting = False
        self._ends_at = math.inf
        self._runs: list[Watched] = []
        self._requests: set[Work] = set()
        self._listens_in: int | None = None  # the process that did not fork since
        self._thread: Work | None = None
        self._looks = threading.Lock()
        self._has_changed = False  # since the thread has looked
        self._changes = threading.Condition()

    # Events.

    def notify(self) -> None:
        """Lets those that wait in this process look again."""
        with self._changes:
            self._has_changed = True
            self._changes.notify_all()

    def wait_for(self, is_so: Callable[[], bool], secs: float) -> bool:
        """Waits for an event after which `is_so()`, at most for some seconds; returns whether it is."""
        with self._changes:
            return self._changes.wait_for(is_so, min(secs, threading.TIMEOUT_MAX))

    def wait_for_news(self, news: int, is_so: Callable[[], bool], secs: float) -> None:
        """Waits for other news than `news`, or for `is_so()`, or for some seconds."""
        self.wait_for(lambda: self.news != news or is_so(), secs)

    def ask(self, request: Callable[[], object]) -> Work:
        """Makes a request that waits for other processes, in a thread of its own, whose end is an event."""

        def end() -> None:
            self._requests.discard(work)
            self.notify()

        work = Work(request, "process-request", end)
        self._requests.add(work)
        work.thread.start()
        return work

    def listen(self) -> None:
        """Starts to count news, if that has not begun; jax is connected."""
        if self._listens_in is None:
            self._listens_in = os.getpid()
            self.ask(self._listen)
            atexit.register(self._close)

    def _listen(self) -> None:
        while True:  # until this process disconnects, or jax is about to end it, which is an error
            text = await_value(f"{_NEWS}/{self.news + 1}")
            self.news += 1
            if text == _ASKS:
                key = f"{_ANSWERS}/{jax.process_index():06}"
                connected_client().key_value_set(key, str(self.news), allow_overwrite=True)
            self.notify()

    def publish(self, text: str = "") -> int | None:
        """Wakes all processes, where there is a service; what they are to see is published already.

        Returns:
          The number of the news; None if the service does not answer.
        """
        number, client = self.news + 1, coordination_client()
        while client is not None:
            try:
                client.key_value_set(f"{_NEWS}/{number}", text)
                return number
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    logging.debug("The coordination service does not answer: %s", error)
                    return None
                number += 1  # that was of other news
        return None

    def find_silent(self, processes: Collection[int]) -> set[int]:
        """Asks who lives; returns the processes that do not answer in time."""
        number, silent = self.publish(_ASKS), set(processes)
        deadline = time.monotonic() + SECS_TO_ANSWER
        while number is not None and silent and time.monotonic() < deadline:
            time.sleep(_SECS_BETWEEN_ANSWERS)
            for key, answer in connected_client().key_value_dir_get(_ANSWERS):
                if int(answer) >= number:
                    silent.discard(int(key.rpartition("/")[2]))
        return set() if number is None else silent

    def _close(self) -> None:
        """Ends the requests: one that returned later than Python ends would abort the process."""
        if os.getpid() != self._listens_in:
            return  # a forked process, such as a worker of a loader
        jax.distributed.shutdown()  # which ends all requests; does nothing if that was called before
        deadline = time.monotonic() + _SECS_TO_EXIT
        for request in list(self._requests):
            request.thread.join(max(0.0, deadline - time.monotonic()))

    # Other processes.

    def begin_watch(self, peers: Peers) -> None:
        """Records that a loss of another process will be known."""
        self.peers = peers
        self._start()

    def note_loss(self, loss: str) -> None:
        with self._changes:
            if not self.is_stalled:
                self.loss = loss
                self._ends_at = math.inf if self._has_raised else time.monotonic() + self.peers.grace_secs
                self.notify()

    def note_end(self, index: int) -> None:
        """Records that a process has ended in order."""
        if not self.is_stalled:
            self.last_ended = self.peers.name_of(index)

    def note_raise(self) -> None:
        """Records that a `ProcessLostError` has left the outermost call: this process waits for no other any more."""
        with self._changes:
            self._has_raised, self._ends_at = True, math.inf

    def note_exit(self) -> None:
        """Records that Python ends. Without a loss nothing limits how long that takes."""
        with self._changes:
            if self.loss and not self._is_exiting:
                self._is_exiting, self._ends_at = True, time.monotonic() + self.peers.secs_to_exit
                self.notify()

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise for an error of work that processes did together: `ProcessLostError` if one has died.

        A collective raises at once, before it is known who died, so this waits until it is; not where nobody watches.
        An error of another kind, such as one of the input, stays: the loss may be what it led to.

        >>> Supervisor().explain(ValueError("no"))
        ValueError('no')
        """
        if self.peers is _NOBODY or isinstance(error, ProcessLostError) or not isinstance(error, Exception):
            return error
        if not _follows_from_jax(error):
            return error
        loss = self.loss
        if loss is None and isinstance(error, jax.errors.JaxRuntimeError):
            asked = self.look_who_lives()
            self.wait_for(lambda: self.loss is not None or asked.done.is_set(), math.inf)
            self.wait_for(lambda: self.loss is not None, _SECS_AFTER_AN_END)
            loss = self.loss or self._describe_early_end()
        if loss is None:
            return error
        lost = ProcessLostError(loss)
        lost.__cause__ = error
        return lost

    def look_who_lives(self) -> Work:
        """Starts to ask who lives; whoever does not answer is lost."""
        return self.ask(self.peers.look)

    def raise_if_lost(self, needs_all: bool = False) -> None:
        """Raises `ProcessLostError` if a process has died, or, if all are still needed, has ended in order."""
        if loss := self.loss or (self._describe_early_end() if needs_all else None):
            raise ProcessLostError(loss)

    def _describe_early_end(self) -> str | None:
        return f"{self.last_ended} has ended before this one" if self.last_ended else None

    # Runs of this process.

    def add(self, run: Watched) -> None:
        with self._looks:
            self._runs.append(run)
        self._start()
        self.notify()

    def remove(self, run: Watched) -> None:
        """Returns when no report of the run is being made."""
        with self._looks:
            self._runs.remove(run)

    def _start(self) -> None:
        with self._looks:
            # Early, since Python 3.12 may not start threads at its exit. A forked process has no thread.
            if self._thread is None or not self._thread.thread.is_alive():
                self._thread = Work(self._supervise, "supervisor")
                self._thread.thread.start()

    def _supervise(self) -> None:
        while True:
            due = self._act()
            self.wait_for(lambda: self._has_changed, due - time.monotonic())

    def _act(self) -> float:
        """Does what is due, and returns when the next is."""
        self._has_changed, now = False, time.monotonic()
        if now >= self._ends_at:
            self.peers.end(f"{self.loss}; this process still waits for it after {self.peers.grace_secs:g} s")
        with self._looks:
            return min([self._ends_at, *(run.look(now) for run in self._runs)])


def _end_unwatched(why: str) -> None:
    """Ends a single process, or one that jax was connected in by others."""
    if jax.process_count() > 1 and jax.process_index() == 0:
        time.sleep(SECS_FOR_OTHERS)
    exit_at_once(why)


def exit_at_once(why: str, work: Callable[[], object] = lambda: None) -> None:
    """Says why this process ends, does some last work, and ends it."""
    line = f"initialize_distributed: {why}. It ends with exit code {EXIT_CODE}.\n"
    os.write(2, line.encode())  # `sys.stderr` may be locked by a thread that hangs
    for each in (sys.stdout.flush, work):
        run_within(_SECS_TO_EXIT, each)
    os._exit(EXIT_CODE)


def run_within(secs: float, call: Callable[[], T]) -> T | None:
    """Makes a call that may hang, in a thread; returns its result, or None if it has none in time."""
    work = Work(call, "process-request")
    try:
        work.thread.start()
        return work.result() if work.done.wait(secs) else None  # type: ignore[return-value]
    except RuntimeError as error:  # of jax's service; or Python is at its exit, and starts no thread
        logging.debug("A request has failed: %s", error)
        return None


def _follows_from_jax(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of jax's collectives or of its coordination service."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


_NOBODY = Peers(_end_unwatched)
SUPERVISOR = Supervisor()
