"""Trackers get what TensorBoard gets: the interface, by the one that needs no other package."""

import csv
import dataclasses
import errno
import json
import os
import pkgutil
import re
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from testing.cluster import shared_cluster
from testing.estimators import X, Y, endless, make, times
from testing.hooks import When
from testing.summaries import read, scalars, showing, steps_of

import estimator as est
from estimator.integrations import _in_background
from estimator.summary._trackers import Run


def rows(directory):
    with open(os.path.join(directory, "metrics.csv"), newline="") as file:
        return [(int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]


def losses(directory):
    return {step: value for step, tag, value in rows(directory) if tag == "loss"}


def with_params(features, labels, mode, params):
    assert params["rate"] == 0.5
    return showing(features, labels, mode)


class Memory:
    """A tracker that keeps what it gets."""

    def __init__(self, fails=()):
        self.runs, self.values, self.errors, self.fails = [], [], [], fails

    def open(self, run):
        self.runs.append(run)
        return self._Writer(self, run.name)

    class _Writer:
        def __init__(self, memory, name):
            self.memory, self.name = memory, name

        def write(self, step, walltime, values):
            if step in self.memory.fails:
                raise ConnectionError(f"no network at step {step}")
            self.memory.values.append((self.name, step, dict(values)))

        def flush(self):
            self.memory.values.append((self.name, None, "flush"))

        def close(self, error=None):
            self.memory.errors.append((self.name, error))


def test_a_tracker_gets_what_the_event_file_gets_and_the_settings(tmp_path):
    memory = Memory()
    params = {"rate": 0.5, "layers": [1, 2], "inner": {"f": len, "num_tokens": 3}}
    params |= {"db_password": "a", "stores": [{"API_KEY": "b", "url": "s3://c"}], "inner2": {"auth-token": b"d"}}
    estimator = make(tmp_path, with_params, params, save_summary_steps=5, trackers=[memory])
    estimator.train(endless, steps=11)
    results = estimator.evaluate(times(1), name="test")
    training, evaluation = memory.runs
    assert (training.name, training.prefix, training.first, training.directory) == ("", "", 1, str(tmp_path))
    assert (evaluation.name, evaluation.prefix) == ("eval_test", "eval_test/")
    assert (evaluation.first, evaluation.last, evaluation.directory) == (11, 11, estimator.eval_dir("test"))
    assert training.id == evaluation.id == (tmp_path / "run_id.txt").read_text()
    settings = training.settings
    assert settings["config/save_summary_steps"] == 5 and "config/trackers" not in settings
    assert (settings["params/rate"], settings["params/layers"]) == (0.5, [1, 2])
    assert (settings["params/inner/f"], settings["params/inner/num_tokens"]) == ("<built-in function len>", 3)
    hidden = {"params/db_password", "params/stores/0/API_KEY", "params/inner2/auth-token"}
    assert {name for name, value in settings.items() if value == "***"} == hidden
    assert settings["params/stores/0/url"] == "s3://c"
    of_training = {step: values for name, step, values in memory.values if not name and step}
    assert {step: values["loss"] for step, values in of_training.items()} == read(tmp_path)
    values = of_training[1]
    assert isinstance(values["input/values"], est.trackers.Histogram)
    images = values["input/rows"]
    assert images.dtype == np.uint8 and images.shape == (2, 1, 2, 1)
    (_, step, metrics), *_ = [each for each in memory.values if each[0] == "eval_test"]
    assert step == 11 and metrics["label"] == results["label"] and metrics["checkpoint_path"].endswith("ckpt-11")
    assert ("", None, "flush") in memory.values
    assert memory.errors == [("", None), ("eval_test", None)]


def test_an_error_of_a_tracker_ends_no_run_and_is_in_the_log(tmp_path, errors):
    memory, other = Memory(fails=(2, 3)), Memory()
    make(tmp_path, save_summary_steps=1, trackers=[memory, other]).train(endless, steps=4)
    assert [step for _, step, values in memory.values if values != "flush"] == [1, 4]
    assert [step for _, step, values in other.values if values != "flush"] == [1, 2, 3, 4]
    assert errors() == [
        "Memory.write failed: ConnectionError('no network at step 2'). The run continues, and tries again.",
        "Memory may lack values of the run, of the steps [2, 3]: ConnectionError('no network at step 3').",
    ]


def steps_in_mlflow(directory):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/m.db")
    (run,) = client.search_runs(["0"])
    return [each.step for each in client.get_metric_history(run.info.run_id, "loss")]


def steps_in_wandb(directory):
    from integrations.test_wandb import files, history

    (path,) = files(directory, (directory / "run_id.txt").read_text())
    return [row["global_step"] for row in history(path) if "loss" in row]


AWAY = {  # a tracker, what fails while its disk is full or its server away, and the steps that it has
    "memory": ("Memory()", "integrations.test_trackers.Memory._Writer.write", None),
    "csv": ("est.trackers.CsvTracker()", "estimator.integrations._csv._CsvWriter._append", losses),
    "wandb": ("est.trackers.WandbTracker(mode='offline')", "wandb.sdk.wandb_run.Run.log", steps_in_wandb),
    "mlflow": (
        "est.trackers.MLflowTracker(tracking_uri=f'sqlite:///{tmp_path}/m.db')",
        "mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore.log_batch",
        steps_in_mlflow,
    ),
}


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # in MLflow's own code
@pytest.mark.parametrize("kind", AWAY)
def test_a_tracker_that_cannot_write_for_a_while_ends_no_run_and_has_all_rows_at_its_end(
    tmp_path, monkeypatch, errors, kind
):
    new, place, steps = AWAY[kind]
    if kind != "memory":
        pytest.importorskip(place.partition(".")[0])
    write, away = pkgutil.resolve_name(place.rpartition(".")[0]), []
    original, tracker = getattr(write, place.rpartition(".")[2]), eval(new, globals() | {"tmp_path": tmp_path})

    def fail(*args, **kwargs):
        if away:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(write, original.__name__, fail)
    estimator = make(tmp_path, save_summary_steps=1, trackers=[tracker])
    hooks = [When(3, after_run=lambda _: away.append(1)), When(6, after_run=lambda _: away.clear())]
    estimator.train(endless, hooks=[*hooks, est.InMemoryEvaluatorHook(estimator, times(1), every_n_iter=2)], steps=8)
    written = [step for name, step, values in tracker.values if step and not name] if steps is None else steps(tmp_path)
    assert list(written) == list(range(1, 9))
    # The evaluation of step 4 has ended while nothing could be written, and says so.
    lacking = [each for each in errors() if "The run continues, and tries again." not in each]
    assert all(re.search(r"may lack values of the run(, of the steps \[4\])?: ", each) for each in lacking)
    assert len(lacking) <= 1


@pytest.mark.parametrize("answers_again", [True, False])
def test_a_server_that_does_not_answer_holds_no_run(tmp_path, monkeypatch, errors, answers_again):
    memory, answers = Memory(), threading.Event()

    class Served(Memory):
        def open(self, run):
            return _in_background.InBackground(lambda: memory.open(run))

    def set_secs(secs):  # short ones only while there is no answer, since a busy machine may be late with one
        monkeypatch.setattr(_in_background, "_SECS_TO_ANSWER", secs)

    set_secs(60)
    write = Memory._Writer.write
    monkeypatch.setattr(Memory._Writer, "write", lambda *args: (answers.wait(60), write(*args)))
    hooks = [When(1, after_run=lambda _: set_secs(0.2))]
    if answers_again:
        hooks.append(When(6, after_run=lambda _: (set_secs(60), answers.set())))
    estimator = make(tmp_path, save_summary_steps=1, save_checkpoints_steps=2, trackers=[Served()])
    estimator.train(endless, hooks=hooks, steps=8)
    failed = "Served.flush failed: TimeoutError('no answer within 0.2 s: the values of the steps {}"
    assert errors()[0].startswith(failed.format("1 to "))
    written = [step for _, step, _ in memory.values if step]
    if answers_again:
        assert written == list(range(1, 9)) and len(errors()) == 1
    else:
        assert not written and errors()[-1].startswith("Served may lack values of the run: TimeoutError('no answer")
    answers.set()


def test_an_evaluation_without_a_tracker_that_cannot_open_ends_no_training(tmp_path, errors):
    class Fills(Memory):
        def open(self, run):
            if run.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open(run)

    estimator = make(tmp_path, trackers=[Fills(), Memory()])
    metrics, _ = est.train_and_evaluate(estimator, est.TrainSpec(endless, max_steps=4), est.EvalSpec(times(1)), 2)
    assert metrics["global_step"] == 4 and list(est.read_eval_metrics(estimator.eval_dir())) == [2, 4]
    assert errors() == ["Fills.open failed: OSError(28, 'No space left on device'). eval continues without it."] * 2


def test_an_evaluation_of_a_folder_that_cannot_be_written_is_tracked_too(tmp_path, monkeypatch, errors):
    def refuse(path, contents):
        raise OSError(errno.EROFS, "Read-only file system", path)

    memory = Memory()
    estimator = make(tmp_path, trackers=[memory])
    make(tmp_path).train(endless, max_steps=2)
    monkeypatch.setattr("estimator.summary._trackers.write", refuse)
    assert estimator.evaluate(times(1))["global_step"] == 2 and len(memory.runs[0].id) == 32
    assert errors() == [
        f"The id of the run cannot be written ([Errno 30] Read-only file system: '{tmp_path}/run_id.txt'). Trackers "
        "see another run at the next start."
    ]


def test_the_error_that_ends_a_run_reaches_its_trackers(tmp_path):
    class Refuses:
        def open(self, run):
            raise ConnectionError("no login")

    memory = Memory()
    with pytest.raises(ConnectionError, match="no login") as raised:
        make(tmp_path, trackers=[memory, Refuses()]).train(endless, steps=4)
    assert memory.errors == [("", raised.value)] and not [step for _, step, _ in memory.values if step]


@pytest.mark.parametrize("given", [est.trackers.CsvTracker(), [est.trackers.CsvTracker], ["csv"], None])
def test_what_is_no_tracker_is_refused(given):
    with pytest.raises(ValueError, match=r"`trackers` should be a list of trackers, say `\[est.trackers.CsvTracker"):
        est.RunConfig(trackers=given)


def test_a_csv_file_has_the_numbers_the_histograms_and_the_images(tmp_path):
    config = {"save_summary_steps": 10, "trackers": [est.trackers.CsvTracker()]}
    estimator = make(tmp_path, with_params, {"rate": 0.5}, **config).train(endless, steps=21)
    found = {(step, tag): value for step, tag, value in rows(tmp_path)}
    assert losses(tmp_path) == read(tmp_path) and list(losses(tmp_path)) == [1, 11, 21]
    assert found[11, "brightness"] == X.mean()
    described = {part: found[11, f"input/values/{part}"] for part in ("count", "mean", "std", "min", "max")}
    assert described == pytest.approx({"count": 8, "mean": X.mean(), "std": X.std(), "min": 0, "max": 7}, rel=1e-5)
    image = np.asarray(Image.open(tmp_path / "images" / "input" / "rows" / "11_1.png"))
    np.testing.assert_array_equal(image, np.round(X[1:2] / 20 * 255))
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["params/rate"] == 0.5 and settings["config/seed"] == 0 and len(settings["id"]) == 32
    assert (21, "label", estimator.evaluate(times(1))["label"]) in rows(estimator.eval_dir())


ODD = ["accuracy@5", "größe %", "a//b", "/../up", ".", "a\r\nb", 'say "x", y', "back\\slash", "long" * 100, "x#", "x$"]
PARAMS = {"lr@0": 0.1, "text": "x" * 9000, "": None, "a/../b": [np.float32(1)], "inf": float("inf"), "ü" * 300: "\n"}


def odd_model_fn(features, labels, mode, params):
    """Reports a number, a histogram and an image under each odd name, and evaluates it."""
    for name in ODD:
        est.summary.scalar(name, features.mean())
    est.summary.histogram("h@1", features)
    est.summary.image("../i@1", features.reshape(-1, 1, 2, 1) / 20, 1)
    spec = showing(features, labels, mode)
    return dataclasses.replace(spec, eval_metric_ops={name: est.metrics.mean(labels) for name in ODD})


def train_with_odd_names(model_dir, tracker):
    """Trains two steps in two runs, each with an evaluation within."""
    for steps in (1, 2):
        estimator = make(model_dir, odd_model_fn, PARAMS, save_summary_steps=1, trackers=[tracker])
        hook = est.InMemoryEvaluatorHook(estimator, times(1), every_n_iter=1)
        estimator.train(endless, max_steps=steps, hooks=[hook])
    return estimator


def test_a_csv_file_has_numbers_of_any_name_and_all_files_are_in_its_folder(tmp_path, errors):
    estimator = train_with_odd_names(tmp_path / "in" / "model", est.trackers.CsvTracker())
    assert [path.name for path in tmp_path.iterdir()] == ["in"] and os.listdir(tmp_path / "in") == ["model"]
    found = [(step, tag) for step, tag, _ in rows(estimator.model_dir)]
    assert all(found.count((step, name)) == 1 for step in (1, 2) for name in ODD)
    assert {name for _, name, _ in rows(estimator.eval_dir())} >= {*ODD}
    assert (tmp_path / "in" / "model" / "images" / "_" / "i@1" / "2_0.png").exists()
    assert not errors()


def test_an_evaluation_that_is_repeated_is_in_the_csv_file_once(tmp_path):
    estimator = make(tmp_path, trackers=[est.trackers.CsvTracker()]).train(endless, steps=3)
    old = estimator.latest_checkpoint()
    estimator.evaluate(times(1))
    estimator.train(endless, steps=2).evaluate(times(1))
    estimator.evaluate(times(1, (X, 2 * Y)), checkpoint_path=old)
    expected = {step: values["loss"] for step, values in est.read_eval_metrics(estimator.eval_dir()).items()}
    assert len(expected) == 2 and losses(estimator.eval_dir()) == expected
    assert len(rows(estimator.eval_dir())) == 4


def open_csv(directory, first, last):
    return est.trackers.CsvTracker().open(Run("id", str(directory), "eval", first, last, {}))


def test_evaluations_at_once_lose_no_lines_of_a_csv_file(tmp_path):
    def evaluate(first):
        for step in [*range(first, 40, 4)] * 2:  # the second time the lines of the first are removed
            writer = open_csv(tmp_path, step, step)
            writer.write(step, 0.0, {"loss": step, "accuracy": 1.0})
            writer.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(evaluate, range(4)))
    assert sorted(rows(tmp_path / "eval")) == [
        (n, tag, x) for n in range(40) for tag, x in (("accuracy", 1), ("loss", n))
    ]
    assert sorted(os.listdir(tmp_path / "eval")) == ["metrics.csv", "settings.json"]


