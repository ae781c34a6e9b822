"""Standard streams of a process that has none, as daemons."""

from __future__ import annotations

import os


def keep_standard_streams_open() -> None:
    """Opens the null device in the place of a closed stdin, stdout or stderr: else the next file that is opened, such
    as a checkpoint, gets its number, and with it what XLA writes to stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
