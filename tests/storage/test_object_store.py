"""A model_dir in an object store is used as a local one: tested on a server that speaks S3."""

import os
import signal

import numpy as np
import pytest
from testing.cluster import shared_cluster
from testing.estimators import refuse
from testing.object_store import ObjectStore, make_bucket
from testing.outcomes import run
from testing.scenarios import object_store as scenario
from testing.scenarios import team_lives
from testing.summaries import scalars

import estimator as est
from estimator import inspect
from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._checkpoints import CheckpointWriteError
from estimator.storage import _files, _folders
from estimator.storage._sealed_folder import MARK, MARK_TEXT
from estimator.summary import _event_writer

pytest.importorskip("moto.server", reason="needs the extra `test-all`")
s3fs = pytest.importorskip("s3fs", reason="needs the extra `s3`")


@pytest.fixture(scope="module")
def server():
    server = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


@pytest.fixture
def bucket(server):
    return make_bucket()


def steps(model_dir):
    return [each.step for each in est.checkpoints(model_dir)]


def values(estimator):
    return {name: value.tolist() for name, value in estimator.get_variable_value("*").items()}


def without_times(rows):
    return [{tag: row[tag] for tag in row if tag not in ("time", "input_wait") and "/sec" not in tag} for row in rows]


@pytest.mark.slow
def test_a_run_in_a_store_is_as_one_in_a_local_directory(bucket, tmp_path):
    def use(model_dir):
        for last in (10, 13):  # the second one resumes
            estimator = scenario.make(model_dir, keep_checkpoint_max=2).train(scenario.input_fn, max_steps=last)
        metrics = estimator.evaluate(scenario.eval_input_fn)
        other = scenario.make(model_dir)
        other.evaluate(scenario.eval_input_fn, checkpoint_path=os.path.join(model_dir, "ckpt-10"), name="older")
        assert estimator.latest_checkpoint() == os.path.join(model_dir, "ckpt-13")
        assert est.plot_history(model_dir) == os.path.join(model_dir, "history.png")
        return {
            "steps": steps(model_dir),
            "values": values(other),
            "metrics": metrics,
            "history": without_times(est.read_history(model_dir)),
            "evaluations": est.read_eval_metrics(other.eval_dir()) | est.read_eval_metrics(other.eval_dir("older")),
            "predictions": [row["y"].tolist() for row in other.predict(lambda: [scenario.X])],
        }

    assert use(f"{bucket}/run") == use(str(tmp_path / "run"))
    _folders.download(f"{bucket}/run", str(tmp_path / "downloaded"), _files.files_in(f"{bucket}/run"))
    assert scalars(tmp_path / "downloaded")["loss"] == scalars(tmp_path / "run")["loss"]
    assert values(scenario.make(str(tmp_path / "downloaded"))) == values(scenario.make(f"{bucket}/run"))


@pytest.mark.slow
def test_exports_and_warm_starts_from_a_store(bucket):
    trained = scenario.make(f"{bucket}/run").train(scenario.input_fn, max_steps=10)
    predicted = [row["y"] for row in trained.predict(lambda: [scenario.X])]
    first, second = (trained.export_model(f"{bucket}/models", scenario.X) for _ in range(2))
    assert first < second and est.load_exported(f"{bucket}/models").path == second
    np.testing.assert_allclose(est.load_exported(first)(scenario.X)["y"], predicted, rtol=1e-6)
    for source in (f"{bucket}/run", f"{bucket}/run/ckpt-10", first, f"{bucket}/models"):
        warm = est.Estimator(scenario.model_fn, f"{bucket}/new", warm_start_from=source)
        started = [row["y"] for row in warm.predict(lambda: [scenario.X])]
        np.testing.assert_array_equal(started, predicted)
    _files.remove(f"{second}/checksums.json")  # as where its upload was cut off
    assert est.load_exported(f"{bucket}/models").path == first
    _files.write(f"{first}/weights.npz", b"")
    with pytest.raises(ValueError, match=f"The exported model at {first} is damaged: weights.npz has 0 bytes"):
        est.load_exported(first)


