"""Processes that run as one, and what they tell each other: over the network of the hosts, not that of the devices.

All of them call the same things in the same order. Where they could differ, since inputs end and clocks run on their
own, they first agree here, through the key-value store that jax's coordinator, process 0, keeps for all.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from estimator.core._placement import Placement
from estimator.multihost import _liveness
from estimator.multihost._coordination_client import key_value_store
from estimator.multihost._preemption import Preempted, preempt

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_INFO = 20  # the standard library's number
_WAIT_MS = 100
_ROUNDS_KEPT = 100  # at least: they are removed together
_SECONDS_AFTER_THE_END = 2.0  # of another process, in which what it has said last may still come
_SECONDS_TO_TELL = 60.0  # of a process that does not come
_SECONDS_TO_APPEAR = 10.0  # of a file that another host has written
_numbers = itertools.count()
_active: list[Team] = []  # each within the one before
_ended: list[Team] = []  # of process 0: whose values may still be there
_alone = False  # whether process 0 does something that the others wait for


class Team:
    """What a call says to the same call in the other processes; `together` makes it.

    Args:
      what: the same in all processes; for messages.
      of: the one that this is a channel of.
    """

    def __init__(self, what: str, of: Team | None = None) -> None:
        self.towers: int = 1 if of is None else of.towers  # of each process, once that is known
        self.waits_for: str | None = None  # which process, after a while
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._what = what
        self._channels: list[Team] = []
        # What a call within another one says must not be taken for that of a later one, should they get out of step.
        around = of or (_active[-1] if _active else None)
        self._numbers = itertools.count()
        self._prefix: str = f"{around._prefix}/in/{next(around._numbers)}" if around else f"estimator/{next(_numbers)}"
        self._round = 0
        self._removed = 0  # as many hundreds of rounds
        self._own: dict[int, Any] = {}  # of process 0, by the number of the round
        self._lock = threading.Lock()

    def channel(self, what: str) -> Team:
        """Another one for a thread of the run."""
        self._channels.append(Team(f"{self._what}, {what}", self))
        return self._channels[-1]

    def waiting(self) -> str:
        """For which other process this one waits, in words."""
        found = [team.waits_for for active in _active for team in (active, *active._channels) if team.waits_for]
        return f"It waits for {found[0]}." if found else "It waits for no other process here."

    def exchange(self, value: Any) -> list[Any]:
        """The values that all processes give, in their order; waits for the last of them.

        Raises:
          ProcessLostError: one has died.
          RuntimeError: one has failed.
        """
        return self.finish(self.offer(value))

    def note(self, text: str) -> None:
        """Lets the other processes read something, in the place of what was noted before."""
        key_value_store().key_value_set(f"{self._prefix}/note/{self.index:06}", text, allow_overwrite=True)

    def notes(self) -> list[str]:
        """What processes have noted."""
        return [text for _, text in sorted(key_value_store().key_value_dir_get(f"{self._prefix}/note"))]

    def meet(self) -> None:
        """Waits until all processes are here.

        Raises:
          TimeoutError: one does not come.
          RuntimeError: one has called something else.
        """
        calls = self.finish(self.offer(self._what), timeout_secs=_liveness.start_timeout_secs)
        for i, call in enumerate(calls):
            if call != calls[0]:
                raise RuntimeError(
                    f"Process 0 called `{calls[0]}`, process {i} `{call}`. All processes have to call the same."
                )

    def fail(self, error: BaseException) -> None:
        """Tells the other processes, which may wait for this one, why it comes no more."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told already, or nobody is there to hear
            key_value_store().key_value_set_bytes(
                f"{self._prefix}/failed/{self.index}", pickle.dumps((type(error).__name__, str(error)))
            )

    def flag(self) -> None:
        """Raises a flag that all processes can see."""
        key_value_store().key_value_set(f"{self._prefix}/flag/{self.index}", "", allow_overwrite=True)

    def is_flagged(self) -> bool:
        return bool(key_value_store().key_value_dir_get(f"{self._prefix}/flag"))

    def offer(self, value: Any) -> int:
        """Gives the value of this process without waiting; returns the number of the round, for `finish`."""
        with self._lock:
            number, self._round = self._round, self._round + 1
            if self.index:
                key_value_store().key_value_set_bytes(self._key(number, self.index), pickle.dumps(value))
            else:
                self._own[number] = value
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
        found = [self._own.pop(number)]
        for i in range(1, self.count):
            found.append(pickle.loads(self._get(self._key(number, i), f"process {i}", closed, timeout_secs)))
        key_value_store().key_value_set_bytes(self._key(number, "all"), pickle.dumps(found))
        while self._removed < number // _ROUNDS_KEPT:  # whoever takes part in a round has heard all before it
            key_value_store().key_value_delete(f"{self._prefix}/rounds/{self._removed}/")
            self._removed += 1
        return found

    def from_chief(self, make: Callable[[], Any]) -> Any:
        """What process 0 makes, in all processes; `make` is called nowhere else."""
        with self._lock:
            number, self._round = self._round, self._round + 1
        key = self._key(number, "chief")
        if self.index:
            value = pickle.loads(self._get(key, "process 0"))
        else:
            value = make()
            key_value_store().key_value_set_bytes(key, pickle.dumps(value))
        if number % _ROUNDS_KEPT == _ROUNDS_KEPT - 1:
            self.exchange(None)  # else nothing would be removed
        return value

    def newest(self, directory: str, find: Callable[[], str | None], writes: bool) -> str | None:
        """The path in the directory of this process to what process 0 finds in its own; they are the same one.

        Args:
          directory: as this process calls it.
          find: returns a path, or None.
          writes: whether the processes are about to write into it: it is checked also where nothing is found.

        Raises:
          FileNotFoundError: this process sees another directory.
        """
        path = self.from_chief(find)
        if path is not None:
            own = os.path.join(directory, os.path.basename(path))
            self._check_shared(directory, path, own)
            return own
        if writes:
            probe = self.from_chief(lambda: _made_probe(directory))
            try:
                self._check_shared(directory, probe, os.path.join(directory, os.path.basename(probe)))
                self.exchange(None)
            finally:
                if not self.index:
                    os.remove(probe)
        return None

    def _check_shared(self, directory: str, path: str, own: str) -> None:
        deadline = time.monotonic() + _SECONDS_TO_APPEAR
        while not os.path.exists(own):
            if time.monotonic() >= deadline or not os.path.isdir(directory):
                raise FileNotFoundError(
                    f"Process {self.index}, with model_dir={directory!r}, does not see there what process 0 has "
                    f"written, {path}. Give all processes the same model_dir, on a file system that they share."
                )
            time.sleep(0.1)

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
        return f"{self._prefix}/rounds/{number // _ROUNDS_KEPT}/{number}/{name}"

    def _get(self, key: str, whom: str, closed: threading.Event | None = None, timeout_secs: float = math.inf) -> bytes:
        since, told = time.monotonic(), False
        while True:
            try:
                found = key_value_store().blocking_key_value_get_bytes(key, _WAIT_MS)
                self.waits_for = None
                return found
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _liveness.explained(error) from error
            self._raise_if_failed()
            _liveness.raise_if_lost(ended=time.monotonic() - since >= _SECONDS_AFTER_THE_END)
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

    def _raise_if_failed(self) -> None:
        for team in _active:
            for key, failure in key_value_store().key_value_dir_get_bytes(f"{team._prefix}/failed"):
                kind, text = pickle.loads(failure)
                if kind == "Preempted":
                    preempt()
                    raise Preempted
                raise RuntimeError(f"Process {key.rpartition('/')[2]} failed in `{team._what}`: {kind}: {text}")


