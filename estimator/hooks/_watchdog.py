"""Reports where a stalled run is stuck."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType

from absl import logging

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook
from estimator.multihost._process_group import CALLS
from estimator.multihost._progress import describe_phase
from estimator.runtime._interrupts import in_main_thread
from estimator.runtime._stacks import format_stacks

_SECONDS_FOR_OTHERS = 2.0  # to report that they hang as well
_ACTIONS = ("log", "raise")


class StalledError(RuntimeError):
    """No step of a run has finished for longer than `WatchdogHook` allows."""


class WatchdogHook(Hook):
    """Reports where a run is stuck when no step has finished for `timeout_secs`, with the stacks of all threads.

    A thread watches; the run itself pays nothing. It reports each stall once. Steps are seen to finish where their
    program does, and all that happens between two of them counts: allow for the longest compilation, checkpoint or
    evaluation. The first batch, which is read before hooks begin, is not watched; neither is a call that keeps
    Python's global lock. Each of several processes reports what it does, and for which other one it waits: the
    culprit is the one that waits for none.

    >>> hook = WatchdogHook(timeout_secs=600)

    Args:
      timeout_secs: seconds without a step.
      action: "log": the run continues; "raise": `StalledError` is raised where it hangs. That is done by a signal
        (SIGURG), so the run must be in the main thread of a POSIX process; and it gets through to Python code, locks,
        sleeps and most system calls, but to a call of compiled code, such as the wait for a device, only when that
        returns. If it never does, only ending the process helps.
      path: a local file to which the report is added, beside the log, which absl writes to stderr.

    Raises:
      ValueError: timeout_secs is not a positive number, or the action is unknown; in a run, "raise" is requested in a
        thread that is not the main one.
    """

    def __init__(self, timeout_secs: float, action: str = "log", path: str | os.PathLike[str] | None = None) -> None:
        check_intervals("WatchdogHook", timeout_secs=timeout_secs)
        if action not in _ACTIONS:
            raise ValueError(f"action of WatchdogHook must be one of {list(_ACTIONS)}; got {action!r}.")
        self._timeout = timeout_secs
        self._action = action
        self._path = path
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._context: Context | None = None
        self._error: StalledError | None = None
        self._group = CALLS.group
        self._runs_in = threading.get_ident()
        if self._action == "raise":
            if not in_main_thread():
                raise ValueError(
                    'WatchdogHook(action="raise") can only raise in the main thread; '
                    f'the run is in {threading.current_thread().name!r}. Use action="log".'
                )
            self._handler = signal.signal(signal.SIGURG, self._raise)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="WatchdogHook", daemon=True)
        self._thread.start()

    def after_create_state(self, context: Context) -> None:
        self._context = context

    def end(self, context: Context) -> None:
        if self._thread is None:  # `begin` has failed
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._action == "raise":
            signal.signal(signal.SIGURG, self._handler)

    def _watch(self) -> None:
        batches, phase, is_reported = -1, "", False
        progress = entered = since = time.monotonic()
        while not self._ended.wait(min(self._timeout / 10, 1.0)):
            now = time.monotonic()
            context = self._context
            seen, seen_phase = (0, "begin") if context is None else (context.batches, context.phase)
            if seen != batches or seen_phase == "output":
                batches, progress, since, is_reported = seen, now, now, False
            if seen_phase != phase:
                phase, entered = seen_phase, now
                if is_reported:  # the new phase is reported as well, if it takes as long
                    since, is_reported = now, False
            if not is_reported and now - since >= self._timeout:
                is_reported = True
                doing = describe_phase(phase, now - entered)
                stall = f"No step has finished for {now - progress:.1f} s, after {batches} of this run. {doing}"
                self._report(stall)

    def _report(self, stall: str) -> None:
        # Of several processes, the one that hangs waits for no other.
        own = f"Process {self._group.index} on {socket.gethostname()}: {stall}"
        stalls = [stall, *self._group.gather_reports(own, _SECONDS_FOR_OTHERS)]
        report = "\n".join([*stalls, format_stacks(self._runs_in)])
        logging.error("%s", report)
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(report + "\n")
        if self._action == "raise":
            self._error = StalledError("\n".join(stalls))
            signal.pthread_kill(self._runs_in, signal.SIGURG)  # also wakes it from a sleep, or a lock

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