@pytest.mark.slow
def test_an_evaluator_reads_what_training_writes_and_removes(bucket):
    shared_cluster().start("testing.scenarios.object_store.evaluate", f"{bucket}/run", processes=1)
    trainer = scenario.make(f"{bucket}/run", save_checkpoints_steps=10, keep_checkpoint_max=1)
    trainer.train(scenario.input_fn, max_steps=scenario.STEPS)
    (ended,) = shared_cluster().ended()
    recorded = est.read_eval_metrics(trainer.eval_dir())
    loss = trainer.evaluate(scenario.eval_input_fn, name="again")["loss"]
    assert ended.code == 0 and f"evaluated {scenario.STEPS} {loss}" in ended.lines
    assert recorded[scenario.STEPS]["loss"] == loss
    assert set(recorded) <= {*range(0, scenario.STEPS + 1, 10)}


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_uploads_resumes_to_the_same_bits(bucket, tmp_path):
    cluster, train = shared_cluster(), "testing.scenarios.object_store.train"
    killed, whole = f"{bucket}/killed", str(tmp_path / "whole")
    viewer, last_file = scenario.make(killed), "ckpt-20/commit_success.txt"
    assert cluster.end(train, killed, last_file, moment=(0, "uploading"))[0].code == -signal.SIGKILL
    assert steps(killed) == [0, 10]
    for each in est.checkpoints(killed):
        assert Checkpoint(each.path).read_all(["*"])
    assert viewer.latest_checkpoint() == f"{killed}/ckpt-10"
    assert cluster.run(train, killed, processes=1)[0].code == 0
    scenario.train(whole)
    assert values(viewer) == values(scenario.make(whole))
    assert steps(killed) == steps(whole)
    rows = est.read_history(killed)
    assert [row["step"] for row in rows] == [row["step"] for row in est.read_history(whole)]


def test_what_a_killed_run_has_not_finished_is_no_checkpoint_and_is_removed_by_the_next(bucket):
    url = f"{bucket}/run"
    _files.write(f"{url}/ckpt-7/d/0123", b"a part")
    _files.write(f"{url}/ckpt-7/{MARK}", MARK_TEXT)
    _files.write(f"{url}/ckpt-999/notes", b"mine")
    assert scenario.make(url).latest_checkpoint() is None and est.checkpoints(url) == []
    with pytest.raises(NotACheckpointError, match=f"{url}/ckpt-7 is not a checkpoint"):
        scenario.make(url).evaluate(scenario.eval_input_fn, checkpoint_path=f"{url}/ckpt-7")
    scenario.make(url).train(scenario.input_fn, max_steps=1)
    assert steps(url) == [0, 1] and "ckpt-7" not in _files.list_dir(url)
    assert _files.read(f"{url}/ckpt-999/notes") == b"mine"


@pytest.mark.slow
def test_early_stopping_with_the_best_restored_and_exporters(bucket, tmp_path):
    def use(model_dir):
        estimator = scenario.make(model_dir, keep_checkpoint_max=1, save_checkpoints_steps=20)
        hook = est.stop_if_no_increase_hook(estimator, "loss", max_evals_without_increase=1, restore_best=True)
        exporter = est.LatestExporter("latest", scenario.X, exports_to_keep=1)
        eval_spec = est.EvalSpec(scenario.eval_input_fn, throttle_secs=0, exporters=exporter)
        train_spec = est.TrainSpec(scenario.input_fn, max_steps=40, hooks=[hook])
        metrics, exports = est.train_and_evaluate(estimator, train_spec, eval_spec)
        infos = [(each.step, each.pinned) for each in est.checkpoints(model_dir)]
        outputs = est.load_exported(exports[0])(scenario.X)["y"].tolist()
        assert len(_files.list_dir(os.path.dirname(exports[0]))) == 2  # it, and the record of its evaluation
        return metrics, values(estimator), infos, outputs

    remote = use(f"{bucket}/run")
    assert remote == use(str(tmp_path / "run"))
    assert remote[0]["global_step"] == 40 and remote[2] == [(20, True), (40, False)]


