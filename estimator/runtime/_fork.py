"""Guards against `os.fork` after jax was used: jax's threads are gone in the child, where it would wait for ever."""

from __future__ import annotations

import os

_user: int | None = None  # the process that has used jax, here or in a parent


def check_not_forked(what: str) -> None:
    """Checks, before a run first uses jax, that this process was not forked from one that has used it."""
    global _user
    if _user is None:
        _user = os.getpid()
    if _user != os.getpid():
        raise RuntimeError(
            f"`{what}` was called in process {os.getpid()}, which was forked from process {_user} after an Estimator "
            "had run there. jax does not work in a forked process: it would wait for ever. Start the process by "
            "`multiprocessing.get_context('spawn')`, or fork it before the first run."
        )
