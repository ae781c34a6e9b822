"""Notices that another process of the run has died or failed, and ends this one where it waits for it in vain."""

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

from estimator.multihost import _liveness
from estimator.multihost._coordination_client import coordination_client
from estimator.multihost._introduction import LOSS_KEY, Introduction
from estimator.multihost._runtime import RUNTIME

_FAILURES = "estimator/failures"  # by process, the error that ends it
_ENDS = "estimator/ends"  # of processes that have ended in order
_PERIOD_SECS = 0.5
_SECS_FOR_OTHERS = 5.0  # to end, beyond the grace, before process 0 takes jax's service away
_SECS_TO_EXIT = 1.0  # for what ends a process in order, where that may hang
_SECS_TO_LOG = 10.0


class ProcessWatch:
    """A thread that asks jax's coordination service who lives, and notes in the `RUNTIME` who has died.

    jax's call waits until each process that lives has made it, or until the heartbeats of one have stopped; so it is
    made in all. The first loss that any of them sees is the one that all name. A process that still waits for the lost
    one after `grace_secs` is ended by a thread here, since a collective cannot be interrupted: with one line on stderr
    and exit code 76.

    The service is in process 0, and jax aborts all others when that goes: at its end it waits for them.

    Args:
      processes: all of the run.
      index: which of them this is.
      heartbeat_secs: seconds after which jax takes a process for dead.
      grace_secs: seconds that a process may wait for one that is lost.
    """

    def __init__(self, processes: Sequence[Introduction], index: int, heartbeat_secs: float, grace_secs: float) -> None:
        self._names = [str(process) for process in processes]
        self._index = index
        self._heartbeat = heartbeat_secs
        self._grace = grace_secs
        self._pid = os.getpid()
        self._has_failed = False
        self._ended: set[int] = set()
        self._disconnects = threading.Lock()
        self._is_connected = True
        self._stops = threading.Event()
        self._is_alone = threading.Event()
        self._exits_after_loss = threading.Event()
        self._excepthook: Callable[..., Any] = sys.excepthook
        RUNTIME.loss_known_secs = heartbeat_secs + _SECS_FOR_OTHERS
        sys.excepthook = self._fail
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._watch, name="process-watch", daemon=True)
        self._thread.start()
        # From now on, since Python 3.12.1 starts no thread at its exit.
        threading.Thread(target=self._end_in_time, name="process-watch-end", daemon=True).start()

    def _watch(self) -> None:
        while not self._stops.wait(_PERIOD_SECS):
            try:
                self._look()
            except jax.errors.JaxRuntimeError as error:  # where process 0 has died, jax is about to end this one
                logging.debug("The coordination service does not answer: %s", error)

    def _look(self) -> None:
        client = coordination_client()
        live = client.get_live_nodes(list(range(len(self._names))))
        for key, _ in client.key_value_dir_get(_ENDS):
            self._ended.add(int(key.rpartition("/")[2]))
        for key, error in client.key_value_dir_get(_FAILURES):
            self._lose(int(key.rpartition("/")[2]), f"ended with {error}")
        for index in range(len(self._names)):
            if index not in live and index not in self._ended:
                self._lose(index, f"has died, or its host has: nothing was heard of it for {self._heartbeat:g} s")
        if others := self._ended - {self._index}:
            RUNTIME.ended = self._names[max(others)]
        if not live.keys() - {self._index}:
            self._is_alone.set()

    def _lose(self, index: int, how: str) -> None:
        if index in self._ended:
            return
        self._ended.add(index)
        client = coordination_client()
        try:
            client.key_value_set(LOSS_KEY, f"{self._names[index]} {how}")
        except jax.errors.JaxRuntimeError:
            pass  # another process has seen a loss before
        loss = client.blocking_key_value_get(LOSS_KEY, 1000)
        if index == self._index and not self._has_failed:
            self._end_now(loss)  # it has slept, or another run has its number; jax is about to abort it
        if RUNTIME.loss is None and not self._has_failed:
            _liveness.note_loss(loss)

    def _end_in_time(self) -> None:
        """Ends this process if it takes longer than the grace to notice a loss, or to exit after it."""
        RUNTIME.loss_known.wait()
        if RUNTIME.loss_raised.wait(self._grace):
            self._exits_after_loss.wait()
            time.sleep(self._grace + (2 * _SECS_FOR_OTHERS if self._index == 0 else 0.0))
        self._end_now(f"{RUNTIME.loss}; this process still waits for it after {self._grace:g} s")

    def _end_now(self, why: str) -> None:
        if self._index == 0:
            self._is_alone.wait(_SECS_FOR_OTHERS)
        line = f"initialize_distributed: {why}. It ends with exit code {_liveness.EXIT_CODE}.\n"
        os.write(2, line.encode())
        for work in (sys.stdout.flush, self._disconnect):  # either may hang with what this process waits for
            thread = threading.Thread(target=work, daemon=True)
            with contextlib.suppress(RuntimeError):  # Python is at its exit
                thread.start()
                thread.join(_SECS_TO_EXIT)
        os._exit(_liveness.EXIT_CODE)

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Publishes the error that ends this process; where it follows from a loss, says so here."""
        if os.getpid() == self._pid:
            if isinstance(error, jax.errors.JaxRuntimeError):
                error = _liveness.explained(error)
            self._has_failed = True
            text = " ".join(str(error).split("\n", 1)[0].split())[:300]
            self._publish(_FAILURES, f"{type(error).__name__}: {text}" if text else type(error).__name__)
            self._note_exit()
        self._excepthook(type(error), error, error.__traceback__ or traceback)

    def _leave(self) -> None:
        """At the exit."""
        if os.getpid() != self._pid:
            return
        if not self._has_failed:
            self._publish(_ENDS, "")
        self._note_exit()
        if self._index == 0:
            self._wait_for_others()
        self._disconnect()

    def _note_exit(self) -> None:
        if RUNTIME.loss:
            RUNTIME.loss_raised.set()
            self._exits_after_loss.set()

    def _wait_for_others(self) -> None:
        began, has_logged = time.monotonic(), False
        while not self._is_alone.wait(0.05):
            secs = time.monotonic() - began
            if (RUNTIME.loss or self._has_failed) and secs > self._grace + _SECS_FOR_OTHERS:
                return
            if not has_logged and secs > _SECS_TO_LOG:
                has_logged = True
                others = ", ".join(str(i) for i in range(len(self._names)) if i not in self._ended | {0})
                logging.info("Process 0 has ended, and waits for processes that it serves: %s.", others)

    def _disconnect(self) -> None:
        self._stops.set()
        self._thread.join(_SECS_TO_EXIT)
        with self._disconnects:  # jax aborts a process that disconnects twice, as the exit and `_end_now` may
            if self._is_connected:
                self._is_connected = False
                jax.distributed.shutdown()

    def _publish(self, key: str, text: str) -> None:
        try:
            coordination_client().key_value_set(f"{key}/{self._index:06}", text)
        except jax.errors.JaxRuntimeError as error:
            logging.debug("The coordination service does not answer: %s", error)