def test_a_csv_file_on_a_full_disk_has_no_torn_lines(tmp_path):
    writer, limits = open_csv(tmp_path, 1, 9), resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.write(1, 0.0, {"loss": 1.0})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(tmp_path / "eval" / "metrics.csv") + 5, limits[1]))
        with pytest.raises(OSError):
            writer.write(2, 0.0, {"loss": 2.0})
        assert losses(tmp_path / "eval") == {1: 1.0}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(2, 0.0, {"loss": 2.0})  # as it is called again with what it has not taken
    assert losses(tmp_path / "eval") == {1: 1.0, 2: 2.0}


def test_damaged_lines_of_a_csv_file_are_removed_and_said(tmp_path, messages):
    writer = open_csv(tmp_path, 1, 9)
    writer.write(1, 0.0, {"loss": 1.0})
    with open(tmp_path / "eval" / "metrics.csv", "ab") as file:
        file.write(b"\xff\xfe,1\r\nx,0.0,loss,2.0\r\n")
    open_csv(tmp_path, 2, 9).close()
    assert losses(tmp_path / "eval") == {1: 1.0}
    assert messages() == [f"{tmp_path}/eval/metrics.csv is damaged: 2 of its lines are removed."]


def kill(model_dir, tracker):
    """Trains until a kill at step 150, after a checkpoint at 100."""
    (ended,) = shared_cluster().run("testing.scenarios.lives.train_until_killed", model_dir, tracker, processes=1)
    assert ended.code == -signal.SIGKILL, ended.lines
    return (model_dir / "run_id.txt").read_text()


