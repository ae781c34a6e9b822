"""The watch over the other processes: it asks jax's coordination service who lives, and says goodbye at the end."""

from __future__ import annotations

import atexit
import contextlib
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
from estimator.multihost._supervisor import (
    EXIT_CODE,
    SECS_FOR_OTHERS,
    SECS_TO_ANSWER,
    SUPERVISOR,
    Peers,
    exit_at_once,
    run_within,
)

_LOSS = "estimator/loss"  # the first loss of a process, the same for all processes
_FAILURES = "estimator/failures"  # by process, the error that ends it
_ENDS = "estimator/ends"  # of processes that have ended in order

_LOOKS = 3  # within the time of the heartbeats
_SECS_AFTER_NEWS = 0.5  # until the next look
_SECS_BETWEEN_LAST_LOOKS = 0.2  # of a process that waits for the end of the others
_SECS_TO_PUBLISH = 1.0  # where process 0 may not answer
_SECS_TO_DISCONNECT = 1.0  # for the request that is under way
_SECS_TO_LOG = 10.0


def publish_loss(loss: str) -> None:
    """Tells all processes of a loss, unless one has told them of another before."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        connected_client().key_value_set(_LOSS, loss)
        SUPERVISOR.publish()


class ProcessWatch:
    """A thread that asks who lives, and tells `SUPERVISOR`.

    jax's call waits until each process that lives has made it, or until the heartbeats of one have stopped; so it is
    made in all. The first loss that any of them sees is the one that all name. The service is in process 0, and jax
    aborts all others when that goes: at its end it waits for them.

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
        self._dead: set[int] = set()  # of these, those that were not heard of
        self._looked_at = -1  # the news, when this last asked who has ended
        self._disconnects = threading.Lock()
        self._is_connected = True
        self._stops = False
        self._period = heartbeat_secs / _LOOKS  # between looks, where there are no news
        self._is_alone = threading.Event()
        self._excepthook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._fail
        SUPERVISOR.listen()
        # In process 0 `_wait_for_others` may take the grace and 5 s.
        secs_to_exit = grace_secs + (0.0 if index else 2 * SECS_FOR_OTHERS)
        SUPERVISOR.begin_watch(Peers(self._end_now, self._look_who_answers, names, grace_secs, secs_to_exit))
        atexit.register(self._leave)
        self._looks = SUPERVISOR.ask(self._watch)

    def _watch(self) -> None:
        secs = _SECS_AFTER_NEWS
        while not self._stops:
            news = SUPERVISOR.news
            try:
                self._look()
            except jax.errors.JaxRuntimeError as error:  # where process 0 has died, jax is about to end this one
                logging.debug("The coordination service does not answer: %s", error)
            secs = min(secs, self._period)
            SUPERVISOR.wait_for_news(news, lambda: self._stops, secs)
            # What the news are about, such as the end of a process, may come a little later.
            secs = 2 * secs if news == SUPERVISOR.news else _SECS_AFTER_NEWS

    def _look_often(self) -> None:
        self._period = _SECS_BETWEEN_LAST_LOOKS
        SUPERVISOR.publish()  # the thread may wait for the next look

    def _look(self) -> None:
        client, news = coordination_client(), SUPERVISOR.news
        if client is None:  # the program has called `jax.distributed.shutdown`: nobody is left to watch
            self._stops = True
            self._is_alone.set()
            return
        live = client.get_live_nodes(list(range(len(self._names))))
        missing = set(range(len(self._names))) - live.keys()
        if news != self._looked_at or missing - self._gone:
            self._look_at_ends(missing, f"nothing was heard of it for {self._heartbeat:g} s")
            self._looked_at = news
        if not live.keys() - {self._index}:
            self._is_alone.set()

    def _look_who_answers(self) -> None:
        """Looks for processes that have died before their heartbeats say so."""
        try:
            others = set(range(len(self._names))) - self._gone - {self._index}
            self._look_at_ends(SUPERVISOR.find_silent(others), f"it does not answer within {SECS_TO_ANSWER:g} s")
        except jax.errors.JaxRuntimeError as error:
            logging.debug("The coordination service does not answer: %s", error)

    def _look_at_ends(self, missing: set[int], why: str) -> None:
        client = connected_client()
        # Ends before deaths: a process that has ended in order sends no heartbeats either. Errors before missing
        # heartbeats, since they say more.
        for key, _ in client.key_value_dir_get(_ENDS):
            self._gone.add(_index_in(key))
        for key, error in client.key_value_dir_get(_FAILURES):
            self._lose(_index_in(key), f"ended with {error}")
        for index in sorted(missing - self._gone):
            self._dead.add(index)
            self._lose(index, f"has died, or its host has: {why}")
        if others := self._gone - {self._index}:
            SUPERVISOR.note_end(max(others))

    def _lose(self, index: int, how: str) -> None:
        if index in self._gone or SUPERVISOR.is_stalled:
            return
        self._gone.add(index)
        publish_loss(f"{self._names[index]} {how}")
        loss = connected_client().blocking_key_value_get(_LOSS, 1000)  # another process may have seen another one
        if index == self._index and not self._has_failed:
            # This process was suspended, or another run has its number: jax is about to abort it.
            self._end_now(loss)
        if SUPERVISOR.loss is None and not self._has_failed:
            SUPERVISOR.note_loss(loss)

    def _end_now(self, why: str) -> None:
        """Ends this process, and tells those that have left the call, and wait for it at their exit, why."""
        self._has_failed = True  # of which the other thread, that looks, is not to make an end of its own
        run_within(_SECS_TO_PUBLISH, lambda: self._publish(_FAILURES, f"exit code {EXIT_CODE}: {why}"))
        if self._index == 0:
            self._look_often()
            self._is_alone.wait(SECS_FOR_OTHERS)
        exit_at_once(why, self._disconnect)

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Publishes the error that ends this process; where it follows from a loss, says so here."""
        if os.getpid() == self._pid:  # and not in a forked process, such as a worker of a loader
            if isinstance(error, jax.errors.JaxRuntimeError):
                error = SUPERVISOR.explain(error)
            self._has_failed = True
            text = " ".join(str(error).split("\n", 1)[0].split())[:300]
            self._publish(_FAILURES, f"{type(error).__name__}: {text}" if text else type(error).__name__)
            SUPERVISOR.note_exit()
        self._excepthook(type(error), error, error.__traceback__ or traceback)

    def _leave(self) -> None:
        """Says goodbye at the exit of Python."""
        if os.getpid() != self._pid:
            return
        if not self._has_failed:
            self._publish(_ENDS, "")
        SUPERVISOR.note_exit()
        if self._index == 0:
            self._wait_for_others()
        self._disconnect()

    def _wait_for_others(self) -> None:
        began, has_logged = time.monotonic(), False
        self._look_often()
        while not self._is_alone.wait(0.05):
            secs = time.monotonic() - began
            if self._dead and self._have_all_ended():  # the watch still waits for the heartbeats of those that are dead
                time.sleep(2 * _SECS_TO_DISCONNECT)
                return
            if (SUPERVISOR.loss or self._has_failed) and secs > self._grace + SECS_FOR_OTHERS:
                return
            if not has_logged and secs > _SECS_TO_LOG:
                has_logged = True
                others = ", ".join(str(i) for i in range(len(self._names)) if i not in self._gone | {0})
                logging.info("Process 0 has ended, and waits for processes that it serves: %s.", others)

    def _have_all_ended(self) -> bool:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._look_at_ends(set(), "")
        return len(self._gone | {self._index}) == len(self._names)

    def _disconnect(self) -> None:
        self._stops = True
        SUPERVISOR.notify()
        self._looks.thread.join(_SECS_TO_DISCONNECT)
        with self._disconnects:  # jax aborts a process that disconnects twice, as the exit and `_end_now` may
            if self._is_connected:
                self._is_connected = False
                jax.distributed.shutdown()

    def _publish(self, folder: str, text: str) -> None:
        try:
            connected_client().key_value_set(f"{folder}/{self._index:06}", text)
            SUPERVISOR.publish()
        except jax.errors.JaxRuntimeError as error:
            logging.debug("The coordination service does not answer: %s", error)


def _index_in(key: str) -> int:
    """The number of the process that has published a key."""
    return int(key.rpartition("/")[2])
