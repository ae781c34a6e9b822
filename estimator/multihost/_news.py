"""News of a run: something was published that a process which waits has to look at.

A process that waits could ask jax's coordination service again and again, and each request costs both of them 60
context switches. One that waits for its answer costs nothing. So threads wait for the service, and the others for them,
within the process; and one thread of each process waits for the next news:

    the publisher      sets the key of what it publishes, then <news>/<n>, the first n that is free
    every process      waits for <news>/<n>, raises `count`, waits for <news>/<n + 1>

So whoever has looked at a key need not look again before `count` has grown.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

import jax
from absl import logging

from estimator.multihost._coordination_client import connected_client, coordination_client

_NEWS = "estimator/news"
_REQUEST_MS = 600_000
_SECS_TO_CLOSE = 1.0  # in all


class Awaited:
    """A value of the key-value store that a thread waits for, and tells `NEWS` of.

    Attributes:
      text: the value, once it is there.
      error: what ended the wait instead.
    """

    def __init__(self, key: str) -> None:
        self.text: str | None = None
        self.error: jax.errors.JaxRuntimeError | None = None
        self._key = key
        self._is_wanted = True
        thread = threading.Thread(target=self._get, name="process-wait", daemon=True)
        NEWS.threads.add(thread)
        thread.start()

    @property
    def is_done(self) -> bool:
        return self.text is not None or self.error is not None

    def give_up(self) -> None:
        """Ends the wait when its request does."""
        self._is_wanted = False

    def _get(self) -> None:
        while self._is_wanted and not self.is_done:
            try:
                self.text = connected_client().blocking_key_value_get(self._key, _REQUEST_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self.error = error
        NEWS.threads.discard(threading.current_thread())
        NEWS.notify()


class News:
    """The number of news so far, and the threads that wait for the service.

    Attributes:
      count: the number.
      threads: the threads.
    """

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[threading.Thread] = set()
        self._changes = threading.Condition()
        self._pid: int | None = None

    def listen(self) -> None:
        """Starts to count, where that has not begun; jax is connected."""
        if self._pid is None:
            self._pid = os.getpid()
            thread = threading.Thread(target=self._listen, name="process-news", daemon=True)
            self.threads.add(thread)
            thread.start()
            atexit.register(self._close)

    def publish(self) -> None:
        """Wakes all processes, where there is a service; what they are to see is published already."""
        number, client = self.count + 1, coordination_client()
        while client is not None:
            try:
                return client.key_value_set(f"{_NEWS}/{number}", "")
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    logging.debug("The coordination service does not answer: %s", error)
                    return
                number += 1  # that was of other news

    def notify(self) -> None:
        """Lets threads of this process that wait look again."""
        with self._changes:
            self._changes.notify_all()

    def wait_for(self, news: int, is_so: Callable[[], bool], secs: float) -> None:
        """Waits until there are more than `news`, or something is so, of which `notify` tells; or for some seconds."""
        with self._changes:
            self._changes.wait_for(lambda: self.count != news or is_so(), min(secs, threading.TIMEOUT_MAX))

    def _listen(self) -> None:
        while True:
            try:
                connected_client().blocking_key_value_get(f"{_NEWS}/{self.count + 1}", _REQUEST_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                logging.debug("The coordination service does not answer: %s", error)
                return  # this process disconnects, or jax is about to end it
            self.count += 1
            self.notify()

    def _close(self) -> None:
        """Ends the threads: one that returned from a request later than Python ends would abort the process."""
        if os.getpid() != self._pid:
            return  # a forked process, such as a worker of a loader
        jax.distributed.shutdown()  # which ends all requests; does nothing if that was called before
        deadline = time.monotonic() + _SECS_TO_CLOSE
        for thread in list(self.threads):
            thread.join(max(0.0, deadline - time.monotonic()))


NEWS = News()
