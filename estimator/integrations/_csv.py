"""A run as a table of its numbers, without any service."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from estimator.core._record import Histogram
from estimator.integrations._images import as_picture
from estimator.integrations._names import as_path
from estimator.storage._files import lock_if_possible, read, write
from estimator.summary._trackers import Run

_COLUMNS = ["step", "time", "tag", "value"]
_HEADER = ",".join(_COLUMNS) + "\r\n"
_ANY_BYTES = "surrogateescape"  # which stay as they are, UTF-8 or not


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
    """Appends lines to a file: those of a call, or none if it fails, as on a full disk."""

    def __init__(self, directory: str, run: Run) -> None:
        self._directory = directory
        self._path = os.path.join(directory, "metrics.csv")
        os.makedirs(directory, exist_ok=True)
        write(os.path.join(directory, "settings.json"), json.dumps({"id": run.id, **run.settings}, indent=2).encode())
        with _open_locked(self._path):
            _remove_steps(self._path, run.first, run.last)

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        lines = io.StringIO(newline="")
        images = {tag: value for tag, value in values.items() if isinstance(value, np.ndarray)}
        for tag, value in values.items():
            if tag in images:
                continue
            parts = value.describe() if isinstance(value, Histogram) else {"": value}
            for name, number in parts.items():
                if not isinstance(number, str):
                    csv.writer(lines).writerow([step, walltime, f"{tag}/{name}" if name else tag, number])
        for tag, image in images.items():
            self._write_images(step, tag, image)
        self._append(lines.getvalue())  # to the system: a kill of the process loses nothing

    def _append(self, lines: str) -> None:
        with _open_locked(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            left = memoryview((("" if size else _HEADER) + lines).encode("utf-8", _ANY_BYTES))
            try:
                while left:
                    left = left[file.write(left) :]
            except BaseException:
                file.truncate(size)  # no line that is torn is followed by others
                raise

    def _write_images(self, step: int, tag: str, images: np.ndarray) -> None:
        folder = os.path.join(self._directory, "images", as_path(tag))
        os.makedirs(folder, exist_ok=True)
        for i, image in enumerate(images):
            as_picture(image).save(f"{folder}/{step}_{i}.png")

    def flush(self) -> None:
        with open(self._path, "ab") as file:
            os.fsync(file.fileno())

    def close(self, error: BaseException | None = None) -> None:
        pass  # no file is open


@contextlib.contextmanager
def _open_locked(path: str) -> Iterator[io.FileIO]:
    """Opens a file to append to it while nobody else appends to it or replaces it, in any process."""
    while True:
        with open(path, "ab", buffering=0) as file:
            lock_if_possible(file.fileno(), exclusive=True, wait=True)
            if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                yield file
                return
        # Somebody has replaced it between the two.


def _remove_steps(path: str, first: int, last: float) -> None:
    """Removes the lines of these steps, and those that are damaged, as a last line that a kill has torn."""
    text = read(path).decode("utf-8", _ANY_BYTES)
    whole = text[: text.rfind("\r\n") + 2]
    rows = list(csv.reader(io.StringIO(whole, newline="")))[1:]  # a tag may have a line break
    sound = [row for row in rows if len(row) == len(_COLUMNS) and row[0].isdecimal()]
    if damaged := len(rows) - len(sound):
        logging.error("%s is damaged: %d of its lines are removed.", path, damaged)
    kept = [row for row in sound if not first <= int(row[0]) <= last]
    if len(kept) < len(rows) or len(whole) < len(text):
        new = io.StringIO(_HEADER, newline="")
        new.seek(0, os.SEEK_END)
        csv.writer(new).writerows(kept)
        write(path, new.getvalue().encode("utf-8", _ANY_BYTES))
