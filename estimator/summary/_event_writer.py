"""Writes an event file for TensorBoard, and its numbers as lines of JSON beside it."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from absl import logging

from estimator.core._record import Histogram, bucket_limits
from estimator.storage._files import is_url
from estimator.storage._folders import WorkingFolder
from estimator.summary._history import COLUMNS, HISTORY, cut_history, history_line

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event

_UPLOAD_SECS = 10.0  # a store takes whole files only; at least this long between two uploads ...
_UPLOAD_SHARE = 50  # ... and this multiple of the time that an upload takes

_Moment = tuple[int, float, Mapping[str, Any]]  # step, time, values by tag


class EventWriter:
    """Writes an event file in a directory, and appends to its history: each tag once per step.

    A run may repeat steps, because it resumes from a checkpoint or evaluates one again. Then it replaces what was
    written of them: it cuts the history, and begins its event file with a SessionLog.START, at which TensorBoard drops
    these steps of earlier files (tensorboardX's `purge_step`). Files are opened when something is written; an
    evaluation that may not write to the directory does without. In a store, the files are written again, from local
    ones, at checkpoints, at the end, and now and then between.

    Args:
      directory: made if it does not exist.
      first, last: the first and the last step that this writer may write.
    """

    def __init__(self, directory: str, first: int, last: float = math.inf) -> None:
        self._directory, self._first, self._last = directory, first, last
        self._waiting: list[_Moment] = []
        self._later: list[_Moment] = []  # later steps of the history, to be written again at the end
        self._folder: WorkingFolder | None = None
        self._files: tuple[EventsWriter, BinaryIO] | None = None  # events and history, open from the first flush on
        self._flushed = -math.inf
        self._interval = _UPLOAD_SECS if is_url(directory) else 1.0
        self._warned: set[str] = set()

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        """Keeps values until the next flush, and flushes unless that was done within the last second (see `flush`).

        Args:
          step: the training step.
          walltime: in seconds since 1970.
          values: by tag: numbers, `Histogram`s, texts, and images as arrays of shape `(n, height, width, channels)`.
        """
        self._waiting.append((step, walltime, values))
        if time.monotonic() >= self._flushed + self._interval:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            events, history = self._files = self._files or self._open()
            for moment in waiting:
                events.write_event(_event(*moment))
            events.flush()
            history.write(b"".join(map(self._line, waiting)))  # unbuffered, so that a kill does not tear a line
            self._flushed = time.monotonic()
            if self._folder is not None and is_url(self._directory):
                self._folder.upload()
                before, self._flushed = self._flushed, time.monotonic()
                self._interval = max(_UPLOAD_SECS, _UPLOAD_SHARE * (self._flushed - before))
        except OSError as error:
            is_read_only = isinstance(error, PermissionError) or error.errno == errno.EROFS
            if self._last == math.inf or not is_read_only:
                raise
            logging.warning("No summaries of the evaluation are written: %s.", error)

    def close(self) -> None:
        try:
            self.flush()
            self._waiting, self._later = self._later, []
            self.flush()
        finally:
            for file in self._files or ():
                file.close()
            self._files = self._folder = None

    def _open(self) -> tuple[EventsWriter, BinaryIO]:
        # Late, since it imports torch where there is torch.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = self._folder = WorkingFolder(self._directory, [HISTORY])
        path = os.path.join(folder.path, HISTORY)
        rows = cut_history(path, self._first, in_order=self._last < math.inf) if os.path.exists(path) else []
        for row in rows:
            if row["step"] > self._last:
                self._later.append((row.pop("step"), row.pop("time"), row))
        # TensorBoard reads the files of a directory in the order of their names, which begin with the second.
        suffix = f".{time.time_ns()}.estimator"
        events = EventsWriter(os.path.join(folder.path, "events"), suffix)
        start = SessionLog(status=SessionLog.START)
        events.write_event(Event(wall_time=time.time(), step=self._first, session_log=start))
        return events, open(path, "ab", buffering=0)

    def _line(self, moment: _Moment) -> bytes:
        step, walltime, values = moment
        scalars = {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        for tag in scalars.keys() & COLUMNS:
            del scalars[tag]
            if tag not in self._warned:
                logging.warning("The summary %r is not in %s, which has a column %r. Rename it.", tag, HISTORY, tag)
            self._warned.add(tag)
        return history_line({"step": step, "time": walltime, **scalars}) if scalars else b""


def _event(step: int, walltime: float, values: Mapping[str, Any]) -> Event:
    from tensorboardX import summary
    from tensorboardX.proto.event_pb2 import Event

    event = Event(wall_time=walltime, step=step)
    for tag, value in values.items():
        if isinstance(value, int | float):
            parts = [summary.scalar(tag, value)]
        elif isinstance(value, Histogram):
            parts = [summary.histogram_raw(tag, **histogram_parts(value))]
        elif isinstance(value, str):
            parts = [summary.text(tag, value)]
        else:
            parts = [summary.image(f"{tag}/image/{i}", x, dataformats="HWC") for i, x in enumerate(as_uint8(value))]
        for part in parts:
            event.summary.value.extend(part.value)
    return event


def write_into(writer: Any, step: int, walltime: float, values: Mapping[str, Any]) -> None:
    """Like `EventWriter.write`, for a `tensorboardX.SummaryWriter`, which it flushes."""
    for tag, value in values.items():
        if isinstance(value, int | float):
            writer.add_scalar(tag, value, step, walltime)
        elif isinstance(value, Histogram):
            writer.add_histogram_raw(tag, **histogram_parts(value), global_step=step, walltime=walltime)
        else:
            for i, image in enumerate(as_uint8(value)):
                writer.add_image(f"{tag}/image/{i}", image, step, walltime, dataformats="HWC")
    writer.flush()


def shown_metrics(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results of an evaluation that can be written: numbers, and arrays of numbers as histograms."""
    shown: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, int | float):
            shown[name] = value
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size:
            shown[name] = _histogram_of(value)
        else:
            logging.warning("Skipping summary for %s, must be a number or an array of numbers; got %r.", name, value)
    shown.pop("global_step", None)  # the step of all others
    return shown


