"""The processes that make one call together, and what they can ask of each other; a single process is a group of one.

All processes of a group call the same methods in the same order. Where they could differ, since inputs end and clocks
run on their own, they first agree here.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from estimator.core._placement import Placement
from estimator.multihost._progress import Progress

T = TypeVar("T")


class ProcessGroup(abc.ABC):
    """The processes that make one call together.

    Values travel as JSON, with bytes and numpy arrays in it: tuples arrive as lists, numpy's scalars as numbers.

    Attributes:
      index: the number of this process.
      count: the number of processes.
      towers: the number of towers in each process, once `set_placement` was called.
      waits_for: a description of the process that this one has been waiting for, or None.
      prefix: of what the group keeps in the key-value store of several processes.
      progress: the phase of the call, the same object in calls within it.
    """

    index: int
    count: int
    towers: int = 1
    waits_for: str | None = None
    prefix: str = ""
    progress: Progress

    def all_gather(self, value: T) -> list[T]:
        """Gathers the values that all processes pass, in the order of the processes; waits for the last of them.

        Raises:
          ProcessLostError: one has died.
          RuntimeError: one has failed.
        """
        return self.finish_gather(self.start_gather(value))

    @abc.abstractmethod
    def start_gather(self, value: object) -> int:
        """Publishes the value of this process without waiting; returns the number of the round, for `finish_gather`."""

    @abc.abstractmethod
    def finish_gather(self, number: int, closed: threading.Event | None = None) -> list[Any]:
        """Returns the values of a round, once all processes have published theirs.

        Raises:
          InterruptedError: `closed` was set meanwhile.
        """

    @abc.abstractmethod
    def broadcast_from_chief(self, make: Callable[[], T]) -> T:
        """Calls `make` only in process 0, and returns its result in all processes."""

    @abc.abstractmethod
    def channel(self, name: str, is_independent: bool = False) -> ProcessGroup:
        """The same processes, for another thread: its calls do not mix with the calls here.

        Args:
          name: for messages.
          is_independent: whether a wait ends only by a failure that was published in the channel, and not in a call.
        """

    @abc.abstractmethod
    def flag(self, reason: str) -> None:
        """Raises a flag that all processes can see."""

    @abc.abstractmethod
    def read_flag(self) -> str | None:
        """Returns the reason of a flag that a process has raised; None if none has."""

    @abc.abstractmethod
    def set_placement(self, placement: Placement) -> None:
        """Notes where the processes run a model.

        Raises:
          ValueError: each process would run a model of its own.
        """

    @abc.abstractmethod
    def publish_failure(self, error: BaseException) -> None:
        """Publishes the error that this process fails with, so that waiting ones can raise too."""

    @abc.abstractmethod
    def raise_if_failed(self) -> None:
        """Raises if another process has published a failure."""

    @abc.abstractmethod
    def new_prefix(self) -> str:
        """Makes a prefix for the keys of a group within this one, the same in all processes."""


class SingleProcess(ProcessGroup):
    """A group of one: it gathers its own values, and waits for nobody.

    >>> SingleProcess().all_gather(3)
    [3]
    """

    index = 0
    count = 1

    def __init__(self) -> None:
        self._rounds, self._prefixes = itertools.count(), itertools.count()
        self._values: dict[int, Any] = {}
        self._flag: str | None = None
        self.progress = Progress()

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def start_gather(self, value: object) -> int:
        number = next(self._rounds)
        self._values[number] = value
        return number

    def finish_gather(self, number: int, closed: threading.Event | None = None) -> list[Any]:
        return [self._values.pop(number)]

    def broadcast_from_chief(self, make: Callable[[], T]) -> T:
        return make()

    def channel(self, name: str, is_independent: bool = False) -> SingleProcess:
        return SingleProcess()

    def flag(self, reason: str) -> None:
        self._flag = reason

    def read_flag(self) -> str | None:
        return self._flag

    def set_placement(self, placement: Placement) -> None:
        pass

    def publish_failure(self, error: BaseException) -> None:
        pass

    def raise_if_failed(self) -> None:
        pass

    def new_prefix(self) -> str:
        return f"estimator/calls/{next(self._prefixes)}"


@dataclasses.dataclass
class Calls:
    """The calls that this process is making together with others.

    Threads that read the input or watch a run, and nested calls of the Estimator, have to see the same, so this cannot
    be an argument.

    Attributes:
      groups: the groups of the calls, each within the one before; the first is only this process.
      start_timeout_secs: how long one waits for the others at the beginning of a call.
      chief_is_alone: whether process 0 does something that the others wait for.
      ended_prefixes: in process 0, of ended groups whose keys are still in the key-value store.
    """

    groups: list[ProcessGroup] = dataclasses.field(default_factory=lambda: [SingleProcess()])
    start_timeout_secs: float = 300.0
    chief_is_alone: bool = False
    ended_prefixes: list[str] = dataclasses.field(default_factory=list)

    @property
    def group(self) -> ProcessGroup:
        """The processes of the innermost call."""
        return self.groups[-1]


CALLS = Calls()
