"""The phase that a process is in, and since when: set by its run, read by threads that watch it."""

from __future__ import annotations

import time

PHASES = {
    "begin": "makes or restores its state",
    "input": "waits for a batch of input_fn",
    "compile": "compiles a program, or runs it for the first time",
    "step": "waits for a step",
    "hook": "calls its hooks",
    "checkpoint": "writes a checkpoint",
    "evaluate": "evaluates",
    "end": "ends its hooks",
}


class Progress:
    """The phase of a call, nested calls included.

    Attributes:
      moment: the phase, and the time at which it was entered, by `time.monotonic()`: one attribute, so that another
        thread reads a phase with its own time.
      slowest_step: the seconds of the longest phase "step" that has ended.
    """

    def __init__(self) -> None:
        self.moment = "begin", time.monotonic()
        self.slowest_step = 0.0

    def enter(self, phase: str) -> None:
        before, since = self.moment
        self.moment = _, now = phase, time.monotonic()
        if before == "step":
            self.slowest_step = max(self.slowest_step, now - since)


def describe_phase(phase: str, secs: float) -> str:
    """Says what a run has been doing, for a report.

    >>> describe_phase("input", 60.0)
    "For the last 60.0 s it is in phase 'input': it waits for a batch of input_fn."
    """
    return f"For the last {secs:.1f} s it is in phase {phase!r}: it {PHASES.get(phase, phase)}."
