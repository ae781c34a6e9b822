"""The Python stacks of all threads, for reports of what hangs."""

from __future__ import annotations

import sys
import threading
import traceback


def format_stacks(first: int) -> str:
    """Formats the stacks of all threads but this one, the thread `first` before the others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return "\n".join(
        f"Thread {names.get(ident, ident)!r}{' (the run)' * (ident == first)}, most recent call last:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: ident != first)
    )
