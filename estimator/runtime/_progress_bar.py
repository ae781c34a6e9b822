"""Progress bars, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return "IPKernelApp" in getattr(shell, "config", ())


def is_interactive() -> bool:
    """Returns whether somebody sees a bar. A daemon may have no stderr."""
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def progress_bar(**options: Any) -> Any:
    """A bar of tqdm: on stderr, or a widget in a notebook that has ipywidgets."""
    import tqdm

    if not is_notebook():
        return tqdm.tqdm(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tqdm.TqdmWarning)  # of missing ipywidgets, without which the bar is text
        from tqdm.auto import tqdm as bar
    return bar(**options)
