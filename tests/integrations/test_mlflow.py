"""Runs in MLflow, in a local store."""

import numpy as np
import pytest
from testing.estimators import X, endless, make, times
from testing.summaries import Fails, read, showing

import estimator as est

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

from integrations.test_trackers import kill, train_with_odd_names  # noqa: E402


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_names_and_values_of_any_kind_are_in_the_mlflow_run_which_is_nested_in_a_run_of_the_user(
    tmp_path, monkeypatch, caplog
):
    import mlflow

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with mlflow.start_run() as mine:
        train_with_odd_names(tmp_path / "model", est.trackers.MLflowTracker(tracking_uri=uri))
    client = mlflow.MlflowClient(uri)
    found = {run.info.run_id: run for run in client.search_runs(["0"])}
    assert found.pop(mine.info.run_id).data.metrics == {}
    (run,) = found.values()
    assert run.data.tags["mlflow.parentRunId"] == mine.info.run_id
    names = ["accuracy_5", "größe _", "a/_/b", "_/_/up", "_", "a__b", "say _x__ y", "back_slash", "x_", "x__"]
    assert {*names, *(f"eval/{name}" for name in names), "loss", "eval/loss", "h_1/mean"} <= run.data.metrics.keys()
    assert len([name for name in run.data.metrics if "longlong" in name]) == 2
    assert {each.step for each in client.get_metric_history(run.info.run_id, "loss")} == {1, 2}
    assert run.data.params["params/lr_0"] == "0.1" and len(run.data.params["params/text"]) == 6000
    messages = [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert not [text for text in messages if "keeps the first value" in text or "failed" in text or "lacks" in text]
    assert "MLflow takes no 'accuracy@5' as a name: there it is 'accuracy_5'." in messages
