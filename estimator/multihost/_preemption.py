"""SIGTERM and Ctrl-C (SIGINT), which end a run from outside: training saves what it has done, and ends in order.

The handlers of each of both signals:

    Python's -- a call begins --> _on_signal -- the last call ends --> Python's
                                   |      ^
       the last call ends, since   |      | a call begins
       another process was hit     v      |
                                _on_late_signal -- the signal, late --> Python's

Ctrl-C ends an evaluation or prediction at once, within a training run too, which then ends in order. A training run
ends at once where it has nothing to lose, and at the second Ctrl-C. The calls also remember the signal, since Python
drops an exception that a handler raises in a callback of the garbage collector, of which jax has some.

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
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from estimator.runtime._uninterrupted import Work, in_main_thread

SIGTERM, SIGINT = SIGNALS = ("SIGTERM", "SIGINT")  # as reasons to stop; the first one counts more
EXIT_CODE = 75  # the EX_TEMPFAIL of sysexits.h: try again later
_SECONDS_OF_ONE = 0.5  # a terminal sends a Ctrl-C to all processes of a launcher, which may send it to them as well

_calls: list[Call] = []  # the calls of this process, in all threads
_main_calls: list[Call] = []  # those that signals end, each within the one before


class Run(Protocol):
    """The part of a run that a signal needs."""

    @property
    def phase(self) -> str: ...

    @property
    def reads_input(self) -> bool: ...

    @property
    def ends_at_interrupt(self) -> bool: ...

    def preempt(self, reason: str) -> None: ...

    def end_at_once(self) -> object: ...

    def announce_interrupt(self) -> object: ...


class Preempted(SystemExit):
    """The process got SIGTERM, or `est.request_stop` was called: what ran has ended in order, in training with a
    checkpoint. Its exit code is 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Call:
    """A call of `train`, `evaluate` or `predict`, which a signal or a `request_stop` ends.

    Attributes:
      reason: SIGTERM or SIGINT if it is to end, else None.
      run: the run that it makes, once it has begun; before, the user's code is called, and states are made.
      received: when this process itself got a signal first, by its number.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.run: Run | None = None
        self.received: dict[int, float] = {}

    @property
    def phase(self) -> str:
        return "begin" if self.run is None else self.run.phase

    def begin(self, run: Run) -> None:
        """Has the run end in order from now on; raises if the call was to end before."""
        self.run = run
        self.raise_if_asked()

    def ask(self, reason: str) -> None:
        self.reason = SIGTERM if SIGTERM in (self.reason, reason) else reason
        if self.run is not None:
            self.run.preempt(reason)

    def raise_if_asked(self, about: str = "") -> None:
        """Raises the exception of the reason to end, if there is one; a KeyboardInterrupt says `about`."""
        if self.reason is not None:
            raise_stop(self.reason, about)


@contextlib.contextmanager
def ends_by_signals() -> Iterator[Call]:
    """Lets SIGTERM, Ctrl-C and `request_stop` end a call, the block: at once, where it has no run yet, or waits for its
    caller; otherwise its run ends, and the exception comes at the end of the block."""
    call = Call()
    _calls.append(call)
    try:
        with _handle_signals(call):
            yield call
    finally:
        _calls.remove(call)
    call.raise_if_asked()


@contextlib.contextmanager
def _handle_signals(call: Call) -> Iterator[None]:
    """Handles signals within the block, in the main thread, as Python has it, and only where nobody else does."""
    ours = [number for number in _DEFAULTS if in_main_thread() and _is_ours(number)]
    if not ours:
        yield
        return
    _main_calls.append(call)
    try:
        for number in ours:
            signal.signal(number, _on_signal)
        yield
    finally:
        _main_calls.remove(call)
        # Only this module's handlers are removed, and only in the main thread, the only one that may install handlers.
        # Results of `predict` may be read to their end in another thread, which cannot take the handlers away.
        if not _main_calls and in_main_thread():
            for number in ours:
                if signal.getsignal(number) is _on_signal:
                    comes_late = call.reason == signal.Signals(number).name and number not in call.received
                    signal.signal(number, _on_late_signal if comes_late else _DEFAULTS[number])


def request_stop() -> bool:
    """Asks the runs of this process to save and stop, as SIGTERM does; returns whether there was one.

    For the notice of an engine, a signal's handler of your own, or a Ctrl-C where `train` runs in another thread, which
    no signal reaches. It may be called in any thread, and returns at once. Training ends after the steps that have
    begun, in all its processes at the same one, with a checkpoint; then `train` raises `est.Preempted`, in whatever
    thread it was called. It is a SystemExit with code 75: an engine that calls your function counts it as a failure,
    after which it starts the training again. An input that blocks ends with its next batch where the run has not begun
    its work.

    >>> import estimator as est
    >>> est.request_stop()  # nothing runs
    False
    """
    ask_all(SIGTERM)
    if not in_main_thread() and any(call.run is not None and call.run.reads_input for call in _main_calls):
        # Nothing else ends an input that blocks in the main thread.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # type: ignore[arg-type]
    return bool(_calls)


def is_ended_at_once() -> bool:
    """Returns whether a stop that comes to a run with `reads_input` ends what this thread does then."""
    in_reach = in_main_thread() and hasattr(signal, "pthread_kill")
    return in_reach and signal.getsignal(signal.SIGTERM) is _on_signal


def is_asked() -> bool:
    """Returns whether a call of this process is to end."""
    return any(call.reason is not None for call in list(_calls))


def ask_all(reason: str) -> None:
    """Does what a signal does to the calls of this process: another one got it."""
    for call in list(_calls):  # another thread may begin or end one
        call.ask(reason)


def raise_stop(reason: str, about: str = "") -> None:
    """Raises the exception of a signal. Python ends with the code of Ctrl-C only for a KeyboardInterrupt itself."""
    if reason == SIGTERM:
        raise Preempted
    raise KeyboardInterrupt(*filter(None, [about]))


def _on_late_signal(number: int, frame: FrameType | None) -> None:
    """Does nothing, once: the run has ended since the signal came to another process, and this process is about to."""
    signal.signal(number, _DEFAULTS[number])


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _main_calls:  # they have ended in another thread, which left the handler: do what the default would
        signal.signal(number, _DEFAULTS[number])
        signal.raise_signal(number)
        return
    active = [call for call in _main_calls if call.phase != "output"]  # whose caller does not hold their results
    if number == signal.SIGINT and not active:
        raise KeyboardInterrupt  # of the caller, who may read on
    now = time.monotonic()
    is_second = any(now - call.received.get(number, now) > _SECONDS_OF_ONE for call in active)
    # As Python has it, Ctrl-C is for the main thread.
    for call in list(_calls) if number == signal.SIGTERM else _main_calls:
        call.ask(signal.Signals(number).name)
        call.received.setdefault(number, now)
    runs = [call.run for call in active if call.run is not None]
    if number == signal.SIGINT and is_second:
        for run in runs:
            run.end_at_once()
        raise KeyboardInterrupt
    for run in runs:
        if number == signal.SIGINT and not run.ends_at_interrupt:
            Work(run.announce_interrupt).thread.start()  # this thread may be within a line of the log
    # Nothing would read the flag while the user's code or the caller of `predict` runs.
    if not active or active[-1].phase == "begin" or any(run.reads_input for run in runs):
        _main_calls[-1].raise_if_asked()
    if number == signal.SIGINT and runs[-1].ends_at_interrupt:
        raise KeyboardInterrupt


_DEFAULTS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


def _is_ours(number: int) -> bool:
    return signal.getsignal(number) in (_DEFAULTS[number], _on_signal, _on_late_signal)


def _leave_to_parent() -> None:
    """A forked child, such as a worker of a data loader, has no run to end: the signal ends the process."""
    _calls.clear()
    _main_calls.clear()
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) in (_on_signal, _on_late_signal):
            signal.signal(number, default)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
