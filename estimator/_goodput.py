"""`goodput`: the time that the processes of a training have spent, by what they spent it on."""

from __future__ import annotations

import dataclasses
import os

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._newest import newest_readable
from estimator.runtime._table import ShownAsTable, Table, show_time
from estimator.storage._files import expand, normalize


class NoTimesError(ValueError):
    """A checkpoint does not say how its training has spent its time."""


@dataclasses.dataclass(frozen=True)
class Goodput(ShownAsTable):
    """The seconds of each process, from the start of the first run to a checkpoint; printed, a table of their shares.

    Attributes:
      step: of the checkpoint.
      start: when the first run began, in seconds since 1970.
      seconds: from then to the checkpoint.
      rows: for each process its seconds: "input" (waiting for the next batches), "host" (starting programs, and hooks),
        "device" (waiting for results), "checkpoint" (reading and writing them), "evaluation", "compilation" (of the
        training step, with its first tracing and the initial values) and "other": between runs, in predictions, and the
        steps that a run made after its last checkpoint before it was killed, since others made them again.
    """

    step: int
    start: float
    seconds: float
    rows: tuple[dict[str, float], ...]

    @property
    def shares(self) -> dict[str, float]:
        """The mean shares of the processes, of `seconds`; together 1."""
        return {part: sum(row[part] for row in self.rows) / len(self.rows) / self.seconds for part in self.rows[0]}

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were made that last: "host" and "device" together."""
        return self.shares["host"] + self.shares["device"]

    def _table(self) -> Table:
        head = (
            f"{self.seconds:,.1f} s from {show_time(self.start)} to the checkpoint of step {self.step}: goodput "
            f"{self.goodput:.1%}"
        )
        rows = [
            (str(i), *(f"{seconds / self.seconds:.1%}" for seconds in row.values())) for i, row in enumerate(self.rows)
        ]
        titles = ("process", *self.rows[0])
        return Table([titles, *rows], ">" * len(titles), above=(head,))


def goodput(model_dir: str | os.PathLike[str]) -> Goodput:
    """Reads from the newest checkpoint how the training has spent its time since it began, over restarts.

    `python -m estimator.inspect MODEL_DIR --time` prints it. A run may be under way.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (1, 1))
    ...     loss = est.losses.mean_squared_error(labels, features @ w)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> x = np.ones((4, 1), np.float32)
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp()).train(lambda: [(x, x)] * 50)
    >>> spent = est.goodput(estimator.model_dir)
    >>> spent.step, list(spent.shares)
    (50, ['input', 'host', 'device', 'checkpoint', 'evaluation', 'compilation', 'other'])
    >>> title, head, row = str(spent).splitlines()
    >>> title.partition(" to ")[2].partition(":")[0], len(row.split())
    ('the checkpoint of step 50', 8)

    Args:
      model_dir: of an Estimator; or the path of a checkpoint, for the time up to this one.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: the checkpoint was not saved by `train`, and has no times.
    """
    path = normalize(expand(model_dir))
    checkpoint = Checkpoint(path) if Checkpoint(path).exists() else newest_readable(path, Checkpoint.check_sound)
    if checkpoint is None:
        raise FileNotFoundError(f"There is no checkpoint in {os.fspath(model_dir)!r}, where `est.goodput` looks.")
    step, host = checkpoint.progress()
    if "time" not in host:
        raise NoTimesError(
            f"`est.goodput` reads what `train` notes in its checkpoints; {checkpoint.path} has no times. It was saved "
            "before this was noted, or not by `train`; a further run of `train` notes them."
        )
    spent = [sum(row.values()) for row in host["time"]["seconds"]]
    # The wall clock may have been set back meanwhile.
    seconds = max(host["time"]["now"] - host["time"]["start"], *spent)
    rows = tuple({**row, "other": seconds - sum(row.values())} for row in host["time"]["seconds"])
    return Goodput(step, host["time"]["start"], seconds, rows)
