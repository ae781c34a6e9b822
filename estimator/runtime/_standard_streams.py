"""Standard streams for processes without, such as daemons."""

from __future__ import annotations

import os


def keep_standard_streams_open() -> None:
    """Opens the null device for a closed stdin, stdout or stderr. Otherwise the next file that is opened, such as a
    checkpoint, gets its number, and XLA writes its messages into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
