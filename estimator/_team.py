"""Processes that run as one, and what they tell each other: over the network of the hosts, not that of the devices.

All of them call the same things in the same order. Where they could differ, since inputs end and clocks run on their
own, they first agree here, through the key-value store that jax's coordinator, process 0, keeps for all.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from estimator import _processes
from estimator._placement import Placement

_WAIT_MS = 100
_ROUNDS_KEPT = 100  # at most, of those in which process 0 alone speaks, and so does not know who has heard it
_SECONDS_AFTER_THE_END = 2.0  # of another process, in which what it has said last may still come
_SECONDS_TO_TELL = 60.0  # of a process that does not come
_numbers = itertools.count()


class Team:
    """What a run says to the same run in the other processes.

    Args:
      what: the same in all processes; for messages.
      towers: how many towers each process has, once that is known.
    """

    def __init__(self, what: str, towers: int = 1) -> None:
        self.towers = towers  # of each process
        self.waits_for: str | None = None  # which process, after a while
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._what = what
        self._channels: list[Team] = []
        self._prefix = f"estimator/{next(_numbers)}"
        self._round = 0
        self._kept = 0  # the first round whose values are still there
        self._lock = threading.Lock()

    def channel(self, what: str) -> Team:
        """Another one for a thread of the run."""
        self._channels.append(Team(f"{self._what}, {what}", self.towers))
        return self._channels[-1]

    def waiting(self) -> str:
        """For which other process this one waits, in words."""
        found = [team.waits_for for team in (self, *self._channels) if team.waits_for]
        return f"It waits for {found[0]}." if found else "It waits for no other process here."

    def exchange(self, value: Any) -> list[Any]:
        """The values that all processes give, in their order; waits for the last of them.

        Raises:
          ProcessLostError: one has died.
        """
        return self.finish(self.offer(value))

    def note(self, text: str) -> None:
        """Lets the other processes read something, in the place of what was noted before."""
        _client().key_value_set(f"{self._prefix}/note/{self.index:06}", text, allow_overwrite=True)

    def notes(self) -> list[str]:
        """What processes have noted."""
        return [text for _, text in sorted(_client().key_value_dir_get(f"{self._prefix}/note"))]

    def meet(self) -> None:
        """Waits until all processes are here.

        Raises:
          TimeoutError: one does not come.
          RuntimeError: one has called something else.
        """
        calls = self.finish(self.offer(self._what), timeout_secs=_processes.start_timeout_secs)
        for i, call in enumerate(calls):
            if call != calls[0]:
                raise RuntimeError(
                    f"Process 0 called `{calls[0]}`, process {i} `{call}`. All processes have to call the same."
                )

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

    def finish(self, number: int, closed: threading.Event | None = None, timeout_secs: float = math.inf) -> list[Any]:
        """The values of a round, once all have given theirs.

        Raises:
          InterruptedError: `closed` was set meanwhile.
          TimeoutError: a process has not given its value in that time.
        """
        if self.index:
            # Process 0, which waits as long, says who does not come.
            patience = timeout_secs + _SECONDS_AFTER_THE_END
            return pickle.loads(self._get(self._key(number, "all"), "all others", closed, patience))
        values = [self._get(self._key(number, i), f"process {i}", closed, timeout_secs) for i in range(self.count)]
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

    def shared_path(self, path: str | None) -> str | None:
        """The path that process 0 gives.

        Raises:
          FileNotFoundError: there is nothing in this process.
        """
        path = self.from_chief(path)
        if path is not None and not os.path.exists(path):
            raise FileNotFoundError(
                f"Process {self.index} cannot see {path}, which process 0 has written. The model_dir of several "
                "processes must be the same directory, on a file system that all of them share."
            )
        return path

    def runs(self, placement: Placement) -> None:
        """Notes where the processes run a model.

        Raises:
          ValueError: each would run one of its own.
        """
        if not placement.spans_processes:
            raise ValueError(
                f"jax runs on {self.count} processes, but the model_fn on devices of one: each would have its own "
                "model. Wrap it, `replicate_model_fn(model_fn)`, without `devices`."
            )
        self.towers = placement.towers_per_process

    def _key(self, number: int, name: int | str) -> str:
        return f"{self._prefix}/{number}/{name}"

    def _get(self, key: str, whom: str, closed: threading.Event | None = None, timeout_secs: float = math.inf) -> bytes:
        since, told = time.monotonic(), False
        while True:
            try:
                found = _client().blocking_key_value_get_bytes(key, _WAIT_MS)
                self.waits_for = None
                return found
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _processes.explained(error) from error
            _processes.raise_if_lost(ended=time.monotonic() - since >= _SECONDS_AFTER_THE_END)
            if closed is not None and closed.is_set():
                raise InterruptedError(f"Nobody waits any more for {whom}, in: {self._what}.")
            self.waits_for = whom
            if time.monotonic() - since >= timeout_secs:
                raise TimeoutError(
                    f"Process {self.index} waited for {whom} for {timeout_secs:.0f} s, in: {self._what}. Every process "
                    "has to call the same; allow for slow ones by `initialize_distributed(timeout_secs=...)`."
                )
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
    ours.meet()
    return ours.from_chief(None if ours.index else make())
