"""Trackers: they get what a run writes for TensorBoard, and what it was made with."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from absl import logging

from estimator.core._run_config import RunConfig
from estimator.storage._files import is_url, read, write
from estimator.storage._small_files import read_or_set_aside
from estimator.summary._event_writer import as_uint8, check_values

RUN_ID = "run_id.txt"  # in the model_dir
_MOST_KEPT = 1000  # steps that a tracker could not write, which may have images
_SECRET = re.compile("password|token|secret|key", re.IGNORECASE)  # in the name of a text; a number is not secret


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that a tracker records: a training run, or an evaluation.

    Attributes:
      id: 32 hexadecimal digits, kept in the model_dir: the same for all that trains and evaluates there, also after a
        restart.
      model_dir: of the Estimator.
      name: "" of a training run; "eval" or "eval_<name>" of an evaluation.
      first, last: the steps that it may write. A run that resumes repeats steps, and those from `first` on that are
        there already are replaced.
      settings: the fields of the `RunConfig` as "config/seed", and the params as "params/learning_rate"; a value that
        JSON does not know is its `repr`. A text is "***" where its name has "password", "token", "secret" or "key".
    """

    id: str
    model_dir: str
    name: str
    first: int
    last: float
    settings: dict[str, Any]

    @property
    def directory(self) -> str:
        """The directory of the run's event file."""
        return os.path.join(self.model_dir, self.name) if self.name else self.model_dir

    @property
    def prefix(self) -> str:
        """The prefix that tells the tags of this run from others of the model_dir: "" or "eval/"."""
        return f"{self.name}/" if self.name else ""


class Writer(Protocol):
    """The recorder of one run, which `Tracker.open` returns. Errors of its methods are lines in the log: they do not
    end the run. What `write` did not take it gets again later, with the values after them."""

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        """Writes values.

        Args:
          step: the training step.
          walltime: in seconds since 1970.
          values: by tag: numbers, texts, `Histogram`s, and images as uint8 arrays of shape
            `(n, height, width, channels)` with 1, 3 or 4 channels.
        """

    def flush(self) -> None:
        """Called after a checkpoint was saved: what was written should survive a kill."""

    def close(self, error: BaseException | None = None) -> None:
        """Called once, last.

        Args:
          error: the exception that ended the run, if any.
        """


class Tracker(Protocol):
    """The base of all trackers; a class with this method is one.

    >>> import estimator as est
    >>> class PrintTracker:
    ...     def open(self, run):
    ...         print("run", run.name or "train", run.settings["params/rate"])
    ...         return self
    ...     def write(self, step, walltime, values):
    ...         print(step, sorted(values))
    ...     def flush(self):
    ...         pass
    ...     def close(self, error=None):
    ...         print("end")
    >>> config = est.RunConfig(trackers=[PrintTracker()])
    """

    def open(self, run: Run) -> Writer:
        """Called in process 0 before the first step of a training run, and before an evaluation, which may be within
        the training run. An error that it raises ends a training run; of an evaluation it is a line in the log, and the
        evaluation continues without the tracker."""


class TrackedEvents:
    """Writes to the event file of a run, and to its trackers.

    Raises:
      Exception: of a tracker that cannot open for a training run; the others are closed.
    """

    def __init__(self, events: Writer, trackers: Sequence[Tracker], run: Run) -> None:
        self._events = events
        self._writers: list[_Guarded] = []
        for tracker in trackers:
            name = type(tracker).__name__
            try:
                self._writers.append(_Guarded(name, tracker.open(run)))
            except BaseException as error:
                if run.name and isinstance(error, Exception):  # an evaluation, maybe within a training run
                    logging.error("%s.open failed: %r. %s continues without it.", name, error, run.name)
                    continue
                self.close(error)
                raise

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        checked = check_values(values)
        shown = {tag: as_uint8(value) if isinstance(value, np.ndarray) else value for tag, value in checked.items()}
        for writer in (self._events, *self._writers):
            writer.write(step, walltime, shown)

    def flush(self) -> None:
        for writer in (self._events, *self._writers):
            writer.flush()

    def close(self, error: BaseException | None = None) -> None:
        for writer in (self._events, *self._writers):
            writer.close(error)


class _Guarded:
    """A writer whose errors are lines in the log: a run is worth more. What it cannot write, as to a server that is
    away, is kept and written later."""

    def __init__(self, name: str, writer: Writer) -> None:
        self._name, self._writer = name, writer
        self._kept: list[tuple[int, float, Mapping[str, Any]]] = []
        self._lost: set[int] = set()  # steps
        self._error: Exception | None = None

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        self._kept.append((step, walltime, values))
        self._write_kept()
        if len(self._kept) > _MOST_KEPT:
            self._lost.add(self._kept.pop(0)[0])

    def _write_kept(self) -> None:
        while self._kept:
            if not self._call("write", *self._kept[0]):
                if len(self._kept) == 1 or not self._call("write", *self._kept[-1]):
                    return
                del self._kept[-1]  # it is written, so that something is wrong with the first one
                self._lost.add(self._kept[0][0])
            del self._kept[0]

    def flush(self) -> None:
        self._call("flush")

    def close(self, error: BaseException | None = None) -> None:
        self._write_kept()
        lost = sorted(self._lost.union(step for step, _, _ in self._kept))
        if not self._call("close", error) or lost:
            of_steps = f", of the steps {lost}" if lost else ""
            logging.error("%s may lack values of the run%s: %r.", self._name, of_steps, self._error)

    def _call(self, method: str, *args: Any) -> bool:
        """Calls a method of the writer; returns whether it has raised nothing."""
        try:
            getattr(self._writer, method)(*args)
        except Exception as error:  # of any library
            if self._error is None:
                logging.error("%s.%s failed: %r. The run continues, and tries again.", self._name, method, error)
            self._error = error
            return False
        return True


def run_of(config: RunConfig, params: Any, directory: str, first: int, last: float) -> Run:
    """Describes a run that writes into a directory: the model_dir, or one in it."""
    model_dir = str(config.model_dir)
    name = os.path.relpath(directory, model_dir) if not is_url(directory) else directory[len(model_dir) :].strip("/")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del fields["trackers"]
    settings = dict(_flatten("config", fields)) | dict(_flatten("params", params))
    return Run(_id_of(model_dir), model_dir, "" if name == "." else name, first, last, settings)


def _id_of(model_dir: str) -> str:
    path = os.path.join(model_dir, RUN_ID)
    if found := read_or_set_aside(path, _parse_id, "Trackers see another run from here on."):
        return found
    new = uuid.uuid4().hex
    try:
        if not is_url(model_dir):
            os.makedirs(model_dir, exist_ok=True)
        write(path, new.encode())
        return read(path).decode()  # another process may have written its own
    except OSError as error:  # of a full disk, or of who may only read
        logging.error("The id of the run cannot be written (%s). Trackers see another run at the next start.", error)
        return new


def _parse_id(text: bytes) -> str:
    if not re.fullmatch(rb"[0-9a-f]{32}", text):
        raise ValueError(f"it is {text!r:.50}")
    return text.decode()


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flatten(f"{name}/{key}", part)
        return
    if isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
        yield from _flatten(name, dict(enumerate(value)))
        return
    if isinstance(value, str | bytes) and _SECRET.search(name.rpartition("/")[2]):
        yield name, "***"
        return
    try:
        json.dumps(value)
        yield name, value
    except (TypeError, ValueError):
        yield name, repr(value)
