"""The curves of a run as a picture."""

from __future__ import annotations

import io
import math
import os
from typing import Any

from estimator.runtime._extras import import_extra
from estimator.storage._files import exists, is_url, list_dir, read, write
from estimator.summary._history import HISTORY, read_history

_WIDTH, _HEIGHT = 5.0, 3.5  # of a panel, in inches
_COLUMNS = 3


class PicturePath(str):
    """The path of a picture, which a notebook shows."""

    def _repr_png_(self) -> bytes | None:
        return read(self) if self.endswith(".png") else None

    def _repr_svg_(self) -> str | None:
        return read(self).decode() if self.endswith(".svg") else None


def plot_history(model_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> str:
    """Draws what a training run and its evaluations have written: one panel for each tag, the loss first.

    A panel has the training and all evaluations that know its tag. It needs matplotlib, which is not a dependency of
    the rest; pyplot, and what it keeps, is left alone.

    Args:
      model_dir: of the Estimator.
      path: of the picture, which matplotlib takes the format of; default: `history.png` in the model_dir.

    Returns:
      The path. Where a cell of a notebook ends with it, the picture is shown.

    Raises:
      ImportError: matplotlib is not installed.
      FileNotFoundError: neither the model_dir nor one of its eval_dirs has a history.
    """
    Figure = import_extra("est.plot_history", "matplotlib.figure", "plot").Figure
    canvas = import_extra("est.plot_history", "matplotlib.backends.backend_agg", "plot").FigureCanvasAgg
    runs = _histories(os.fspath(model_dir))
    known = {tag for rows in runs.values() for row in rows for tag in row} - {"step", "time"}
    tags = sorted(known, key=lambda tag: (tag != "loss", tag))
    columns = min(len(tags), _COLUMNS)
    lines = math.ceil(len(tags) / columns)
    figure = Figure((_WIDTH * columns, _HEIGHT * lines), layout="constrained")
    canvas(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for tag, panel in zip(tags, panels, strict=False):
        for i, (name, rows) in enumerate(runs.items()):
            points = [(row["step"], row[tag]) for row in rows if tag in row]
            if points:
                panel.plot(*zip(*points, strict=True), color=f"C{i}", marker=".", label=name)
        panel.set(title=tag, xlabel="step")
        panel.grid(alpha=0.3)
        panel.legend()
    for panel in list(panels):  # of the last line, without a tag
        panel.remove()
    chosen = os.path.join(model_dir, "history.png") if path is None else os.fspath(path)
    if is_url(chosen):
        picture = io.BytesIO()
        figure.savefig(picture, format=os.path.splitext(chosen)[1].removeprefix(".") or None)
        write(chosen, picture.getvalue())
    else:
        figure.savefig(chosen)
    return PicturePath(chosen)


def _histories(model_dir: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of training and of each evaluation, by the name of the curve."""
    evaluations = sorted(name for name in list_dir(model_dir) if name == "eval" or name.startswith("eval_"))
    candidates = {"train": model_dir} | {name: os.path.join(model_dir, name) for name in evaluations}
    directories = {name: path for name, path in candidates.items() if exists(os.path.join(path, HISTORY))}
    if not directories:
        raise FileNotFoundError(
            f"There is no {HISTORY} in {model_dir!r}, nor in a directory of evaluations in it. Give `est.plot_history` "
            "the model_dir of an Estimator that has trained, with RunConfig.save_summary_steps, or has evaluated."
        )
    return {name: read_history(directory) for name, directory in directories.items()}
