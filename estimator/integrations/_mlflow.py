"""A run in MLflow."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from estimator.core._record import Histogram
from estimator.integrations._images import as_picture
from estimator.summary._trackers import Run

_ID = "estimator.run_id"  # a tag of MLflow's run
_MOST = 100  # params of one call


@dataclasses.dataclass(frozen=True)
class MLflowTracker:
    """Sends a run to MLflow: numbers as metrics, images, texts as tags; the settings as params.

    A training run and the evaluations of its model_dir are one run of MLflow, with metrics such as "eval/accuracy"; a
    run that was killed resumes it, by the id in the model_dir, which the MLflow run has as a tag. MLflow keeps all that
    it gets: steps that a resumed run repeats are there twice. It has no histograms: of each there are the count, the
    mean, the standard deviation, the minimum and the maximum, as "tag/mean". A param keeps its first value.

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
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "`est.trackers.MLflowTracker` needs mlflow. Install it: pip install 'replicate-model-fn[mlflow]'."
            ) from error

    def open(self, run: Run) -> _MLflowWriter:
        from mlflow import MlflowClient

        client = MlflowClient(self.tracking_uri)
        known = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        name = os.path.basename(run.model_dir)
        theirs = found[0] if found else client.create_run(experiment, tags={_ID: run.id}, run_name=name)
        _log_params(client, theirs, run.settings)
        # An evaluation may be within a training run, whose end is the run's.
        ends = not run.name or not found
        if ends:
            client.update_run(theirs.info.run_id, status="RUNNING")
        return _MLflowWriter(client, theirs.info.run_id, run.prefix, ends)


class _MLflowWriter:
    def __init__(self, client: Any, run_id: str, prefix: str, ends: bool) -> None:
        self._client, self._id, self._prefix, self._ends = client, run_id, prefix, ends
        self._sent: list[Any] = []  # calls that a thread of MLflow makes

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for tag, value in values.items():
            name = f"{self._prefix}{tag}"
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value)
            elif isinstance(value, np.ndarray):
                for i, image in enumerate(value):
                    self._client.log_image(self._id, as_picture(image), key=f"{name}/{i}", step=step)
            else:
                parts = value.describe() if isinstance(value, Histogram) else {"": value}
                for part, number in parts.items():
                    key = f"{name}/{part}" if part else name
                    metrics.append(Metric(key, float(number), int(1000 * walltime), step))
        self._sent.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def flush(self) -> None:
        sent, self._sent = self._sent, []
        for call in sent:
            call.wait()

    def close(self, error: BaseException | None = None) -> None:
        self.flush()
        if self._ends:
            self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def _log_params(client: Any, theirs: Any, settings: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    known = theirs.data.params
    changed = {name: value for name, value in settings.items() if known.get(name, str(value)) != str(value)}
    if changed:
        logging.warning("MLflow keeps the first value of a param; not in its run: %s.", changed)
    new = [Param(name, str(value)) for name, value in settings.items() if name not in known]
    for i in range(0, len(new), _MOST):
        client.log_batch(theirs.info.run_id, params=new[i : i + _MOST])
