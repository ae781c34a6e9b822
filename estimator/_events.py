"""What is written of a run: an event file for TensorBoard, and its numbers as lines of JSON beside it."""

from __future__ import annotations

import glob
import json
import math
import os
import socket
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from estimator._report import Histogram, bucket_limits

HISTORY = "history.jsonl"
_COLUMNS = ("step", "time")  # of a line of the history, beside the tags


class _Moment(NamedTuple):
    """What is to be written of a step."""

    time: float
    values: list[Any]  # Summary.Value
    scalars: dict[str, float]


class EventWriter:
    """Appends to the event file and the history of a directory: each tag once for a step.

    A run that repeats steps, since it goes on from a checkpoint, or evaluates one again, takes back what was written of
    them: the history is cut, and TensorBoard is told by a SessionLog.START, as TensorFlow did. The `add_` methods are
    those of `tensorboardX.SummaryWriter`; what they are given is written by `flush`, each step in one piece.

    Args:
      directory: made if need be.
      first, last: of which steps is written.
    """

    def __init__(self, directory: str, first: int, last: float = math.inf) -> None:
        # Late, since it imports torch where there is torch.
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        os.makedirs(directory, exist_ok=True)
        self._moments: dict[int, _Moment] = {}
        self._told: set[str] = set()
        history = os.path.join(directory, HISTORY)
        rows = _cut(history, first, last) if os.path.exists(history) else []
        self._later = [row for row in rows if row["step"] > last]  # START takes them back, too
        self._history = open(history, "ab", buffering=0)  # a line is one write: whole, or not there
        # Files of this name only: somebody else's may be open for writing.
        name = os.path.join(glob.escape(directory), "events.out.tfevents.*.estimator")
        old = sorted(glob.glob(name))
        if old:
            os.truncate(old[-1], _whole_records(old[-1]))
        new = os.path.join(directory, f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.estimator")
        self._events = open(old[-1] if old else new, "ab", buffering=0)
        if self._events.tell() == 0:
            self._record(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        else:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._record(event_pb2.Event(wall_time=time.time(), step=first, session_log=start))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None:
        self._add(tag, global_step, walltime, simple_value=scalar_value)
        if tag not in _COLUMNS:
            self._moments[global_step].scalars[tag] = scalar_value
        elif tag not in self._told:
            self._told.add(tag)
            logging.warning("%s has no summary %r: it has a column of that name. Rename the summary.", HISTORY, tag)

    def add_histogram_raw(self, tag: str, *, global_step: int, walltime: float, **parts: Any) -> None:
        parts["bucket_limit"], parts["bucket"] = parts.pop("bucket_limits"), parts.pop("bucket_counts")
        self._add(tag, global_step, walltime, histo=self._summary_pb2.HistogramProto(**parts))

    def add_image(self, tag: str, img_tensor: np.ndarray, global_step: int, walltime: float, dataformats: str) -> None:
        assert dataformats == "HWC"
        height, width, channels = img_tensor.shape
        image = self._summary_pb2.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=_png(img_tensor)
        )
        self._add(tag, global_step, walltime, image=image)

    def add_text(self, tag: str, text_string: str, global_step: int, walltime: float) -> None:
        from tensorboardX.summary import text

        self._moment(global_step, walltime).values.extend(text(tag, text_string).value)

    def flush(self) -> None:
        for step, moment in sorted(self._moments.items()):
            self._record_values(step, moment.time, moment.values)
            if moment.scalars:
                self._history.write(_line({"step": step, "time": moment.time, **moment.scalars}))
        self._moments.clear()

    def close(self) -> None:
        try:
            self.flush()
            for row in self._later:
                values = [self._value(tag, simple_value=row[tag]) for tag in row if tag not in _COLUMNS]
                self._record_values(row["step"], row["time"], values)
        finally:
            self._events.close()
            self._history.close()

    def _add(self, tag: str, step: int, walltime: float, **value: Any) -> None:
        self._moment(step, walltime).values.append(self._value(tag, **value))

    def _value(self, tag: str, **value: Any) -> Any:
        return self._summary_pb2.Summary.Value(tag=tag, **value)

    def _moment(self, step: int, walltime: float) -> _Moment:
        return self._moments.setdefault(step, _Moment(walltime, [], {}))

    def _record_values(self, step: int, walltime: float, values: Sequence[Any]) -> None:
        summary = self._summary_pb2.Summary(value=values)
        self._record(self._event_pb2.Event(wall_time=walltime, step=step, summary=summary))

    def _record(self, event: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        crcs = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._events.write(length + crcs[0] + data + crcs[1])


def write_values(writer: Any, step: int, walltime: float, values: Mapping[str, Any]) -> None:
    """Gives values to an `EventWriter` or a `tensorboardX.SummaryWriter`, and flushes it.

    Args:
      writer: gets them.
      step, walltime: when they were taken.
      values: by tag: numbers, `Histogram`s, texts, and images as arrays of shape `(n, height, width, channels)`.
    """
    for tag, value in values.items():
        if isinstance(value, Histogram):
            writer.add_histogram_raw(tag, **_histogram_parts(value), global_step=step, walltime=walltime)
        elif isinstance(value, str):
            writer.add_text(tag, value, step, walltime)
        elif isinstance(value, np.ndarray):
            for i, image in enumerate(_as_uint8(value)):
                writer.add_image(f"{tag}/image/{i}", image, step, walltime, dataformats="HWC")
        else:
            writer.add_scalar(tag, value, step, walltime)
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


def read_history(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What `history.jsonl` in a directory tells: of a model_dir the training, of an eval_dir the evaluations.

    Each line of the file is a JSON object with "step", "time" (seconds since 1970) and the scalar summaries. NaN and
    infinities are there as "NaN", "Infinity" and "-Infinity"; here they are floats. A last line that was torn by a
    crash is left out.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with open(f"{directory}/history.jsonl", "w") as file:
    ...     _ = file.write('{"step": 1, "time": 1.5, "loss": "NaN"}\\n{"step": 101, "ti')
    >>> read_history(directory)
    [{'step': 1, 'time': 1.5, 'loss': nan}]

    Args:
      directory: the `model_dir`, or `estimator.eval_dir(name)`.

    Returns:
      One dict for each step, in the order of the steps.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line, not the last one, is none of a history.
    """
    path = os.path.join(directory, HISTORY)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"There is no {HISTORY} in {os.fspath(directory)!r}. `train` writes it into the model_dir, every "
            "RunConfig.save_summary_steps, and `evaluate` into `estimator.eval_dir(name)`."
        )
    return _read(path)[0]


def read_eval_metrics(eval_dir: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """The numbers that evaluations gave, by global step: TensorFlow's function of that name.

    >>> read_eval_metrics("/tmp/nothing/was/evaluated/here")
    {}

    Args:
      eval_dir: `estimator.eval_dir(name)`.

    Returns:
      For each step, in order, a dict of the metrics and "loss"; empty where nothing was evaluated yet.
    """
    if not os.path.exists(os.path.join(eval_dir, HISTORY)):
        return {}
    rows = read_history(eval_dir)
    return {row["step"]: {tag: row[tag] for tag in row if tag not in _COLUMNS} for row in rows}


def _read(path: str) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a history, one for each step, in order; and whether the file is as whole as they are."""
    with open(path, "rb") as file:
        *lines, torn = file.read().split(b"\n")
    rows: dict[int, dict[str, Any]] = {}
    for i, line in enumerate(lines):
        try:
            row = {tag: float(value) if isinstance(value, str) else value for tag, value in json.loads(line).items()}
            rows[row["step"]] = rows.get(row["step"], {}) | row
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}, line {i + 1}, is no line of a history: {line!r}.") from error
    return [rows[step] for step in sorted(rows)], not torn


def _cut(path: str, first: int, last: float) -> list[dict[str, Any]]:
    """Removes the steps from `first` to `last`, and a torn line, from a history; returns the other rows."""
    rows, whole = _read(path)
    kept = [row for row in rows if not first <= row["step"] <= last]
    if not whole or len(kept) < len(rows):
        with open(f"{path}.tmp", "wb") as file:
            file.writelines(map(_line, kept))
        os.replace(f"{path}.tmp", path)
    return kept


def _line(row: Mapping[str, Any]) -> bytes:
    """JSON has no NaN and no infinities: their names stand for them."""
    finite = {tag: value if math.isfinite(value) else _NAMES[str(value)] for tag, value in row.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


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


def _histogram_parts(histogram: Histogram) -> dict[str, Any]:
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


def _as_uint8(images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8:
        return images
    return (np.clip(np.nan_to_num(images.astype(np.float32)), 0.0, 1.0) * 255.0).round().astype(np.uint8)


def _png(image: np.ndarray) -> bytes:
    """An uint8 image of 1, 3 or 4 channels as a PNG file; tensorboardX needs Pillow for it, and does not ask for it."""
    height, width, channels = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # 0: not filtered
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