@pytest.mark.slow
def test_two_processes_resume_in_a_store_what_one_has_saved(bucket, tmp_path):
    """Each has a part of the variables."""
    alone, url = scenario.sharded(str(tmp_path / "alone")), f"{bucket}/run"
    for estimator, steps_of_one in ((alone, 8), (scenario.sharded(url), 4)):
        estimator.train(lambda: team_lives.Source(), max_steps=steps_of_one)
    (one,), (other,) = run("testing.scenarios.object_store.train_sharded", url, 8)
    assert one == other and one["cut"]
    for name, value in alone.get_variable_value("*").items():
        np.testing.assert_allclose(one["values"][name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    assert steps(url) == [0, 4, 8]
    assert values(scenario.sharded(url)) == one["values"]


def test_a_checkpoint_that_cannot_be_uploaded_is_an_error_and_the_newest_stays(bucket, monkeypatch):
    put_file = s3fs.S3FileSystem._put_file

    async def deny_one(self, lpath, rpath, *args, **kwargs):
        if "ckpt-10/" in rpath:
            raise PermissionError("Access Denied")
        return await put_file(self, lpath, rpath, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", deny_one)
    url = f"{bucket}/run"
    with pytest.raises(CheckpointWriteError) as error:
        scenario.make(url).train(scenario.input_fn, max_steps=20)
    assert f"The checkpoint of step 10 could not be written to {url}/ckpt-10: PermissionError: Access Denied" in str(
        error.value
    )
    assert f"The newest checkpoint is {url}/ckpt-0." in str(error.value)
    assert steps(url) == [0]


def test_a_bucket_that_is_not_there_is_an_error_before_training(bucket):
    url = f"{bucket}-of-nobody/run"
    with pytest.raises(OSError) as error:
        scenario.make(url).train(refuse)
    assert str(error.value) == (
        f"Training cannot write its checkpoints into model_dir {url!r} (The specified bucket does not exist). Choose a "
        "directory that can be created and written; evaluation and prediction only read. Look for the bucket and for "
        "your credentials."
    )


def test_an_evaluation_that_may_not_write_does_without(bucket, monkeypatch, messages):
    async def deny(self, lpath, rpath, *args, **kwargs):
        raise PermissionError("Access Denied")

    estimator = scenario.make(f"{bucket}/run").train(scenario.input_fn, max_steps=1)
    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", deny)
    monkeypatch.setattr(_event_writer, "_LAST_TRIES", (0.0, 0.0))
    assert estimator.evaluate(scenario.eval_input_fn)["global_step"] == 1
    missing = f"The summaries of the steps 1 to 1 are missing in {bucket}/run/eval: Access Denied"
    assert missing in messages()


def test_a_checkpoint_removed_while_it_is_read_is_an_error(bucket):
    url = f"{bucket}/run"
    scenario.make(url).train(scenario.input_fn, max_steps=1)
    newest = f"{url}/ckpt-1"
    with pytest.raises(NotACheckpointError), Checkpoint(newest).hold():
        Checkpoint(newest).remove()


def test_only_the_arrays_that_are_needed_are_downloaded(bucket, monkeypatch):
    get_file, names = s3fs.S3FileSystem._get_file, []

    async def note(self, rpath, lpath, *args, **kwargs):
        names.append(rpath.partition("/ckpt-1/")[2])
        return await get_file(self, rpath, lpath, *args, **kwargs)

    scenario.make(f"{bucket}/run").train(scenario.input_fn, max_steps=1)
    monkeypatch.setattr(s3fs.S3FileSystem, "_get_file", note)
    scenario.make(f"{bucket}/run").evaluate(scenario.eval_input_fn)
    chunks = sorted(name for name in names if name.rpartition("/")[2].replace(".", "").isdigit())
    wanted = [f"arrays/{name}" for name in ("global_step/0", "key/0", "variables/b/0", "variables/w/0.0")]
    assert chunks == wanted and len(names) == len(set(names))


def test_pins_are_seen_by_others(bucket):
    url = f"{bucket}/run"
    scenario.make(url, save_checkpoints_steps=1).train(scenario.input_fn, max_steps=2)
    Checkpoint(f"{url}/ckpt-1").pin()
    assert [each.pinned for each in est.checkpoints(url)] == [False, True, False]
    scenario.make(url, keep_checkpoint_max=1).train(scenario.input_fn, max_steps=3)
    assert steps(url) == [1, 3]
    Checkpoint(f"{url}/ckpt-1").unpin()
    assert [each.pinned for each in est.checkpoints(url)] == [False, False]


def test_the_command_inspects_a_store(bucket, capsys):
    url = f"{bucket}/run"
    scenario.make(url).train(scenario.input_fn, max_steps=10)
    inspect.main([f"{url}/"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "0", "10"]
    inspect.main([f"{url}/ckpt-10", "--variables"])
    assert f"{url}/ckpt-10\n" in capsys.readouterr().out
    inspect.main([url, "--diff", "0", "10"])
    assert "w                  [4, 1]  float32" in capsys.readouterr().out


def test_hooks_write_into_a_store(bucket):
    url = f"{bucket}/run"
    hooks = [
        est.StepCounterHook(every_n_steps=1, output_dir=f"{url}/counter"),
        est.ProfilerHook(save_steps=3, num_steps=1, output_dir=f"{url}/traces"),
        est.WatchdogHook(100.0),
        est.SummarySaverHook(save_steps=1, output_dir=f"{url}/mine/"),
    ]
    scenario.make(url).train(scenario.input_fn, hooks, max_steps=3)
    assert [row["step"] for row in est.read_history(f"{url}/mine")] == [1, 2, 3]
    assert any("tfevents" in name for name in _files.list_dir(f"{url}/counter"))
    assert any(name.endswith(".xplane.pb") for name in _files.files_in(f"{url}/traces"))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_replaced(bucket, errors):
    url = f"{bucket}/run"
    scenario.make(url).train(scenario.input_fn, max_steps=10)
    for name in ("_CHECKPOINT_METADATA", "arrays/variables/w/0.0"):
        contents = _files.read(f"{url}/ckpt-10/{name}")
        _files.write(f"{url}/ckpt-10/{name}", contents[:-1] + bytes([contents[-1] ^ 1]))
        assert scenario.make(url).evaluate(scenario.eval_input_fn)["global_step"] == 0
        scenario.make(url).train(scenario.input_fn, max_steps=10)
        assert f"The checkpoint {url}/ckpt-10 is damaged: {name} does not have" in errors()[-1]
    assert len(errors()) == 2
    assert scenario.make(url).evaluate(scenario.eval_input_fn)["global_step"] == 10
