"""The system's locks on files, which end with the process that has them."""

from __future__ import annotations

import errno
import os

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}


def lock_if_possible(file: int, exclusive: bool) -> str | None:
    """Locks an open file until it is closed, in all processes that have it from here; says why there are no locks.

    A lock that is not exclusive is waited for.

    Raises:
      BlockingIOError: somebody has a lock on it, and this one is to be exclusive.
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
