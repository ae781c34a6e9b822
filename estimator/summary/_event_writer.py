"""Writes an event file for TensorBoard, and its numbers as lines of JSON beside it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from io import FileIO
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging

from estimator.core._record import Histogram, bucket_limits
from estimator.io._records import frame_record
from estimator.storage._files import exists, is_url, list_dir
from estimator.storage._folders import WorkingFolder
from estimator.summary._history import COLUMNS, HISTORY, cut_history, history_line

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

_UPLOAD_SECS = 10.0  # a store takes whole files only; at least this long between two uploads, and two tries ...
_UPLOAD_SHARE = 50  # ... and this multiple of the time that an upload takes

_LAST_TRIES = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between uploads at the end, to a store that is away

_PROCESS = uuid.uuid4().hex[:12]  # the number of a process may come again, as in a container that starts again

_Moment = tuple[int, float, Mapping[str, Any]]  # step, time, values by tag
_Missing = tuple[int, int, Exception]  # the first and the last step, and why


class EventWriter:
    """Appends to the event file of this process in a directory, and to its history: each tag once per step.

    A run may repeat steps, because it resumes from a checkpoint or evaluates one again. Then it replaces what was
    written of them: it cuts the history, and begins with a SessionLog.START, at which TensorBoard drops these steps of
    what is above and in earlier files (tensorboardX's `purge_step`). Files are opened when something is written; an
    evaluation that may not write to the directory does without. In a store, the files are written again, from local
    ones, at checkpoints, at the end, and now and then between.

    What cannot be written, as on a full disk, is an error in the log, when it begins and at the end, and not in the
    run: a run is worth more. Writing is tried again now and then; what a store missed meanwhile, it gets then.

    Args:
      directory: made if it does not exist.
      first, last: the first and the last step that this writer may write.
    """

    def __init__(self, directory: str, first: int, last: float = math.inf) -> None:
        self._path, self._first, self._last = directory, first, last
        self._waiting: list[_Moment] = []
        self._later: list[_Moment] = []  # later steps of the history, to be written again at the end
        self._folder: WorkingFolder | None = None
        self._files: tuple[FileIO, FileIO] | None = None  # events and history, open from the first flush on
        self._flushed = -math.inf
        self._interval = _UPLOAD_SECS if is_url(directory) else 1.0
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None  # flushes what waits, though nothing is written any more
        self._warned: set[str] = set()
        self._lost: _Missing | None = None
        self._behind: _Missing | None = None  # what is here and not in the store

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        """Writes values; those within a second of the last ones, or in a store of the last upload, at its end.

        Args:
          step: the training step.
          walltime: in seconds since 1970.
          values: by tag: numbers, `Histogram`s, texts, and images as arrays of shape `(n, height, width, channels)`
            with 1, 3 or 4 channels.

        Raises:
          TypeError: a value is of another kind.
        """
        checked = check_values(values)
        with self._lock:
            self._waiting.append((step, walltime, checked))
            secs = self._flushed + self._interval - time.monotonic()
            if secs <= 0:
                self.flush()
            elif self._timer is None:
                self._timer = threading.Timer(secs, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Writes at once what waits."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, waiting, self._waiting = None, self._waiting, []
            if waiting:
                self._try_to_write(waiting)

    def close(self, error: BaseException | None = None) -> None:
        """Writes what waits, whatever has ended the run."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._flush_all()
        for seconds in _LAST_TRIES:
            if self._behind is not None:
                time.sleep(seconds)
                if self._files is None:
                    self._flush_all()
                else:
                    self._try_to_upload([])
        for missing in filter(None, (self._lost, self._behind)):
            logging.error(
                "The summaries of the steps %d to %d are missing in %s: %s", *missing[:2], self._path, missing[2]
            )
        for file in self._files or ():
            file.close()
        self._files = self._folder = self._lost = self._behind = None

    def _flush_all(self) -> None:
        self.flush()
        if self._later:
            self._waiting, self._later = self._later, []
            self.flush()

    def _try_to_write(self, moments: list[_Moment]) -> None:
        steps = [step for step, _, _ in moments]
        try:
            self._write(moments)
            self._flushed = time.monotonic()
        except Exception as error:  # a store has errors of many kinds
            is_read_only = isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS
            if self._last < math.inf and is_read_only:
                logging.warning("No summaries of the evaluation are written: %s.", error)
            elif is_url(self._path) and self._files is None:
                self._waiting = moments  # a store that is away has not given the file to append to yet
                self._behind = self._note_missing(self._behind, steps, error)
            else:
                self._lost = self._note_missing(self._lost, steps, error)
            self._flushed, self._interval = time.monotonic(), max(_UPLOAD_SECS, self._interval)
        else:
            self._try_to_upload(steps)

    def _write(self, moments: list[_Moment]) -> None:
        files = self._files = self._files or self._open()
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        try:
            _append(files[0], b"".join(_record(_event(*moment)) for moment in moments))
            _append(files[1], b"".join(map(self._line, moments)))
        except OSError:
            for file, size in zip(files, sizes, strict=True):
                with contextlib.suppress(OSError):  # a torn line or record at the end is skipped by who reads it
                    os.ftruncate(file.fileno(), size)
            raise

    def _try_to_upload(self, steps: list[int]) -> None:
        if not is_url(self._path) or self._folder is None:
            return
        before = time.monotonic()
        try:
            self._folder.upload()
            self._behind = None
        except Exception as error:
            self._behind = self._note_missing(self._behind, steps, error)
        self._flushed = time.monotonic()
        self._interval = max(_UPLOAD_SECS, _UPLOAD_SHARE * (self._flushed - before) if self._behind is None else 0)

    def _note_missing(self, missing: _Missing | None, steps: list[int], error: Exception) -> _Missing:
        if missing is None:
            logging.error(
                "The summaries of step %d cannot be written to %s: %s. The run continues, and tries again.",
                steps[0],
                self._path,
                error,
            )
        known = [*steps, *(missing or ())[:2]]
        return min(known), max(known), error

    def _open(self) -> tuple[FileIO, FileIO]:
        # Late, since it imports torch where there is torch.
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        own = _own_event_file(self._path)
        folder = self._folder = self._folder or WorkingFolder(self._path, [HISTORY, *([own] if own else [])])
        path = os.path.join(folder.path, HISTORY)
        rows = cut_history(path, self._first, in_order=self._last < math.inf) if os.path.exists(path) else []
        self._later = [(row.pop("step"), row.pop("time"), row) for row in rows if row["step"] > self._last]
        now = time.time_ns()
        begin = [Event(step=self._first, session_log=SessionLog(status=SessionLog.START))]
        if own is None or not exists(os.path.join(folder.path, own)):
            second = _next_second(self._path, now // 10**9)
            own = f"events.out.tfevents.{second}.{socket.gethostname()}.{now}{_suffix()}"
            begin.insert(0, Event(file_version="brain.Event:2"))
        for event in begin:
            event.wall_time = now / 1e9
        name = os.path.join(folder.path, own)
        history, events = open(path, "ab", buffering=0), open(name, "ab", buffering=0)
        size = os.fstat(events.fileno()).st_size
        try:
            _append(events, b"".join(map(_record, begin)))
        except OSError:
            history.close()
            events.close()
            if size:
                with contextlib.suppress(OSError):
                    os.truncate(name, size)
            else:
                os.remove(name)
            raise
        return events, history

    def _line(self, moment: _Moment) -> bytes:
        step, walltime, values = moment
        scalars = {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        for tag in scalars.keys() & COLUMNS:
            del scalars[tag]
            if tag not in self._warned:
                logging.warning("The summary %r is not in %s, which has a column %r. Rename it.", tag, HISTORY, tag)
            self._warned.add(tag)
        return history_line({"step": step, "time": walltime, **scalars}) if scalars else b""


def _suffix() -> str:
    """The end of the names of this process's event files."""
    return f".{os.getpid()}.{_PROCESS}.estimator"  # a forked process has `_PROCESS` of its parent


def _own_event_file(directory: str) -> str | None:
    """The newest event file of a directory, if this process has begun it."""
    # TensorBoard reads the files of a directory in the order of their names, which begin with the second, and never
    # comes back to one: after the file of another process, a new one is due.
    names = sorted(name for name in list_dir(directory) if ".tfevents." in name)
    return names[-1] if names and names[-1].endswith(_suffix()) else None


def _next_second(directory: str, now: int) -> int:
    """The second in the name of a new event file: after other files, although the clock may be set back."""
    seconds = [int(m[1]) for m in map(re.compile(r".*\.tfevents\.(\d{,12})\..*").fullmatch, list_dir(directory)) if m]
    return max([now, *(second + 1 for second in seconds)])


def check_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks that values can be written; numbers of numpy and jax become Python's.

    Raises:
      TypeError: one cannot.
    """
    return {tag: _check_value(tag, value) for tag, value in values.items()}


def _check_value(tag: str, value: Any) -> Any:
    if isinstance(value, int | float | str | Histogram):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        kinds = (np.integer, np.floating, np.bool_)
        is_real = any(jax.dtypes.issubdtype(value.dtype, kind) for kind in kinds)
        if is_real and value.ndim == 0:
            number = value.item()
            return number if isinstance(number, int) else float(number)  # a longdouble's item is one
        if is_real and value.ndim == 4 and value.shape[3] in (1, 3, 4):
            return np.asarray(value)
        value = f"an array of shape {value.shape} and dtype {value.dtype}"
    raise TypeError(
        "`context.events().write` takes numbers, texts, and images of shape (n, height, width, channels), with 1, 3 or "
        f"4 channels, as values; got for {tag!r}: {value if isinstance(value, str) else repr(value)}."
    )


def _append(file: FileIO, data: bytes) -> None:
    """Writes to the end of a file, without a buffer that a kill would lose, and at once, so that it tears no line."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _record(event: Event) -> bytes:
    return frame_record(event.SerializeToString())


def _event(step: int, walltime: float, values: Mapping[str, Any]) -> Event:
    from tensorboardX import summary
    from tensorboardX.proto.event_pb2 import Event

    event = Event(wall_time=walltime, step=step)
    for tag, value in values.items():
        if isinstance(value, int | float):
            parts = [summary.scalar(tag, float(value))]
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
    """The results of an evaluation that can be written: numbers, arrays of numbers as histograms, and what is in dicts
    as "name/key"."""
    shown: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            shown |= shown_metrics({f"{name}/{key}": part for key, part in value.items()})
        elif isinstance(value, int | float):
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