def _made_probe(directory: str) -> str:
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"shared-{uuid.uuid4().hex}")
    with open(path, "w"):
        pass
    return path


def _is_for_all(record: Any) -> bool:
    """Log filter: processes other than 0 drop this package's INFO records."""
    return record.levelno > _INFO or not record.pathname.startswith(_PACKAGE)


@contextlib.contextmanager
def together(what: str) -> Iterator[Team | None]:
    """The processes that make this call, once all are there; None where there is one.

    An error in the block is told to the others, so that none of them waits for a process that has failed.

    Raises:
      RuntimeError: a process calls something else, or process 0 this one alone.
      TimeoutError: one does not come.
    """
    if _alone:
        raise RuntimeError(
            f"`{what}` is a call of all processes, but was made where process 0 works alone, as in an exporter."
        )
    if jax.process_count() == 1:
        yield None
        return
    team = Team(what)
    _active.append(team)
    try:
        team.meet()
        if team.index:
            logging.get_absl_logger().addFilter(_is_for_all)
        while not team.index and _ended:
            key_value_store().key_value_delete(f"{_ended.pop()._prefix}/")  # nobody is in there any more
        yield team
    except BaseException as error:
        found = _liveness.explained(error) if isinstance(error, Exception) else error
        team.fail(found)
        if isinstance(found, _liveness.ProcessLostError) and len(_active) == 1:
            _liveness.report()
        if found is not error:
            raise found from error
        raise
    finally:
        _active.remove(team)
        if not team.index:
            _ended.append(team)


def same_call(what: str, make: Callable[[], Any]) -> Any:
    """What process 0 makes, in all processes; `make` is called nowhere else. A call within another is of process 0."""

    if _alone:
        return make()

    def alone() -> Any:
        global _alone
        _alone = True
        try:
            return make()
        finally:
            _alone = False

    with together(what) as team:
        return make() if team is None else team.from_chief(alone)
