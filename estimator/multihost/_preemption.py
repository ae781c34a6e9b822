"""SIGTERM, by which clusters announce that a machine is taken away: it becomes a save, and the process ends in order.

The handlers of the signal:

    SIG_DFL -- a run begins --> _on_sigterm -- the last run ends --> SIG_DFL
                                  |      ^
       the last run ends, since   |      | a run begins
       another process was hit    v      |
                               _on_late_sigterm -- the signal, late --> SIG_DFL

jax's preemption service is not used. It takes the signal in C++ and does not see it where a handler of Python is
installed, such as the user's own. And its processes end at a step that all of them reach, each by calling
`multihost_utils.reached_preemption_sync_point`: one whose input blocks ends when the input comes, and nothing ends
within an evaluation, a checkpoint or before the first step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from estimator.runtime._interrupts import in_main_thread

SIGTERM = "SIGTERM"  # as a reason to stop
EXIT_CODE = 75  # the EX_TEMPFAIL of sysexits.h: try again later

_runs: list[Run] = []  # the runs of this process, in all threads
_main_runs: list[Run] = []  # those that SIGTERM ends, each within the one before
_got_sigterm = False  # whether this process itself got the signal


class Run(Protocol):
    """The part of a run that a signal needs."""

    @property
    def phase(self) -> str: ...

    @property
    def preempted(self) -> bool: ...

    @property
    def reads_input(self) -> bool: ...

    def preempt(self) -> None: ...


class _BeforeRun:
    """The user's code that is called before a run begins, in place of a run."""

    phase = "begin"
    preempted = False
    reads_input = False

    def preempt(self) -> None:
        self.preempted = True


class Preempted(SystemExit):
    """The process got SIGTERM, or `est.request_stop` was called: what ran has ended in order, in training with a
    checkpoint. Its exit code is 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


@contextlib.contextmanager
def ends_by_sigterm(run: Run) -> Iterator[None]:
    """Stops the run at a SIGTERM or a `request_stop` within the block, and raises `Preempted` at the end of it; at a
    SIGTERM where the run has not begun its work, or waits for its caller, at once."""
    _runs.append(run)
    try:
        with _handle_sigterm(run):
            yield
    finally:
        _runs.remove(run)
    if run.preempted:
        raise Preempted


@contextlib.contextmanager
def _handle_sigterm(run: Run) -> Iterator[None]:
    """Handles the signal within the block, in the main thread, as Python has it, and only where nobody else does."""
    global _got_sigterm
    if not in_main_thread() or signal.getsignal(signal.SIGTERM) not in _OURS:
        yield
        return
    _got_sigterm = _got_sigterm and bool(_main_runs)
    _main_runs.append(run)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        _main_runs.remove(run)
        # Only this module's handler is removed, and only in the main thread, the only one that may install handlers.
        # Results of `predict` may be read to their end in another thread, which cannot take the handler away.
        if not _main_runs and in_main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            comes_late = run.preempted and not _got_sigterm
            signal.signal(signal.SIGTERM, _on_late_sigterm if comes_late else signal.SIG_DFL)


def raise_at_sigterm() -> contextlib.AbstractContextManager[None]:
    """Raises `Preempted` at a SIGTERM within the block: around the user's code before a run."""
    return ends_by_sigterm(_BeforeRun())


def request_stop() -> bool:
    """Asks the runs of this process to save and stop, as SIGTERM does; returns whether there was one.

    For the notice of an engine, or a signal's handler of your own. It may be called in any thread, and returns at once.
    Training ends after the steps that have begun, in all its processes at the same one, with a checkpoint; then
    `train` raises `est.Preempted`, in whatever thread it was called. It is a SystemExit with code 75: an engine that
    calls your function counts it as a failure, after which it starts the training again. An input that blocks ends
    with its next batch where the run has not begun its work.

    >>> import estimator as est
    >>> est.request_stop()  # nothing runs
    False
    """
    preempt()
    if not in_main_thread() and any(run.reads_input for run in _main_runs):
        # Nothing else ends an input that blocks in the main thread.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # type: ignore[arg-type]
    return bool(_runs)


def is_ended_at_once() -> bool:
    """Says whether a stop that comes to a run with `reads_input` ends what this thread does then."""
    in_reach = in_main_thread() and hasattr(signal, "pthread_kill")
    return in_reach and signal.getsignal(signal.SIGTERM) is _on_sigterm


def preempt() -> None:
    """Does what SIGTERM does to the runs of this process: another one got it."""
    for run in list(_runs):  # another thread may begin or end one
        run.preempt()


def _on_late_sigterm(number: int, frame: FrameType | None) -> None:
    """Does nothing, once: the run has ended since the signal came to another process, and this process is about to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _got_sigterm
    _got_sigterm = True
    preempt()
    if not _main_runs:  # they have ended in another thread, which left the handler: do what the default would
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    # Nothing would read the flag while the user's code or the caller of `predict` runs.
    elif (
        _main_runs[-1].phase == "begin"
        or any(run.reads_input for run in _main_runs)
        or all(run.phase == "output" for run in _main_runs)
    ):
        raise Preempted


_OURS = (signal.SIG_DFL, _on_sigterm, _on_late_sigterm)


def _leave_to_parent() -> None:
    """A forked child, such as a worker of a data loader, has no run to end: the signal ends the process."""
    _runs.clear()
    _main_runs.clear()
    if signal.getsignal(signal.SIGTERM) in (_on_sigterm, _on_late_sigterm):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
