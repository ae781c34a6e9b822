"""The other processes of a run: whether one of them has died, which is noted here by whoever watches them."""

from __future__ import annotations

import jax

from estimator.multihost._runtime import RUNTIME

EXIT_CODE = 76  # of a process that is ended because another has died while it waits for it


class ProcessLostError(RuntimeError):
    """Another process of this run has died, or ended with an error; the message names it."""

    def __init__(self, loss: str) -> None:
        super().__init__(f"{loss}. Start all processes again: training resumes from the last checkpoint.")


def explained(error: BaseException, wait_secs: float = 3.0) -> BaseException:
    """What to raise for an error of work that processes did together: `ProcessLostError` if one of them has died.

    jax may raise before it is known who died, so this waits until it is; not where nobody watches.

    >>> explained(ValueError("no"))
    ValueError('no')
    """
    if isinstance(error, ProcessLostError) or not RUNTIME.is_watched:
        return error
    loss = RUNTIME.loss
    if loss is None and isinstance(error, jax.errors.JaxRuntimeError):
        RUNTIME.loss_known.wait(wait_secs)
        loss = RUNTIME.loss or (_early_end(RUNTIME.ended) if RUNTIME.ended else None)
    if loss is None:
        return error
    lost = ProcessLostError(loss)
    lost.__cause__ = error
    return lost


def raise_if_lost(ended: bool = False) -> None:
    """Raises `ProcessLostError` if a process has died, or, where it is still needed, `ended`."""
    if RUNTIME.loss is not None:
        raise ProcessLostError(RUNTIME.loss)
    if ended and RUNTIME.ended is not None:
        raise ProcessLostError(_early_end(RUNTIME.ended))


def note_loss(text: str) -> None:
    """Notes that a process has died: "process 1 (host b, pid 4711) has died: its connection closed"."""
    RUNTIME.loss = text
    RUNTIME.loss_known.set()


def _early_end(process: str) -> str:
    return f"{process} has ended before this one"
