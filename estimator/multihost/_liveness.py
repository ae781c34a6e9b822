"""Errors for the loss of another process of this run, as `ProcessWatch` notes it."""

from __future__ import annotations

import jax

from estimator.multihost._runtime import RUNTIME

EXIT_CODE = 76  # of a process that is ended because another has died while it waits for it
_SECS_AFTER_AN_END = 3.0  # of a process, for a loss to become known that explains an error better


class ProcessLostError(RuntimeError):
    """Another process of this run has died, or ended with an error; the message names it."""

    def __init__(self, loss: str) -> None:
        super().__init__(f"{loss}. Start all processes again: training resumes from the last checkpoint.")


def explained(error: BaseException) -> BaseException:
    """What to raise for an error of work that processes did together: `ProcessLostError` if one of them has died.

    A collective raises at once, before it is known who died, so this waits until it is; not where nobody watches. An
    error of another kind, such as one of the input, stays: the loss may be what it led to.

    >>> explained(ValueError("no"))
    ValueError('no')
    """
    if RUNTIME.loss_known_secs is None or isinstance(error, ProcessLostError) or not isinstance(error, Exception):
        return error
    if not _follows_from_jax(error):
        return error
    loss = RUNTIME.loss
    if loss is None and isinstance(error, jax.errors.JaxRuntimeError):
        RUNTIME.loss_known.wait(_SECS_AFTER_AN_END if RUNTIME.ended else RUNTIME.loss_known_secs)
        loss = RUNTIME.loss or (_early_end(RUNTIME.ended) if RUNTIME.ended else None)
    if loss is None:
        return error
    lost = ProcessLostError(loss)
    lost.__cause__ = error
    return lost


def _follows_from_jax(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is of jax's collectives or of its coordination service."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def raise_if_lost(ended: bool = False) -> None:
    """Raises `ProcessLostError` if a process has died, or, where it is still needed, `ended`."""
    if RUNTIME.loss is not None:
        raise ProcessLostError(RUNTIME.loss)
    if ended and RUNTIME.ended is not None:
        raise ProcessLostError(_early_end(RUNTIME.ended))


def note_loss(text: str) -> None:
    """Notes that a process has died: "process 1 (host b, pid 4711) ended with ValueError: no such file"."""
    RUNTIME.loss = text
    RUNTIME.loss_known.set()


def _early_end(process: str) -> str:
    return f"{process} has ended before this one"
