"""`history.jsonl`: the numbers of a run, a line per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from absl import logging

from estimator.storage._files import exists, expand, open_regular, read, write
from estimator.storage._json import NOT_JSON

HISTORY = "history.jsonl"
COLUMNS = {"step", "time"}  # of a line, beside the tags

_DAMAGES = (*NOT_JSON, OverflowError)  # of a line
_END = 10_000  # bytes of a history
_JSON_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def read_history(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the `history.jsonl` of a directory: of training from a model_dir, of evaluations from an eval_dir.

    Each line of the file is a JSON object with "step", "time" (seconds since 1970) and the scalar summaries. NaN and
    infinities are "NaN", "Infinity" and "-Infinity" in the file, and floats here. A last line that a crash tore is
    skipped; any other line that is damaged too, with an error in the log.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with open(f"{directory}/history.jsonl", "w") as file:
    ...     _ = file.write('{"step": 1, "time": 1.5, "loss": "NaN"}\\n{"step": 101, "ti')
    >>> read_history(directory)
    [{'step': 1, 'time': 1.5, 'loss': nan}]

    Args:
      directory: the `model_dir`, or `estimator.eval_dir(name)`.

    Returns:
      One dict per step, in the order of the steps.

    Raises:
      FileNotFoundError: the file does not exist.
    """
    path = os.path.join(expand(directory), HISTORY)
    if not exists(path):
        raise FileNotFoundError(
            f"There is no {HISTORY} in {os.fspath(directory)!r}. `train` writes it into the model_dir, every "
            "RunConfig.save_summary_steps, and `evaluate` into `estimator.eval_dir(name)`."
        )
    return _read(path)[0]


def read_eval_metrics(eval_dir: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Reads the results of evaluations, by global step; TensorFlow has a function of this name.

    >>> read_eval_metrics("/tmp/nothing/was/evaluated/here")
    {}

    Args:
      eval_dir: `estimator.eval_dir(name)`.

    Returns:
      For each step, in order, a dict of the metrics and "loss"; empty if nothing was evaluated yet.
    """
    if not exists(os.path.join(expand(eval_dir), HISTORY)):
        return {}
    rows = read_history(eval_dir)
    return {row["step"]: {tag: row[tag] for tag in row if tag not in COLUMNS} for row in rows}


def _read(path: str) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a history, one per step, in order; and whether its last line is whole."""
    *lines, torn = read(path).split(b"\n")
    rows: dict[int, dict[str, Any]] = {}
    for i, line in enumerate(lines):
        try:
            row = _parse(line)
        except _DAMAGES as error:
            logging.error("%s is damaged: line %d is left out, %r (%r).", path, i + 1, line, error)
        else:
            # Several hooks may write values of one step at different times: they are merged, and the last value of a
            # tag counts.
            rows[int(row["step"])] = rows.get(int(row["step"]), {}) | row
    return [rows[step] for step in sorted(rows)], not torn


def _parse(line: bytes) -> dict[str, Any]:
    """The row of a line; raises one of `_DAMAGES` if it is none."""
    row = json.loads(line)
    row.update({tag: float(value) for tag, value in row.items() if isinstance(value, str)})
    if not all(isinstance(value, int | float) for value in row.values()) or not math.isfinite(row["time"]):
        raise ValueError("not all its values are numbers")
    int(row["step"])
    return row


def cut_history(path: str, first: int, in_order: bool) -> list[dict[str, Any]]:
    """Removes a torn line and all rows from the step `first` on from a history, and a file that is left without any;
    returns these rows.

    Args:
      path: the path of the history.
      first: a step.
      in_order: whether its lines are in the order of their steps: then, mostly, only its end is read and cut off.
    """
    if in_order and (removed := _cut_end(path, first)) is not None:
        return removed
    rows, whole = _read(path)
    kept = [row for row in rows if row["step"] < first]
    if not whole or len(kept) < len(rows):
        write(path, b"".join(map(history_line, kept)))
    return rows[len(kept) :]


def _cut_end(path: str, first: int) -> list[dict[str, Any]] | None:
    """Cuts the rows from the step `first` on, one for each step, off the end of a history; None, and cuts nothing, if
    the end is torn or damaged, or there is more to cut."""
    # A long history would delay each start, and so would a copy of it, which has to be on the disk to replace it.
    size = os.path.getsize(path)
    with open_regular(path) as file:
        file.seek(max(0, size - _END))
        *lines, torn = file.read().split(b"\n")
    rows: list[dict[str, Any]] = []
    end = size
    for line in [] if torn else reversed(lines):
        try:
            row = _parse(line)
        except _DAMAGES:
            return None
        if row["step"] < first:
            break
        if rows and rows[0]["step"] == row["step"]:
            rows[0] = row | rows[0]
        else:
            rows.insert(0, row)
        end -= len(line) + 1
    else:
        if torn or size > _END:
            return None
    # Not cut to nothing: ext4 then writes what comes next to the disk at once, and the next cut waits for that.
    if not end:
        os.remove(path)
    elif end < size:
        os.truncate(path, end)
    return rows


def history_line(row: Mapping[str, Any]) -> bytes:
    """A row as JSON, which has no NaN and no infinities: strings stand for them."""
    if not all(map(math.isfinite, row.values())):
        row = {tag: value if math.isfinite(value) else _JSON_NAMES[str(value)] for tag, value in row.items()}
    return json.dumps(row, allow_nan=False).encode() + b"\n"
