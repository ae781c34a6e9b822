"""Training runs of several processes that resume, in as many processes or others, and their errors."""

import os
import re
import shutil

import numpy as np
import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.outcomes import merged, run, said_by
from testing.scenarios import team_lives as team

from estimator.storage._sealed_folder import SealedFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lives")


@pytest.fixture(scope="module")
def whole(folder):
    """What one process, with as many devices as two, has after 8 steps that nobody cut off."""
    estimator = team.make(str(folder / "whole"), save_checkpoints_steps=4)
    estimator.train(lambda: team.Source(), max_steps=8)
    return estimator.get_variable_value("*"), estimator.evaluate(lambda: team.Source(), steps=3)


def train(model_dir, steps, processes):
    """Trains in processes, which all have the same results; returns these, and the positions where they resumed."""
    rows = [
        merged(rows) for rows in run("testing.scenarios.team_lives.train", str(model_dir), steps, processes=processes)
    ]
    assert all(each["values"] == rows[0]["values"] and each["metrics"] == rows[0]["metrics"] for each in rows)
    return (rows[0]["values"], rows[0]["metrics"]), [each.get("position") for each in rows]


def assert_same(values, want, rtol=2e-5):
    for one, other in zip(values, want, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=rtol, atol=0.1 * rtol, err_msg=name)


@pytest.mark.usefixtures("users_compiler")
def test_a_checkpoint_is_read_by_any_number_of_processes(folder, whole, messages):
    """Two made it; two, three and one resume: by the positions of their inputs, or by the number of batches."""
    reference, _ = train(folder / "reference", 8, 2)
    assert_same(reference, whole)
    for other in ("two", "three", "one"):
        copy_of_step_4(folder / "reference", folder / other)
    two, positions = train(folder / "two", 8, 2)
    assert_same(two, reference, rtol=0)
    assert positions == [{"process": 0, "i": 4}, {"process": 1, "i": 4}]
    three, positions = train(folder / "three", 8, 3)
    assert_same(three, whole)
    assert positions == [None] * 3
    one = team.make(str(folder / "one"))
    one.train(lambda: team.Source(), max_steps=8)
    assert_same([one.get_variable_value("*")], whole[:1])
    assert "The input resumes after its first 4 batches." in messages()


def copy_of_step_4(model_dir, other):
    shutil.copytree(model_dir, other, ignore=shutil.ignore_patterns("ckpt-8"))


def test_two_processes_resume_what_one_has_saved(folder, whole):
    copy_of_step_4(folder / "whole", folder / "of one")
    values, _ = train(folder / "of one", 8, 2)
    assert_same(values, whole)


@pytest.mark.slow
def test_an_elastic_iterator_of_grain_resumes_in_any_number_of_processes_at_its_position(folder):
    """Four processes, then two, then three see each row once, and read no row of before again."""
    pytest.importorskip("grain")
    before = set()
    for processes, steps in ((4, 2), (2, 4), (3, 6)):
        args = "testing.scenarios.team_lives.train_elastic", str(folder / "elastic"), steps
        rows = [merged(rows) for rows in run(*args, processes=processes)]
        assert all(sum(each["seen"]) == steps * team.ELASTIC_ROWS and max(each["seen"]) == 1 for each in rows)
        given = [i for each in rows for i in each["given"]]
        assert not before & set(given)
        before |= {i for i, n in enumerate(rows[0]["seen"]) if n}
    assert len(before) == 6 * team.ELASTIC_ROWS


def test_a_watchdog_names_the_process_whose_input_stalls(folder):
    run("testing.scenarios.team_lives.stall", str(folder))
    for index in (0, 1):
        text = (folder / f"watchdog-{index}").read_text()
        for process, other in enumerate(("process 1.", "no other process here.")):
            what = "it waits for a batch of input_fn. It waits for " + other
            assert re.search(f"^Process {process} on .* {what}$", text, re.M), text


def test_copies_that_differ_are_reported_across_processes(folder):
    """It is raised in all, and nothing is saved."""
    for (values,) in run("testing.scenarios.team_lives.drift", str(folder)):
        text = "The copy of the variable 'w' on device cpu:2049 of process 1 differs from that on cpu:0 of process 0,"
        assert values["mismatch"].startswith(f"{text} at step 8.")
    assert saved_at(folder / "drifted") == [0]


def test_one_that_does_not_come_in_time_is_an_error_in_all(folder):
    values = [rows[0] for rows in run("testing.scenarios.team_lives.come_late", str(folder))]
    assert values[0]["error"] == "TimeoutError"
    assert values[0]["text"].startswith(
        "Process 0 waited for process 1 for 3 s, in: train(steps=None, max_steps=None)."
    )
    assert values[1]["error"] == "RuntimeError"
    assert values[1]["text"].startswith(
        "Process 0 failed in `train(steps=None, max_steps=None)`: TimeoutError: Process 0"
    )


# Threads that write a checkpoint, all parts of it or none.


def test_training_continues_while_processes_write(tmp_path):
    """Nobody sees the checkpoint before the last of them has written its part."""
    for rows in run("testing.scenarios.team_saves.train_while_it_writes", str(tmp_path)):
        assert merged(rows) == {"seen": [[0]], "at_the_end": [0, 2, 4, 5], "threads": []}


@pytest.mark.parametrize(("who", "where"), [(1, "own"), (0, "for all")])
def test_a_write_that_fails_in_one_is_an_error_in_all(tmp_path, who, where):
    model_dir = tmp_path / "run"
    ended = shared_cluster().run("testing.scenarios.team_saves.fail", str(model_dir), who, where)
    assert all(any("ckpt-2 could not be written: " in line for line in each.lines) for each in ended)
    rows = [merged(rows) for rows in said_by(ended)]
    assert [each["threads"] for each in rows] == [[], []]
    assert [each["at"] for each in rows] == [4, 4]  # where it was to save again
    assert (rows[who]["error"][1], rows[who]["text"]) == ("OSError", "the disk is gone")
    assert rows[1 - who]["error"][1] == "RuntimeError"
    assert re.fullmatch(
        rf"Process {who} failed in `train\(steps=None, max_steps=8\).*`: OSError: the disk is gone",
        rows[1 - who]["text"],
    )
    assert saved_at(model_dir) == [0]
    left = [name for name in os.listdir(model_dir) if "unfinished" in name]
    assert all(SealedFolder(str(model_dir / name)).is_own() for name in left)  # the next save removes it
