"""Locks on files by the operating system, which releases them when the process ends."""

from __future__ import annotations

import errno
import os

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}


def lock_if_possible(file: int, exclusive: bool) -> str | None:
    """Locks an open file until it is closed here and in child processes; returns the reason if there are no locks.

    It waits for a lock that is not exclusive.

    Raises:
      BlockingIOError: `exclusive`, and somebody else has a lock.
    """
    if fcntl is None:
        return "the system has no file locks"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return None
