"""A group of several processes: they exchange values over the network of the hosts, not the one of the devices.

They do so through the key-value store that jax's coordinator, process 0, keeps for all. A round of `all_gather`:

    process i    start_gather: sets <round>/<i>    finish_gather: waits for <round>/all
    process 0    start_gather: keeps its value     finish_gather: waits for each <round>/<i>, sets <round>/all

so that each process but 0 waits for only one key.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging

from estimator.core._placement import Placement
from estimator.multihost._coordination_client import await_value, connected_client
from estimator.multihost._preemption import SIGINT, SIGTERM, Preempted, ask_all, is_asked, raise_stop
from estimator.multihost._process_group import CALLS, ProcessGroup
from estimator.multihost._progress import Progress
from estimator.multihost._supervisor import SUPERVISOR
from estimator.runtime._uninterrupted import Work
from estimator.storage._json import decode, encode_leaf

T = TypeVar("T")

_SHORT_WAIT_MS = 100  # for a value, until a thread waits for it
_SECONDS_BETWEEN_LOOKS = 1.0  # at what no news tell of
_ROUNDS_KEPT = 100  # at least: they are removed together
_SECONDS_AFTER_THE_END = 2.0  # of another process, in which its last values may still come
_SECONDS_TO_WARN = 60.0  # about a process that does not come
_SIGNALS = {Preempted.__name__: SIGTERM, KeyboardInterrupt.__name__: SIGINT}  # by what a process raises that got one


class KeyValueGroup(ProcessGroup):
    """A channel between the same call in all processes; `collective_call` makes it.

    Args:
      call: what is called, the same in all processes; for messages.
      around: the group within which this one is, which numbers those in it.
      is_independent: as in `ProcessGroup.channel`.
    """

    def __init__(self, call: str, around: ProcessGroup, is_independent: bool = False) -> None:
        self.towers = around.towers
        self.index = jax.process_index()
        self.count = jax.process_count()
        # A value of a call within another one must not be taken for one of a later call, should they get out of step.
        self.prefix = around.new_prefix()
        self._call = call
        self._is_independent = is_independent
        self._prefixes = itertools.count()
        self._awaited: str | None = None
        self._channels: list[KeyValueGroup] = []
        self._round = 0
        self._removed = 0  # hundreds of rounds
        self._own: dict[int, object] = {}  # values of process 0, by the number of the round
        self._lock = threading.Lock()
        # The news before which this process has looked for failures, and for the flag: a look is a request.
        self._failures_at = self._flag_at = -1
        self._flag: str | None = None
        # Calls within a call of several processes, and their channels, are parts of it.
        self.progress = around.progress if around.count > 1 else Progress()

    @property
    def waits_for(self) -> str | None:  # type: ignore[override]
        return next((group._awaited for group in (self, *self._channels) if group._awaited), None)

    def new_prefix(self) -> str:
        return f"{self.prefix}/in/{next(self._prefixes)}"

    def channel(self, name: str, is_independent: bool = False) -> KeyValueGroup:
        self._channels.append(KeyValueGroup(f"{self._call}, {name}", self, is_independent))
        return self._channels[-1]

    def barrier(self) -> None:
        """Waits until all processes are here.

        Raises:
          TimeoutError: one does not come.
          RuntimeError: one has called something else.
        """
        calls = self.finish_gather(self.start_gather(self._call), timeout_secs=CALLS.start_timeout_secs)
        for i, call in enumerate(calls):
            if call != calls[0]:
                raise RuntimeError(
                    f"Process 0 called `{calls[0]}`, process {i} `{call}`. All processes have to call the same."
                )

    def start_gather(self, value: object) -> int:
        with self._lock:
            number, self._round = self._round, self._round + 1
            if self.index:
                connected_client().key_value_set(self._key(number, self.index), to_json(value))
            else:
                self._own[number] = value
        return number

    def finish_gather(
        self, number: int, closed: threading.Event | None = None, timeout_secs: float = math.inf
    ) -> list[Any]:
        """As in `ProcessGroup`.

        Raises:
          TimeoutError: a process has not published its value in that time.
        """
        if self.index:
            # Process 0, which waits as long, says who does not come.
            patience = timeout_secs + _SECONDS_AFTER_THE_END
            return from_json(self._wait_for(self._key(number, "all"), "all others", closed, patience))
        texts = [to_json(self._own.pop(number))]
        for i in range(1, self.count):
            texts.append(self._wait_for(self._key(number, i), f"process {i}", closed, timeout_secs))
        values = f"[{','.join(texts)}]"
        connected_client().key_value_set(self._key(number, "all"), values)
        # A process that takes part in a round has read all rounds before it, so that they can be deleted.
        while self._removed < number // _ROUNDS_KEPT:
            connected_client().key_value_delete(f"{self.prefix}/rounds/{self._removed}/")
            self._removed += 1
        return from_json(values)

    def broadcast_from_chief(self, make: Callable[[], T]) -> T:
        with self._lock:
            number, self._round = self._round, self._round + 1
        key = self._key(number, "chief")
        if self.index:
            text = self._wait_for(key, "process 0")
        else:
            text = to_json(make())
            connected_client().key_value_set(key, text)
        if number % _ROUNDS_KEPT == _ROUNDS_KEPT - 1:
            # In a broadcast process 0 does not wait, and cannot know which processes have read the round. After a
            # gather it does, and removes the rounds before.
            self.all_gather(None)
        value: T = from_json(text)  # in process 0 too, so that all have the same types
        return value

    def flag(self, reason: str) -> None:
        connected_client().key_value_set(f"{self.prefix}/flag/{self.index}", reason, allow_overwrite=True)
        SUPERVISOR.publish()

    def read_flag(self) -> str | None:
        news = SUPERVISOR.news
        if self._flag is None and news != self._flag_at:
            flags = connected_client().key_value_dir_get(f"{self.prefix}/flag")
            self._flag = flags[0][1] if flags else None
            self._flag_at = news
        return self._flag

    def set_placement(self, placement: Placement) -> None:
        if not placement.spans_processes:
            raise ValueError(
                f"jax runs on {self.count} processes, but the model_fn on devices of one: each would have its own "
                "model. Wrap it, `replicate_model_fn(model_fn)`, without `devices`."
            )
        self.towers = placement.towers_per_process

    def publish_failure(self, error: BaseException) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # published already, or nobody is there to read it
            text = to_json([type(error).__name__, str(error)])
            connected_client().key_value_set(f"{self.prefix}/failed/{self.index}", text)
            SUPERVISOR.publish()

    def raise_if_failed(self) -> None:
        news = SUPERVISOR.news
        if news == self._failures_at:
            return
        for key, failure in connected_client().key_value_dir_get(f"{self.prefix}/failed"):
            kind, text = json.loads(failure)
            if kind in _SIGNALS:
                ask_all(_SIGNALS[kind])
                raise_stop(_SIGNALS[kind])
            raise RuntimeError(f"Process {key.rpartition('/')[2]} failed in `{self._call}`: {kind}: {text}")
        self._failures_at = news

    def _key(self, number: int, name: int | str) -> str:
        return f"{self.prefix}/rounds/{number // _ROUNDS_KEPT}/{number}/{name}"

    def _wait_for(
        self, key: str, whom: str, closed: threading.Event | None = None, timeout_secs: float = math.inf
    ) -> str:
        text = self._look(key)
        if text is None:
            is_over = threading.Event()
            request = SUPERVISOR.ask(lambda: await_value(key, lambda: not is_over.is_set()))
            try:
                text = self._wait_long(request, key, whom, closed, timeout_secs)
            finally:
                is_over.set()
        self._awaited = None
        return text

    def _look(self, key: str) -> str | None:
        """The value of a key; None if there is none within a short time."""
        try:
            text: str = connected_client().blocking_key_value_get(key, _SHORT_WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise SUPERVISOR.explain(error) from error
        return text

    def _wait_long(
        self, request: Work, key: str, whom: str, closed: threading.Event | None, timeout_secs: float
    ) -> str:
        since, has_warned, has_looked = time.monotonic(), False, False
        while True:
            # Noted before the look: whoever ends after it may have published the value meanwhile.
            is_over = SUPERVISOR.last_ended is not None and time.monotonic() - since >= _SECONDS_AFTER_THE_END
            news = SUPERVISOR.news
            if request.done.is_set():
                try:
                    return str(request.result())
                except jax.errors.JaxRuntimeError as error:
                    raise SUPERVISOR.explain(error) from error
            if is_over and (text := self._look(key)) is not None:
                return text
            for group in (self,) if self._is_independent else CALLS.groups:
                group.raise_if_failed()
            SUPERVISOR.raise_if_lost(needs_all=is_over)
            if not has_looked and is_asked():  # whoever has sent the signal may soon kill this process
                has_looked = True
                SUPERVISOR.look_who_lives()
            if closed is not None and closed.is_set():
                raise InterruptedError(f"Nobody waits any more for {whom}, in: {self._call}.")
            self._awaited = whom
            if time.monotonic() - since >= timeout_secs:
                raise TimeoutError(
                    f"Process {self.index} waited for {whom} for {timeout_secs:.0f} s, in: {self._call}. Every process "
                    "has to call the same; allow for slow ones by `initialize_distributed(timeout_secs=...)`."
                )
            if not has_warned and time.monotonic() - since >= _SECONDS_TO_WARN:
                has_warned = True
                logging.warning(
                    "Process %d has waited for %s for %.0f s, in: %s. Every process has to call the same.",
                    self.index,
                    whom,
                    time.monotonic() - since,
                    self._call,
                )
            SUPERVISOR.wait_for_news(news, request.done.is_set, _SECONDS_BETWEEN_LOOKS)


def to_json(value: object) -> str:
    """Writes a value as JSON, with bytes and arrays as base64.

    >>> from_json(to_json({"step": np.int32(7), "names": ("a", "b"), "key": b"k", "x": np.arange(2)}))
    {'step': 7, 'names': ['a', 'b'], 'key': b'k', 'x': array([0, 1])}

    Raises:
      TypeError: it is neither made of what JSON knows, nor bytes, nor an array.
    """
    return json.dumps(value, default=_to_plain)


def from_json(text: str) -> Any:
    """Reads a value; tuples have become lists, and scalars of numpy numbers."""
    return decode(text, arrays=True)


def _to_plain(value: object) -> Any:
    leaf = np.asarray(value) if isinstance(value, jax.Array) else value
    plain = encode_leaf(leaf, arrays=True)
    if plain is leaf:
        raise TypeError(
            "Processes send each other what JSON knows, bytes and arrays; got "
            f"{value!r} of type {type(value).__name__}. Return numbers, strings, lists and dicts."
        )
    return plain
