"""`history.jsonl`: the numbers of a run, a line per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from absl import logging

from estimator.storage._files import exists, expand, read, write

HISTORY = "history.jsonl"
COLUMNS = {"step", "time"}  # of a line, beside the tags

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
            row = json.loads(line)
            row.update({tag: float(value) for tag, value in row.items() if isinstance(value, str)})
            if not all(isinstance(value, int | float) for value in row.values()) or not math.isfinite(row["time"]):
                raise ValueError("not all its values are numbers")
            # Several hooks may write values of one step at different times: they are merged, and the last value of a
            # tag counts.
            rows[int(row["step"])] = rows.get(int(row["step"]), {}) | row
        except (ValueError, OverflowError, AttributeError, KeyError) as error:
            logging.error("%s is damaged: line %d is left out, %r (%r).", path, i + 1, line, error)
    return [rows[step] for step in sorted(rows)], not torn


def cut_history(path: str, first: int, in_order: bool) -> list[dict[str, Any]]:
    """Removes a torn line and all rows from the step `first` on from a history; returns these rows.

    Args:
      path: the path of the history.
      first: a step.
      in_order: whether its lines are in the order of their steps: then, mostly, only the last one is read.
    """
    # The usual case: only the end of the file is read, since a long history would delay each start.
    if in_order and _last_step(path) < first:
        return []
    rows, whole = _read(path)
    kept = [row for row in rows if row["step"] < first]
    if not whole or len(kept) < len(rows):
        write(path, b"".join(map(history_line, kept)))
    return rows[len(kept) :]


def _last_step(path: str) -> float:
    """The step of the last line of a history; infinity if it is torn or very long."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 10_000))
        *_, line, torn = b"", *file.read().split(b"\n")
    try:
        return float(json.loads(line)["step"]) if not torn else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def history_line(row: Mapping[str, Any]) -> bytes:
    """A row as JSON, which has no NaN and no infinities: strings stand for them."""
    if not all(map(math.isfinite, row.values())):
        row = {tag: value if math.isfinite(value) else _JSON_NAMES[str(value)] for tag, value in row.items()}
    return json.dumps(row, allow_nan=False).encode() + b"\n"
