"""Small files beside checkpoints. They are written whole by `_files.write`; a damaged one is set aside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from estimator.storage._files import MISSING, is_damage, is_url, read, remove, write
from estimator.storage._json import NOT_JSON

T = TypeVar("T")


def read_or_set_aside(path: str, parse: Callable[[bytes], T], instead: str) -> T | None:
    """Reads a small file; a damaged one is renamed, so that it ends no run, and named in the log once.

    >>> import json, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "done.json")
    >>> write(path, b'{"step": 3')
    >>> read_or_set_aside(path, json.loads, "It begins again."), os.listdir(os.path.dirname(path))
    (None, ['done.json.damaged'])

    Args:
      path: of the file, which need not be there.
      parse: parses the contents; raises one of `NOT_JSON` if they are not what was written.
      instead: a sentence for the log, on what follows from the loss.

    Returns:
      The result of `parse`; None without a file, or of a damaged one.
    """
    try:
        return parse(read(path))
    except MISSING:
        return None
    except (OSError, *NOT_JSON) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        aside = f"{path}.damaged"
        logging.error("%s is damaged (%.200r). It is set aside as %s. %s", path, error, aside, instead)
    with contextlib.suppress(OSError):  # of who may only read
        if is_url(path):
            write(aside, read(path))
            remove(path)
        else:
            os.replace(path, aside)
    return None
