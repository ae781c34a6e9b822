"""Summaries that cannot be written end no run: they are errors in the log, and the rest is there."""

import concurrent.futures
import errno
import os
import types

import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import make, saved_steps, times
from testing.signals import wait_until
from testing.summaries import scalars

import estimator as est
from estimator.storage._files import write as write_file
from estimator.storage._folders import WorkingFolder
from estimator.summary import _event_writer
from estimator.summary._event_writer import EventWriter


@pytest.fixture
def disk(monkeypatch):
    """Is full while its `is_full` says so: of each write it takes a half."""
    disk = types.SimpleNamespace(is_full=False)

    def append(file, data):
        file.write(data[: len(data) // 2] if disk.is_full else data)
        if disk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_event_writer, "_append", append)
    return disk


def test_what_a_full_disk_cannot_take_is_missing_and_the_rest_is_there(tmp_path, disk, errors):
    writer = EventWriter(str(tmp_path), 1)
    for step in range(1, 10):
        disk.is_full = 4 <= step <= 6
        writer.write(step, float(step), {"loss": 1.0 * step})
        writer.flush()
    writer.close()
    want = [(step, 1.0 * step) for step in (1, 2, 3, 7, 8, 9)]
    assert [(row["step"], row["loss"]) for row in est.read_history(tmp_path)] == want
    assert scalars(tmp_path) == {"loss": want}
    begins, ends = errors()
    assert begins == (
        f"The summaries of step 4 cannot be written to {tmp_path}: [Errno 28] No space left on device. The run "
        "continues, and tries again."
    )
    assert ends == f"The summaries of the steps 4 to 6 are missing in {tmp_path}: [Errno 28] No space left on device"


@pytest.mark.quick
def test_training_and_evaluation_continue_on_a_full_disk(tmp_path, disk, errors):
    disk.is_full = True
    estimator = make(tmp_path, save_summary_steps=1).train(times(5))
    assert saved_steps(estimator) == [0, 5]
    assert estimator.evaluate(times(1))["global_step"] == 5
    assert [str(tmp_path) in each and "No space left on device" in each for each in errors()] == [True] * 4
    assert not [name for name in os.listdir(tmp_path) if "tfevents" in name]


def test_a_store_that_is_away_gets_all_when_it_is_back(tmp_path, monkeypatch, caplog, errors):
    monkeypatch.setattr(_event_writer, "_UPLOAD_SECS", 0.0)
    monkeypatch.setattr(_event_writer, "_UPLOAD_SHARE", 0)
    monkeypatch.setattr(_event_writer, "_LAST_TRIES", (0.0, 0.0))
    upload, calls = WorkingFolder.upload, []

    def away(folder):
        calls.append(len(calls))
        if calls[-1] in failing:
            raise ConnectionError("Could not connect to the endpoint URL")
        upload(folder)

    monkeypatch.setattr(WorkingFolder, "upload", away)
    for name, last, missing in [("back", 5, 0), ("away", 99, 1)]:
        failing = range(1, last)
        calls.clear()
        caplog.clear()
        writer = EventWriter(f"memory://{tmp_path}/{name}", 1)
        for step in range(1, 6):
            writer.write(step, float(step), {"loss": 1.0 * step})
        writer.close()
        rows = est.read_history(f"memory://{tmp_path}/{name}")
        assert [row["step"] for row in rows] == ([1] if missing else [1, 2, 3, 4, 5])
        begins, *ends = errors()
        assert begins.startswith("The summaries of step 2 cannot be written to memory://")
        assert len(ends) == missing and all("steps 2 to 5 are missing in memory://" in each for each in ends)


@pytest.mark.slow
def test_what_is_written_is_in_the_files_soon_though_nothing_follows(tmp_path):
    writer = EventWriter(str(tmp_path), 1)
    for step in (1, 2, 3):
        writer.write(step, float(step), {"loss": 1.0 * step})
    wait_until(lambda: len(est.read_history(tmp_path)) == 3, secs=10)
    assert [row["step"] for row in est.read_history(tmp_path)] == [1, 2, 3]
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    writer.close()


@pytest.mark.parametrize("when", ["in the run", "at its end"])
def test_a_store_that_is_away_when_a_run_begins_gets_all_when_it_is_back(tmp_path, monkeypatch, errors, when):
    monkeypatch.setattr(_event_writer, "_UPLOAD_SECS", 0.0)
    monkeypatch.setattr(_event_writer, "_LAST_TRIES", (0.0, 0.0))
    url = f"memory://{tmp_path}/{when}"
    before = EventWriter(url, 1)
    for step in (1, 2):
        before.write(step, float(step), {"loss": 1.0 * step})
    before.close()
    init, calls = WorkingFolder.__init__, []

    def away(*args):
        calls.append(len(calls))
        if calls[-1] < (2 if when == "in the run" else 4):
            raise ConnectionError("Could not connect to the endpoint URL")
        init(*args)

    monkeypatch.setattr(WorkingFolder, "__init__", away)
    writer = EventWriter(url, 1, 1)  # an evaluation of step 1, after that of step 2
    for number in (3.0, 4.0, 5.0):
        writer.write(1, number, {"loss": number})
    writer.close()
    assert [(row["step"], row["loss"]) for row in est.read_history(url)] == [(1, 5.0), (2, 2.0)]
    (error,) = errors()
    assert error.startswith(f"The summaries of step 1 cannot be written to {url}: Could not connect to the endpoint")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "float64", "longdouble"])
def test_numbers_of_any_dtype_are_written(tmp_path, dtype):
    values = {"numpy": np.dtype(dtype).type(1), "array": np.ones((), dtype), "jax": jnp.ones((), jnp.bfloat16)}
    writer = EventWriter(str(tmp_path), 1)
    writer.write(1, 1.0, values | {"large": 2**70})
    writer.close()
    rows = [{"step": 1, "time": 1.0, "numpy": 1, "array": 1, "jax": 1, "large": 2**70}]
    assert est.read_history(tmp_path) == rows
    assert scalars(tmp_path) == {tag: [(1, 1.0)] for tag in values} | {"large": [(1, 2.0**70)]}


@pytest.mark.parametrize("value", [np.ones(3), np.complex64(1), None, {"a": 1}, np.array("a"), np.ones((1, 2, 2, 7))])
def test_another_value_is_an_error_at_the_call(tmp_path, value):
    with pytest.raises(
        TypeError, match=r"`context.events\(\).write` takes numbers, texts, and images .*; got for 'a': "
    ):
        EventWriter(str(tmp_path), 1).write(1, 1.0, {"a": value})


def test_a_file_is_replaced_by_several_writers_at_once(tmp_path):
    path = str(tmp_path / "file")
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: write_file(path, b"%d" % i), range(200)))
    assert os.listdir(tmp_path) == ["file"]
