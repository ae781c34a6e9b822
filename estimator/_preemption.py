"""SIGTERM, by which clusters announce that a machine is taken away: the run ends in order, the process with a code."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from estimator.hooks._hook import Context

SIGTERM = "SIGTERM"
EXIT_CODE = 75  # the EX_TEMPFAIL of sysexits.h: try again later


class Preempted(SystemExit):
    """The process got SIGTERM: what ran has ended in order, in training with a checkpoint. Its exit code is 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


@contextlib.contextmanager
def ends_by_sigterm(context: Context) -> Iterator[None]:
    """Asks the run to stop at a SIGTERM within the block, and raises `Preempted` at the end of it.

    Only in the main thread, as Python has it, and only where nobody else handles the signal.
    """
    before: Any = signal.getsignal(signal.SIGTERM)
    outer = getattr(before, "is_ours", False)
    if threading.current_thread() is not threading.main_thread() or not (before is signal.SIG_DFL or outer):
        yield
        return
    came = False

    def stop(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        context.request_stop(SIGTERM)
        if outer:  # a run within a run: both end
            before(number, frame)

    stop.is_ours = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except GeneratorExit:  # the results of `predict` were let go of: nobody would see an exception
        signal.signal(signal.SIGTERM, before)
        if came and not outer:
            os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if came:
        raise Preempted
