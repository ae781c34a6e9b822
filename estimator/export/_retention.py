"""Removal of old exports."""

from __future__ import annotations

import os
import re

from absl import logging

from estimator.checkpoint._export_folder import is_export
from estimator.storage._files import list_dir, remove_dir

_EXPORT = re.compile(r"\d{10}")


def remove_old(export_path: str, keep: int) -> None:
    """Leaves the newest exports: the folders whose names are the largest times."""
    numbers = sorted(name for name in list_dir(export_path) if _EXPORT.fullmatch(name))
    # A folder whose name is a number, but which is not an export, is not removed.
    exports = [name for name in numbers if is_export(os.path.join(export_path, name))]
    for name in exports[:-keep]:
        try:
            remove_dir(os.path.join(export_path, name))
        # A folder that cannot be removed must not end training.
        except OSError as error:
            logging.warning("Can not delete the old export %s: %s", os.path.join(export_path, name), error)
