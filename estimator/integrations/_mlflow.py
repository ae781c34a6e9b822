"""A run in MLflow."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from estimator.core._record import Histogram
from estimator.integrations._images import as_picture
from estimator.integrations._in_background import InBackground
from estimator.integrations._names import as_path
from estimator.runtime._extras import import_extra
from estimator.summary._trackers import Run

_ID = "estimator.run_id"  # a tag of MLflow's run
_PARENT = "mlflow.parentRunId"
_MOST, _MOST_METRICS = 100, 1000  # params, and metrics, of one call
_LONGEST_NAME, _LONGEST_TEXT = 250, 6000


@dataclasses.dataclass(frozen=True)
class MLflowTracker:
    """Sends a run to MLflow: numbers as metrics, images, texts as tags; the settings as params.

    A training run and the evaluations of its model_dir are one run of MLflow, with metrics such as "eval/accuracy"; a
    run that was killed resumes it, by the id in the model_dir, which the MLflow run has as a tag. MLflow keeps all that
    it gets: steps that a resumed run repeats are there twice. It has no histograms: of each there are the count, the
    mean, the standard deviation, the minimum and the maximum, as "tag/mean". A param keeps its first value, of which
    there are the first 6,000 characters. What MLflow does not take in a name becomes "_": "accuracy@5" is "accuracy_5".
    Within a run of your own (`with mlflow.start_run():`), the run is nested in it. A thread sends all of it; for a
    server that does not answer, a run waits ten seconds after a checkpoint and at its end.

    >>> import estimator as est
    >>> config = est.RunConfig(trackers=[est.trackers.MLflowTracker("digits", "sqlite:////tmp/mlflow.db")])

    Args:
      experiment: the name of the experiment; made if it does not exist.
      tracking_uri: the store, such as "sqlite:////tmp/mlflow.db", or a server's address; default: MLflow's own setting.

    Raises:
      ImportError: mlflow is not installed.
    """

    experiment: str = "Default"
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        import_extra("est.trackers.MLflowTracker", "mlflow", "mlflow")

    def open(self, run: Run) -> InBackground:
        import mlflow

        client, active = mlflow.MlflowClient(self.tracking_uri), mlflow.active_run()  # of this thread

        def open_writer() -> _MLflowWriter:
            known = client.get_experiment_by_name(self.experiment)
            experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
            found = client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
            name = os.path.basename(run.model_dir)
            tags = {_ID: run.id, **_parent_tag(client, active)}
            theirs = found[0] if found else client.create_run(experiment, tags=tags, run_name=name)
            # An evaluation may be within a training run, whose end is the run's.
            ends = not run.name or not found
            if ends:
                _log_params(client, theirs, run.settings)
                client.update_run(theirs.info.run_id, status="RUNNING")
            return _MLflowWriter(client, theirs.info.run_id, run.prefix, ends)

        if run.name:
            return InBackground(open_writer)
        writer = open_writer()  # whose errors end a training run before its first step
        return InBackground(lambda: writer)


class _MLflowWriter:
    def __init__(self, client: Any, run_id: str, prefix: str, ends: bool) -> None:
        self._client, self._id, self._prefix, self._ends = client, run_id, prefix, ends
        self._metrics: list[Any] = []  # which `flush` sends
        self._names: dict[str, str] = {}  # MLflow's, by tag

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for tag, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, self._name(tag), value[:_LONGEST_TEXT])
            elif isinstance(value, np.ndarray):
                for i, image in enumerate(value):
                    key = re.sub(r"[^\w\-./ ]", "_", f"{self._name(tag)}/{i}", flags=re.ASCII)
                    self._client.log_image(self._id, as_picture(image), key=key, step=step)
            else:
                parts = value.describe() if isinstance(value, Histogram) else {"": value}
                for part, number in parts.items():
                    key = self._name(f"{tag}/{part}" if part else tag)
                    metrics.append(Metric(key, float(number), int(1000 * walltime), step))
        self._metrics += metrics

    def _name(self, tag: str) -> str:
        if tag not in self._names:
            name = _legal(f"{self._prefix}{tag}")
            while name in self._names.values():
                name += "_"
            if name != f"{self._prefix}{tag}":
                logging.warning("MLflow takes no %r as a name: there it is %r.", f"{self._prefix}{tag}", name)
            self._names[tag] = name
        return self._names[tag]

    def flush(self) -> None:
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:_MOST_METRICS])
            del self._metrics[:_MOST_METRICS]

    def close(self, error: BaseException | None = None) -> None:
        if self._ends:
            self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def _legal(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w\-.:/ ]", "_", as_path(name[:_LONGEST_NAME]))


def _parent_tag(client: Any, active: Any) -> dict[str, str]:
    """The tag that nests a run in the one that the user has begun, if that is in the same store."""
    import mlflow

    if active is None:
        return {}
    try:
        return {_PARENT: client.get_run(active.info.run_id).info.run_id}
    except mlflow.MlflowException:
        logging.warning("The active run %s of MLflow is in another store: this one is beside it.", active.info.run_id)
        return {}


def _log_params(client: Any, theirs: Any, settings: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    known = theirs.data.params
    values = {_legal(name): str(value)[:_LONGEST_TEXT] for name, value in settings.items()}
    changed = {name: value for name, value in values.items() if known.get(name, value) != value}
    if changed:
        logging.warning("MLflow keeps the first value of a param; not in its run: %s.", changed)
    new = [Param(name, value) for name, value in values.items() if name not in known]
    for i in range(0, len(new), _MOST):
        client.log_batch(theirs.info.run_id, params=new[i : i + _MOST])
