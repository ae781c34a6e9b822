"""What is written of a run: an event file for TensorBoard, and its numbers as lines of JSON beside it."""

from __future__ import annotations

import errno
import glob
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from absl import logging

from estimator.core._record import Histogram, bucket_limits
from estimator.summary._history import _COLUMNS, HISTORY, _cut, _line

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class EventWriter:
    """Appends to the event file and the history of a directory: each tag once for a step.

    A run that repeats steps, since it goes on from a checkpoint, or evaluates one again, takes back what was written of
    them: the history is cut, and TensorBoard is told by a SessionLog.START, as TensorFlow did. Files are opened when
    something is written; where that is not allowed, an evaluation goes without.

    Args:
      directory: made if need be.
      first, last: of which steps is written.
    """

    def __init__(self, directory: str, first: int, last: float = math.inf) -> None:
        # Late, since it imports torch where there is torch.
        from tensorboardX import record_writer, summary
        from tensorboardX.proto import event_pb2

        self._crc, self._summary = record_writer.masked_crc32c, summary
        self._event, self._session_log = event_pb2.Event, event_pb2.SessionLog
        self._directory, self._first, self._last = directory, first, last
        self._waiting: list[tuple[int, float, Mapping[str, Any]]] = []
        self._later: list[tuple[int, float, Mapping[str, Any]]] = []  # to be written again at the end
        self._files: tuple[BinaryIO, BinaryIO] | None = None  # events and history, open from the first flush on
        self._flushed = -math.inf
        self._told: set[str] = set()

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        """Notes values, and writes them, and all that wait, unless that was done within the last second.

        Args:
          step: of the training.
          walltime: in seconds since 1970.
          values: by tag: numbers, `Histogram`s, texts, and images as arrays of shape `(n, height, width, channels)`.
        """
        self._waiting.append((step, walltime, values))
        if time.monotonic() >= self._flushed + 1.0:
            self.flush()

    def flush(self) -> None:
        """Writes what waits: each file at once, so that a kill tears nothing."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            events, history = self._files = self._files or self._open()
        except OSError as error:
            if self._last == math.inf or error.errno not in _READ_ONLY:
                raise
            logging.warning("No summaries of the evaluation are written: %s.", error)
            return
        events.write(b"".join(self._record(self._event_of(*moment)) for moment in waiting))
        history.write(b"".join(map(self._history_of, waiting)))
        self._flushed = time.monotonic()

    def close(self) -> None:
        try:
            self.flush()
            self._waiting, self._later = self._later, []
            self.flush()
        finally:
            for file in self._files or ():
                file.close()

    def _open(self) -> tuple[BinaryIO, BinaryIO]:
        """Takes back what there is from the first step on."""
        os.makedirs(self._directory, exist_ok=True)
        path = os.path.join(self._directory, HISTORY)
        rows = _cut(path, self._first, in_order=self._last < math.inf) if os.path.exists(path) else []
        for row in rows:
            if row["step"] > self._last:
                self._later.append((row.pop("step"), row.pop("time"), row))
        # Files of this name only: somebody else's may be open for writing.
        old = sorted(glob.glob(os.path.join(glob.escape(self._directory), "events.out.tfevents.*.estimator")))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.estimator"
        events = open(old[-1] if old else os.path.join(self._directory, name), "ab", buffering=0)
        if old:
            events.truncate(_whole_records(old[-1]))
        # The first START of a directory means nothing to TensorBoard; each later one takes back.
        start = self._event(wall_time=time.time(), step=self._first)
        start.session_log.status = self._session_log.START
        version = [] if old else [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        events.write(b"".join(map(self._record, [*version, start])))
        return events, open(path, "ab", buffering=0)

    def _event_of(self, step: int, walltime: float, values: Mapping[str, Any]) -> Any:
        event = self._event(wall_time=walltime, step=step)
        for tag, value in values.items():
            if isinstance(value, int | float):
                shown = [self._summary.scalar(tag, value)]
            elif isinstance(value, Histogram):
                shown = [self._summary.histogram_raw(tag, **histogram_parts(value))]
            elif isinstance(value, str):
                shown = [self._summary.text(tag, value)]
            else:
                shown = [
                    self._summary.image(f"{tag}/image/{i}", image, dataformats="HWC")
                    for i, image in enumerate(as_uint8(value))
                ]
            for summary in shown:
                event.summary.value.extend(summary.value)
        return event

    def _record(self, event: Any) -> bytes:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        return b"".join((length, struct.pack("<I", self._crc(length)), data, struct.pack("<I", self._crc(data))))

    def _history_of(self, moment: tuple[int, float, Mapping[str, Any]]) -> bytes:
        step, walltime, values = moment
        scalars = {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        for tag in scalars.keys() & _COLUMNS:
            del scalars[tag]
            if tag not in self._told:
                logging.warning("The summary %r is not in %s, which has a column %r. Rename it.", tag, HISTORY, tag)
            self._told.add(tag)
        return _line({"step": step, "time": walltime, **scalars}) if scalars else b""


def write_into(writer: Any, step: int, walltime: float, values: Mapping[str, Any]) -> None:
    """What `EventWriter.write` does, for a `tensorboardX.SummaryWriter`; flushes it."""
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
    """What of the results of an evaluation can be written: numbers, and arrays of them as histograms."""
    shown: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, int | float):
            shown[name] = value
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size:
            shown[name] = _histogram_of(value)
        else:
            logging.warning("Skipping summary for %s, must be a number or an array of numbers; got %r.", name, value)
    shown.pop("global_step", None)  # it is the step of all others
    return shown


def _whole_records(path: str) -> int:
    """How many bytes of an event file are whole records; a crash may have torn the last one."""
    size, end = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while len(head := file.read(8)) == 8:
            after = end + struct.unpack("<Q", head)[0] + 16  # its length, and two checksums
            if after > size:
                break
            end = after
            file.seek(end)
    return end


def _histogram_of(array: np.ndarray) -> Histogram:
    flat, limits = array.astype(np.float64).ravel(), bucket_limits()
    buckets = np.minimum(np.searchsorted(limits, flat, side="left"), len(limits) - 1)
    counts = np.bincount(buckets, minlength=len(limits))
    return Histogram(counts, flat.min(), flat.max(), flat.sum(), (flat**2).sum())


def histogram_parts(histogram: Histogram) -> dict[str, Any]:
    """Empty buckets side by side are written as one, as TensorFlow does."""
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
    if images.dtype == np.uint8:
        return images
    return (np.clip(np.nan_to_num(images.astype(np.float32)), 0.0, 1.0) * 255.0).round().astype(np.uint8)
