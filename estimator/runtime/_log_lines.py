"""The log lines of a plain script. absl, unlike TensorFlow, shows none below warnings until `app.run`."""

from __future__ import annotations

import logging
import sys

from absl import logging as absl_logging


def show_log_lines() -> None:
    """Shows lines of INFO where nobody has configured logging, or Python's root logger shows them.

    >>> show_log_lines()
    """
    default = absl_logging.get_verbosity() == absl_logging.WARNING
    if default and (_is_unconfigured() or logging.root.level <= logging.INFO):
        absl_logging.set_verbosity(absl_logging.INFO)


def _is_unconfigured() -> bool:
    """Also where a line of absl, such as orbax writes when it is imported, has called `logging.basicConfig()`."""
    match logging.root.handlers:
        case []:
            return True
        case [logging.StreamHandler(stream=sys.stderr, formatter=logging.Formatter(_fmt=logging.BASIC_FORMAT))]:
            return logging.root.level == logging.WARNING
    return False
