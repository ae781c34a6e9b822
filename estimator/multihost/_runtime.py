"""Module-level state of a process beyond a single call, of itself and of the others, as one object.

A signal handler, a thread that watches the other processes and nested calls of the Estimator all have to see the same,
so it cannot be an argument. What else is module-level stays within one file: the stack of frames (`core/_frame.py`),
the locks that this process holds (`checkpoint/_model_dir.py`), work that an interrupt left unfinished
(`runtime/_uninterrupted.py`), and which process has used jax (`runtime/_fork.py`).
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Protocol

from estimator.multihost._process_group import ProcessGroup, SingleProcess


class Run(Protocol):
    """What a signal needs of a run."""

    @property
    def phase(self) -> str: ...

    @property
    def preempted(self) -> bool: ...

    def preempt(self) -> None: ...


@dataclasses.dataclass
class Runtime:
    """The state of this process, which `_collective_call`, `_liveness`, `_preemption` and `_initialize` keep.

    Attributes:
      is_initialized: whether `initialize_distributed` was called.
      start_timeout_secs: how long one waits for the others at the begin of a call.
      groups: the groups of the calls that are being made, each within the one before; the first is this process alone.
      ended_prefixes: in process 0, of ended groups whose keys are still in the key-value store.
      chief_is_alone: whether process 0 does something that the others wait for.
      loss: which process has died, and how.
      ended: the last process that has ended in order.
      loss_known_secs: within how many seconds a loss becomes known; None: nobody watches the other processes.
      loss_known: set with `loss`.
      loss_raised: set when a `ProcessLostError` leaves the outermost call: this process waits for no other any more.
      runs: what SIGTERM ends, each within the one before.
      got_sigterm: whether this process itself got the signal.
    """

    is_initialized: bool = False
    start_timeout_secs: float = 300.0
    groups: list[ProcessGroup] = dataclasses.field(default_factory=lambda: [SingleProcess()])
    ended_prefixes: list[str] = dataclasses.field(default_factory=list)
    chief_is_alone: bool = False
    loss: str | None = None
    ended: str | None = None
    loss_known_secs: float | None = None
    loss_known: threading.Event = dataclasses.field(default_factory=threading.Event)
    loss_raised: threading.Event = dataclasses.field(default_factory=threading.Event)
    runs: list[Run] = dataclasses.field(default_factory=list)
    got_sigterm: bool = False

    @property
    def group(self) -> ProcessGroup:
        """The processes of the innermost call that is being made."""
        return self.groups[-1]


RUNTIME = Runtime()
