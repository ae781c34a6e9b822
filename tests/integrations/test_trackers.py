"""Trackers get what TensorBoard gets: the interface, by the one that needs no other package."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from testing.estimators import X, Y, endless, make, times
from testing.summaries import KILLED, read, showing

import estimator as est

ROOT = str(pathlib.Path(__file__).parents[2])


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
    params = {"rate": 0.5, "layers": [1, 2], "inner": {"f": len}}
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
    assert settings["params/inner/f"] == "<built-in function len>"
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


def test_an_error_of_a_tracker_ends_no_run_and_is_in_the_log(tmp_path, caplog):
    memory, other = Memory(fails=(2, 3)), Memory()
    make(tmp_path, save_summary_steps=1, trackers=[memory, other]).train(endless, steps=4)
    assert [step for _, step, values in memory.values if values != "flush"] == [1, 4]
    assert [step for _, step, values in other.values if values != "flush"] == [1, 2, 3, 4]
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == [
        "Memory.write failed: ConnectionError('no network at step 2'). The run continues, and tries again.",
        "Memory lacks values of the run: 2 of its calls failed, the last: ConnectionError('no network at step 3').",
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
    results = estimator.evaluate(times(1))
    assert (21, "label", results["label"]) in rows(estimator.eval_dir())


def test_an_evaluation_that_is_repeated_is_in_the_csv_file_once(tmp_path):
    estimator = make(tmp_path, trackers=[est.trackers.CsvTracker()]).train(endless, steps=3)
    old = estimator.latest_checkpoint()
    estimator.evaluate(times(1))
    estimator.train(endless, steps=2).evaluate(times(1))
    estimator.evaluate(times(1, (X, 2 * Y)), checkpoint_path=old)
    expected = {step: values["loss"] for step, values in est.read_eval_metrics(estimator.eval_dir()).items()}
    assert len(expected) == 2 and losses(estimator.eval_dir()) == expected
    assert len(rows(estimator.eval_dir())) == 4


def kill(model_dir, tracker):
    """Trains until a kill at step 150, after a checkpoint at 100."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([ROOT, f"{ROOT}/tests"])}
    command = [sys.executable, "-c", KILLED, str(model_dir), tracker]
    process = subprocess.run(command, env=environment, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    return (model_dir / "run_id.txt").read_text()


def test_a_run_that_is_killed_resumes_its_csv_file(tmp_path):
    tracker = "est.trackers.CsvTracker()"
    id = kill(tmp_path, tracker)
    assert list(losses(tmp_path)) == list(range(1, 150, 10))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("151,17")  # torn, as by a crash of the machine
    make(tmp_path, save_summary_steps=10, trackers=[eval(tracker)]).train(endless, steps=60)
    assert [step for step, tag, _ in rows(tmp_path) if tag == "loss"] == list(range(1, 161, 10))
    assert losses(tmp_path) == read(tmp_path)
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
    want = rf"`est.trackers.{name}` needs {library}. Install it: pip install 'replicate-model-fn\[{library}\]'"
    with pytest.raises(ImportError, match=want):
        getattr(est.trackers, name)()