def _histogram_of(array: np.ndarray) -> Histogram:
    flat, limits = array.astype(np.float64).ravel(), bucket_limits()
    buckets = np.minimum(np.searchsorted(limits, flat, side="left"), len(limits) - 1)
    counts = np.bincount(buckets, minlength=len(limits))
    return Histogram(counts, flat.min(), flat.max(), flat.sum(), (flat**2).sum())


def histogram_parts(histogram: Histogram) -> dict[str, Any]:
    """The arguments of tensorboardX's histograms; adjacent empty buckets are joined, as TensorFlow does."""
    counts = np.asarray(histogram.counts)
    kept = (counts > 0) | np.append(counts[1:] > 0, True)
    return {
        "min": float(histogram.minimum),
        "max": float(histogram.maximum),
        "num": int(counts.sum()),
        "sum": float(histogram.sum),
        "sum_squares": float(histogram.sum_squares),
        "bucket_limits": bucket_limits()[kept].tolist(),
        "bucket_counts": counts[kept].tolist(),
    }


def as_uint8(images: np.ndarray) -> np.ndarray:
    """Floats from 0 to 1 as they are; an image that has others is scaled as TensorFlow does it."""
    if images.dtype == np.uint8:
        return images
    x = np.nan_to_num(images.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
    low, high = x.min((1, 2, 3), keepdims=True), x.max((1, 2, 3), keepdims=True)
    around_zero = 128.0 + x * (127.0 / np.maximum(np.maximum(-low, high), 1e-30))
    from_zero = x * (255.0 / np.maximum(high, 1.0))
    return np.where(low < 0, around_zero, from_zero).round().astype(np.uint8)
