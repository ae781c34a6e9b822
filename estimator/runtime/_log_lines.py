"""The log lines of a plain script. absl, unlike TensorFlow, shows none below warnings until `app.run`."""

from __future__ import annotations

import logging
import sys

from absl import logging as absl_logging


class _Default(int):
    """A level that no program has set: one that it sets is a plain int."""


def show_log_lines() -> None:
    """Shows lines of INFO where nobody has set a level, nor handlers that have one of their own.

    >>> show_log_lines()
    """
    lines = absl_logging.get_absl_logger()
    if lines.level == logging.NOTSET and isinstance(logging.root.level, _Default) and _is_unconfigured():
        lines.setLevel(_Default(logging.INFO))
        lines.addFilter(_obeys_root)


def _obeys_root(record: logging.LogRecord) -> bool:
    """Returns whether a line passes the level of the root logger, if a program has set only that since
    `show_log_lines`."""
    own, root = absl_logging.get_absl_logger().level, logging.root.level
    is_set = isinstance(own, _Default) and not isinstance(root, _Default)
    return not is_set or record.levelno >= root


def _is_unconfigured() -> bool:
    """Also where a line of absl, such as orbax writes when it is imported, has called `logging.basicConfig()`."""
    match logging.root.handlers:
        case []:
            return True
        case [logging.StreamHandler(stream=sys.stderr, formatter=logging.Formatter(_fmt=logging.BASIC_FORMAT))]:
            return isinstance(logging.root.level, _Default) or _is_of_absl(logging.root.handlers[0])
    return False


def _is_of_absl(handler: logging.Handler) -> bool:
    """Returns whether absl's `logging.basicConfig()`, not the program's, may have made a handler before this import."""
    if "orbax" not in sys.modules:
        return False
    made = [each() for each in logging._handlerList]  # type: ignore[attr-defined]
    return made.index(handler) > made.index(absl_logging.get_absl_handler())


# From this import on, a level that is set is known, even one that is equal to Python's own.
if logging.root.level == logging.WARNING and _is_unconfigured():
    logging.root.setLevel(_Default(logging.WARNING))
