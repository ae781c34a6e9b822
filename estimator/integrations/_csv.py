"""A run as a table of its numbers, without any service."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from estimator.core._record import Histogram
from estimator.integrations._images import as_picture
from estimator.summary._trackers import Run

_COLUMNS = ["step", "time", "tag", "value"]


@dataclasses.dataclass(frozen=True)
class CsvTracker:
    """Writes a run to `metrics.csv`: a line for each number, with the columns step, time, tag and value.

    An evaluation has a file in its own directory, as it has an event file. Of a histogram there are the count, the
    mean, the standard deviation, the minimum and the maximum, as "tag/mean"; an image is a file
    `images/<tag>/<step>_<number>.png`; `settings.json` has the settings and the params. Texts are left out. A run that
    resumes replaces the lines of the steps that it repeats.

    >>> import csv, estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     loss = est.losses.mean_squared_error(labels, features @ est.get_variable("w", (1, 1)))
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> config = est.RunConfig(save_summary_steps=10, trackers=[est.trackers.CsvTracker()])
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp(), config)
    >>> x = np.ones((4, 1), np.float32)
    >>> estimator = estimator.train(lambda: [(x, x)] * 21)
    >>> with open(f"{estimator.model_dir}/metrics.csv", newline="") as file:
    ...     [row["step"] for row in csv.DictReader(file) if row["tag"] == "loss"]
    ['1', '11', '21']

    Args:
      directory: where to write instead of the model_dir; a local one, which a model_dir in a store needs.

    Raises:
      ValueError: when a run begins: the files would be in a store, which has no appends.
    """

    directory: str | os.PathLike[str] | None = None

    def open(self, run: Run) -> _CsvWriter:
        chosen = os.path.join(self.directory or run.model_dir, run.name)
        if "://" in chosen:
            raise ValueError(
                f"CsvTracker appends to a local file; got the directory {chosen!r}. Write, say, "
                "`CsvTracker(directory='/tmp/run')`."
            )
        return _CsvWriter(chosen, run)


class _CsvWriter:
    def __init__(self, directory: str, run: Run) -> None:
        self._directory = directory
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, "settings.json"), "w", encoding="utf-8") as file:
            json.dump({"id": run.id, **run.settings}, file, indent=2)
        path = os.path.join(directory, "metrics.csv")
        _remove_steps(path, run.first, run.last)
        self._file = open(path, "a", newline="", encoding="utf-8")
        if not self._file.tell():
            csv.writer(self._file).writerow(_COLUMNS)

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        for tag, value in values.items():
            if isinstance(value, np.ndarray):
                self._write_images(step, tag, value)
            else:
                parts = value.describe() if isinstance(value, Histogram) else {"": value}
                for name, number in parts.items():
                    if not isinstance(number, str):
                        csv.writer(self._file).writerow([step, walltime, f"{tag}/{name}" if name else tag, number])
        self._file.flush()  # to the system: a kill of the process loses nothing

    def _write_images(self, step: int, tag: str, images: np.ndarray) -> None:
        folder = os.path.join(self._directory, "images", tag)
        os.makedirs(folder, exist_ok=True)
        for i, image in enumerate(images):
            as_picture(image).save(f"{folder}/{step}_{i}.png")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, error: BaseException | None = None) -> None:
        self._file.close()


def _remove_steps(path: str, first: int, last: float) -> None:
    """Removes the lines of these steps, and a last line that a kill has torn."""
    if not os.path.exists(path):
        return
    with open(path, newline="", encoding="utf-8") as file:
        lines = file.read().split("\r\n")
    kept = [line for line in lines[1:-1] if not first <= int(line.partition(",")[0]) <= last]
    if len(kept) < len(lines) - 2 or lines[-1]:
        new = f"{path}.new"
        with open(new, "w", newline="", encoding="utf-8") as file:
            file.write("\r\n".join([",".join(_COLUMNS), *kept, ""]))
        os.replace(new, path)