@pytest.mark.covers("4 SummarySaverHook")
def test_a_killed_run_has_written_up_to_its_checkpoint_and_resumes_its_summaries_and_its_csv_file(tmp_path):
    tracker = "est.trackers.CsvTracker()"
    id = kill(tmp_path, tracker)
    assert list(losses(tmp_path)) == list(range(1, 150, 10))
    known = list(read(tmp_path))
    assert known == list(range(1, known[-1] + 1, 10)) and known[-1] >= 91
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("151,17")  # torn, as by a crash of the machine
    make(tmp_path, save_summary_steps=10, trackers=[eval(tracker)]).train(endless, steps=60)
    assert [step for step, tag, _ in rows(tmp_path) if tag == "loss"] == list(range(1, 161, 10))
    assert losses(tmp_path) == read(tmp_path)
    assert list(read(tmp_path)) == list(range(1, 161, 10)) == steps_of(scalars(tmp_path)["loss"])
    assert json.loads((tmp_path / "settings.json").read_text())["id"] == id


def test_csv_files_are_local(tmp_path):
    url = f"memory://{tmp_path}/model"
    with pytest.raises(ValueError, match=r"CsvTracker appends to a local file; got the directory 'memory://.*model/"):
        make(url, trackers=[est.trackers.CsvTracker()]).train(endless, steps=1)
    make(url, trackers=[est.trackers.CsvTracker(tmp_path / "here")]).train(endless, steps=1)
    assert list(losses(tmp_path / "here")) == [1]


@pytest.mark.parametrize("values", [np.arange(-5.0, 6.0), np.zeros(3), np.array([1.0, np.inf]), np.array([np.nan])])
def test_a_histogram_in_bins_has_all_values(values):
    histogram = est.trackers.Histogram.of(jnp.asarray(values, jnp.float32))
    counts, edges = histogram.rebin(10)
    assert counts.sum() == len(values) == histogram.describe()["count"]
    assert len(edges) == 11 and np.isfinite(edges).all()
    if np.isfinite(values).all():
        assert edges[0] <= values.min() and edges[-1] >= values.max()


@pytest.mark.parametrize("library, name", [("wandb", "WandbTracker"), ("mlflow", "MLflowTracker")])
def test_without_its_library_a_tracker_says_what_to_install(monkeypatch, library, name):
    monkeypatch.setitem(sys.modules, library, None)
    want = rf"`est.trackers.{name}` needs the package {library}. Install it in .*: pip install -e '\.\[{library}\]'"
    with pytest.raises(ImportError, match=want):
        getattr(est.trackers, name)()
