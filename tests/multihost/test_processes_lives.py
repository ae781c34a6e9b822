"""Training runs of several processes that are cut off and resume, in as many processes or others, and what hangs."""

import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.outcomes import merged, run, said
from testing.scenarios import team_lives as team

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint


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
    train(folder / "two", 4, 2)
    for other in ("three", "one"):
        shutil.copytree(folder / "two", folder / other)
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


def test_two_processes_resume_what_one_has_saved(folder, whole):
    team.make(str(folder / "of one")).train(lambda: team.Source(), max_steps=4)
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


def assert_whole_checkpoint(model_dir):
    """The newest one can be read, all of it; returns its step."""
    path = est.Estimator(est_model, model_dir).latest_checkpoint()
    assert Checkpoint(path).read_all(["*"])
    return Checkpoint(path).progress()[0]


def est_model(features, labels, mode):
    raise AssertionError("is not called")


def test_a_process_that_is_killed_ends_the_others_and_the_next_run_resumes(folder):
    """First process 1 is killed, then process 0; the third run comes to the end, with what an undisturbed one has."""
    cluster, model_dir = shared_cluster(), str(folder / "killed")
    for victim, step in ((1, 8), (0, 20)):
        cluster.start("testing.scenarios.team_lives.train_until_killed", model_dir, processes=2, timeout=60)
        cluster.wait_for(victim, f"step {step}", timeout=50)
        cluster.kill(victim)
        began = time.monotonic()
        ended = cluster.ended()
        assert time.monotonic() - began < 15
        assert ended[victim].code == -signal.SIGKILL
        other, lines = ended[1 - victim], "\n".join(ended[1 - victim].lines)
        if victim == 0:
            assert other.code == -signal.SIGABRT and "the leader task" in lines.lower(), lines
        else:
            assert other.code in (1, 76) and f"process {victim} (host " in lines and "has died" in lines, lines
            assert (other.code == 76) or "estimator.multihost._lost_process.ProcessLostError: process" in lines
        assert assert_whole_checkpoint(model_dir) >= step - 5
    run("testing.scenarios.team_lives.train_until_killed", model_dir)
    undisturbed = team.make(str(folder / "undisturbed"), team.tiny)
    undisturbed.train(lambda: team.Source(), max_steps=40)
    assert_same(*[[team.make(path).get_variable_value("*")] for path in (model_dir, undisturbed.model_dir)])


@pytest.mark.parametrize("who, blocked", [("all", None), ("one late", None), ("the other", 0)])
def test_sigterm_to_any_process_ends_all_with_a_checkpoint_of_the_same_step(folder, who, blocked):
    """Also where the input of one does not come on, or the signal comes to one after it has ended its training."""
    cluster, model_dir = shared_cluster(), str(folder / f"terminated {who}")
    cluster.start("testing.scenarios.team_lives.train_until_terminated", model_dir, blocked, processes=2, timeout=60)
    cluster.wait_for(*((1, "step 6") if blocked is None else (blocked, "blocked")), timeout=50)
    cluster.kill(1, signal.SIGTERM)
    if who == "one late":
        cluster.wait_for(0, "preempted", timeout=50)
    if who != "the other":
        cluster.kill(0, signal.SIGTERM)
    at = assert_preempted(model_dir)
    assert at >= (30 if blocked is not None else 6)


def test_sigterm_to_one_within_an_evaluation_ends_the_training_of_all(folder):
    cluster, model_dir = shared_cluster(), str(folder / "terminated evaluating")
    cluster.start("testing.scenarios.team_lives.evaluate_until_terminated", model_dir, processes=2, timeout=60)
    cluster.wait_for(1, "evaluating", timeout=50)
    cluster.kill(1, signal.SIGTERM)
    assert 5 <= assert_preempted(model_dir) < 10


def assert_preempted(model_dir):
    """The processes end soon, with a checkpoint of one step; returns that."""
    began = time.monotonic()
    ended = shared_cluster().ended()
    assert time.monotonic() - began < 10
    for process in ended:
        assert process.code == 75, "\n".join(process.lines)
    reports = [said(process.lines)[-1] for process in ended]
    assert reports[0] == reports[1]
    assert (reports[0]["ended"], reports[0]["error"]) == ("SIGTERM", "NoneType")
    assert saved_at(model_dir) == [0, reports[0]["at"]]
    return reports[0]["at"]


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


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_processes_may_end_at_different_times(folder, slow):
    ended = shared_cluster().run("testing.scenarios.team_lives.end", str(folder), slow, processes=3, timeout=60)
    for process in ended:
        assert process.code == 0, "\n".join(process.lines)
        assert not [line for line in process.lines if "rror" in line]
    assert saved_at(os.path.join(folder, f"end-{slow}")) == [0, 2]


def test_processes_may_disconnect_by_themselves_before_they_end():
    for process in shared_cluster().run("testing.scenarios.team_lives.disconnect", timeout=60):
        assert process.code == 0, "\n".join(process.lines)
        assert not [line for line in process.lines if "rror" in line]


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


def test_sigterm_before_the_first_step_ends_all(folder):
    ended = shared_cluster().run("testing.scenarios.team_lives.terminate_one", str(folder), processes=2, timeout=30)
    assert [process.code for process in ended] == [75, 75]
