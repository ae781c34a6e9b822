"""Runs in MLflow, in a local store."""

import numpy as np
import pytest
from testing.estimators import X, endless, make, times
from testing.summaries import Fails, read, showing

import estimator as est

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

from integrations.test_trackers import kill  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # in MLflow's own code
def test_a_killed_run_resumes_its_mlflow_run_with_evaluations_within(tmp_path, monkeypatch, messages):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # artifacts of a local store are in `mlruns`
    uri, model_dir = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "model"
    tracker = f"est.trackers.MLflowTracker('digits', {uri!r})"
    id = kill(model_dir, tracker)
    estimator = make(model_dir, showing, save_summary_steps=10, trackers=[eval(tracker)])
    hook = est.InMemoryEvaluatorHook(estimator, times(1), every_n_iter=30)
    estimator.train(endless, steps=60, hooks=[hook])
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.data.tags["estimator.run_id"] == id and run.info.status == "FINISHED" and run.info.run_name == "model"
    assert run.data.params["config/save_summary_steps"] == "10"
    assert any("MLflow keeps the first value of a param" in each for each in messages())  # save_checkpoints_steps

    def metric(key):
        return {each.step: each.value for each in client.get_metric_history(run.info.run_id, key)}

    losses = metric("loss")
    assert {step: losses[step] for step in read(model_dir)} == read(model_dir) and 91 in losses and 161 not in losses
    assert metric("eval/loss") == {
        step: row["loss"] for step, row in est.read_eval_metrics(estimator.eval_dir()).items()
    }
    assert list(metric("eval/loss")) == [100, 130, 160]
    assert metric("input/values/mean")[111] == pytest.approx(X.mean())
    images = client.list_artifacts(run.info.run_id, "images")
    assert len([each for each in images if each.path.endswith(".png")]) == 2 * 6

    with pytest.raises(RuntimeError):
        estimator.train(lambda: [(X * np.nan, X[:, :1])] * 3, hooks=[Fails(161)])
    assert client.get_run(run.info.run_id).info.status == "FAILED"
