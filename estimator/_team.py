"""Processes that run as one, and what they tell each other: over the network of the hosts, not that of the devices.

All of them call the same things in the same order. Where they could differ, since inputs end and clocks run on their
own, they first agree here, through the key-value store that jax's coordinator, process 0, keeps for all.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from estimator import _processes

_WAIT_MS = 100
_ROUNDS_KEPT = 100  # at most, of those in which process 0 alone speaks, and so does not know who has heard it
_SECONDS_TO_TELL = 60.0  # of a process that does not come
_numbers = itertools.count()


class Team:
    """What a run says to the same run in the other processes.

    Args:
      what: the same in all processes; for messages.
      towers: how many towers each process has.
    """

    def __init__(self, what: str, towers: int = 1) -> None:
        self.towers = towers
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._what = what
        self._prefix = f"estimator/{next(_numbers)}"
        self._round = 0
        self._kept = 0  # the first round whose values are still there
        self._lock = threading.Lock()

    def channel(self, what: str) -> Team:
        """Another one for a thread of the run."""
        return Team(f"{self._what}, {what}", self.towers)

    def exchange(self, value: Any) -> list[Any]:
        """The values that all processes give, in their order; waits for the last of them.

        Raises:
          ProcessLostError: one has died.
        """
        return self.finish(self.offer(value))

    def flag(self) -> None:
        """Raises a flag that all processes can see."""
        _client().key_value_set(f"{self._prefix}/flag", "", allow_overwrite=True)

    def is_flagged(self) -> bool:
        return bool(_client().key_value_dir_get(f"{self._prefix}/flag"))

    def offer(self, value: Any) -> int:
        """Gives the value of this process without waiting; returns the number of the round, for `finish`."""
        with self._lock:
            number, self._round = self._round, self._round + 1
            _client().key_value_set_bytes(self._key(number, self.index), pickle.dumps(value))
        return number

    def finish(self, number: int, closed: threading.Event | None = None) -> list[Any]:
        """The values of a round, once all have given theirs.

        Raises:
          InterruptedError: `closed` was set meanwhile.
        """
        if self.index:
            return pickle.loads(self._get(self._key(number, "all"), "all others", closed))
        values = [self._get(self._key(number, i), f"process {i}", closed) for i in range(self.count)]
        found = [pickle.loads(value) for value in values]
        _client().key_value_set_bytes(self._key(number, "all"), pickle.dumps(found))
        for old in range(self._kept, number):  # whoever takes part in a round has read what came out of those before
            _client().key_value_delete(self._key(old, ""))
        self._kept = number
        return found

    def from_chief(self, value: Any) -> Any:
        """The value that process 0 gives, in all processes."""
        with self._lock:
            number, self._round = self._round, self._round + 1
        key = self._key(number, "chief")
        if self.index:
            value = pickle.loads(self._get(key, "process 0"))
        else:
            _client().key_value_set_bytes(key, pickle.dumps(value))
        if number % _ROUNDS_KEPT == _ROUNDS_KEPT - 1:
            self.exchange(None)
        return value

    def first_batch(self, batch: Any, of_all: bool = False) -> Any:
        """The first batch of this process, or where it has none, zeros like that of another; None where there is none
        in any process, or, `of_all`, in one of them."""
        like = None if batch is None else jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), batch)
        found = [other for other in self.exchange(like) if other is not None]
        return None if not found or (of_all and len(found) < self.count) else batch or found[0]

    def _key(self, number: int, name: int | str) -> str:
        return f"{self._prefix}/{number}/{name}"

    def _get(self, key: str, whom: str, closed: threading.Event | None = None) -> bytes:
        since, told = time.monotonic(), False
        while True:
            try:
                return _client().blocking_key_value_get_bytes(key, _WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _processes.explained(error) from error
            _processes.raise_if_lost()
            if closed is not None and closed.is_set():
                raise InterruptedError(f"Nobody waits any more for {whom}, in: {self._what}.")
            if not told and time.monotonic() - since >= _SECONDS_TO_TELL:
                told = True
                logging.warning(
                    "Process %d has waited for %s for %.0f s, in: %s. Every process has to call the same.",
                    self.index,
                    whom,
                    time.monotonic() - since,
                    self._what,
                )


def _client() -> Any:
    from jax._src import distributed  # jax has no public name for its key-value store

    return distributed.global_state.client


def same_call(what: str, make: Callable[[], Any]) -> Any:
    """What process 0 makes, in all processes; `make` is called nowhere else."""
    if jax.process_count() == 1:
        return make()
    ours = Team(what)
    return ours.from_chief(None if ours.index else make())
