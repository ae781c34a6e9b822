"""The other processes of a run: whether one of them has died, which is noted here by whoever watches them."""

from __future__ import annotations

import threading

import jax

EXIT_CODE = 76  # of a process that is ended because another has died while it waits for it

start_timeout_secs = 300.0  # how long one waits for the others where all have to be before they go on together

_loss: str | None = None
_end: str | None = None
_is_watched = False
_noted = threading.Event()
_reported = threading.Event()


class ProcessLostError(RuntimeError):
    """Another process of this run has died, or ended with an error; the message names it."""

    def __init__(self, loss: str) -> None:
        super().__init__(f"{loss}. Start all processes again: training goes on from the last checkpoint.")


def lost() -> str | None:
    """Which process has died, and how: "process 1 (host b, pid 4711) has died: its connection closed"; or None.

    >>> print(lost())
    None
    """
    return _loss


def explained(error: BaseException, wait_secs: float = 3.0) -> BaseException:
    """What to raise for an error that came out of work done together: `ProcessLostError` if a process has died.

    An error of jax may come before it is known who died, so this waits for it; not where nobody watches.

    >>> explained(ValueError("no"))
    ValueError('no')
    """
    if isinstance(error, ProcessLostError) or not _is_watched:
        return error
    loss = _loss
    if loss is None and isinstance(error, jax.errors.JaxRuntimeError):
        _noted.wait(wait_secs)
        loss = _loss or (f"{_end} has ended before this one" if _end else None)
    if loss is None:
        return error
    found = ProcessLostError(loss)
    found.__cause__ = error
    return found


def raise_if_lost(ended: bool = False) -> None:
    """Raises `ProcessLostError` if a process has died, or, where it is still needed, `ended`."""
    if _loss is not None:
        raise ProcessLostError(_loss)
    if ended and _end is not None:
        raise ProcessLostError(f"{_end} has ended before this one")


def watch() -> None:
    """Says that somebody watches the other processes from now on, and will note here what becomes of them."""
    global _is_watched
    _is_watched = True


def note_loss(text: str) -> None:
    global _loss
    _loss = text
    _noted.set()


def note_end(process: str) -> None:
    """Notes that a process has ended in order."""
    global _end
    _end = process


def report() -> None:
    """Says that a `ProcessLostError` leaves the run: this process waits for no other any more."""
    _reported.set()


def wait_until_reported(secs: float) -> bool:
    """Whether a `ProcessLostError` comes to leave the run in that time."""
    return _reported.wait(secs)
