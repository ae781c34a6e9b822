"""Training runs of several processes that are cut off and resume, in as many processes or others, and what hangs."""

import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at, unfinished
from testing.outcomes import merged, run, said, said_by
from testing.scenarios import team_lives as team
from testing.scenarios import team_saves

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.storage._sealed_folder import SealedFolder

KILL = "testing.scenarios.team_saves.train_until_killed"


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


KILLED = [  # who, after which step or within the write of a checkpoint; how the other may end
    (1, 10, {1, 76}),
    (0, 20, {-signal.SIGABRT}),
    (0, "write", {1, 76, -signal.SIGABRT}),
    (1, "write", {1, 76}),
]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_the_next_run_resumes(folder):
    """Each in the run that resumes the one before; the last run comes to the end, with the bits of an undisturbed."""
    cluster, model_dir, newest, when = shared_cluster(), str(folder / "killed"), 0, random.Random(0)
    for victim, at, codes in KILLED:
        before, within = unfinished(model_dir), set()
        cluster.start(KILL, model_dir, 0.15, victim if at == "write" else None)
        if at == "write":
            within = cluster.wait_until(lambda seen=before: unfinished(model_dir) - seen, "no checkpoint is written")
            time.sleep(when.uniform(0, 0.2))
        else:
            cluster.wait_for(victim, f"step {at}")
        cluster.kill(victim)
        began = time.monotonic()
        ended = cluster.ended()
        assert time.monotonic() - began < 30
        assert ended[victim].code == -signal.SIGKILL
        other, lines = ended[1 - victim], "\n".join(ended[1 - victim].lines)
        assert other.code in codes, lines
        if other.code == -signal.SIGABRT:
            assert "the leader task" in lines.lower(), lines
        else:
            assert f"process {victim} (host " in lines and "has died" in lines, lines
            assert (other.code == 76) or "estimator.multihost._supervisor.ProcessLostError: process" in lines
        assert not any(os.path.exists(os.path.join(model_dir, name.removesuffix(".unfinished"))) for name, *_ in within)
        last, newest = newest, saved_at(model_dir)[-1]
        assert Checkpoint(f"{model_dir}/ckpt-{newest}").read_all(["*"])["global_step"] == newest
        assert newest == last if within else newest >= at - 2 * team_saves.SAVE_EVERY
    rows = [merged(rows)["values"] for rows in (*run(KILL, model_dir), *run(KILL, str(folder / "undisturbed")))]
    assert all(row == rows[0] for row in rows)
    assert unfinished(model_dir) == set()


CODES = {signal.SIGTERM: 75, signal.SIGINT: -signal.SIGINT}  # with which they end
TERMINATED = {  # what runs, which process is waited for and who gets the signal then, and the step that may be saved
    "all": ("train_until_terminated", (None, None), (1, "step 6"), (1, 0), range(6, 60)),
    "one, the other after its training": ("train_until_terminated", (None, 0), (1, "step 6"), (1,), range(6, 60)),
    "one, where the other's input blocks": ("train_until_terminated", (0, None), (0, "blocked"), (1,), range(30, 60)),
    "one within an evaluation of all": ("evaluate_until_terminated", (), (1, "evaluating"), (1,), range(5, 10)),
}


@pytest.mark.parametrize(("number", "code"), CODES.items())
@pytest.mark.parametrize("case", TERMINATED)
def test_a_signal_to_any_process_ends_all_with_a_checkpoint_of_the_same_step(tmp_path, case, number, code):
    function, args, moment, who, steps = TERMINATED[case]
    scenario, kills = f"testing.scenarios.team_lives.{function}", [(index, number) for index in who]
    ended = shared_cluster().end(scenario, str(tmp_path), *args, processes=2, moment=moment, kills=kills)
    for process in ended:
        assert process.code == code, "\n".join(process.lines)
    report, other = (said(process.lines)[-1] for process in ended)
    assert report == other and report["at"] in steps
    assert (report["ended"], report["error"]) == (number.name, "NoneType")
    assert saved_at(tmp_path) == [0, report["at"]]


def test_a_process_that_is_to_stop_asks_who_lives_and_does_not_wait_for_heartbeats(tmp_path):
    """As under `srun --kill-on-bad-exit=1`, which kills it 30 s later: the other one, whose input blocks, has died."""
    cluster = shared_cluster()
    cluster.start("testing.scenarios.team_lives.train_until_terminated", str(tmp_path), 1, None, 600.0)
    cluster.wait_for(1, "blocked")
    cluster.kill(1)
    cluster.kill(0, signal.SIGTERM)
    ended, _ = cluster.ended()
    assert ended.code == 1
    lost = r"process 1 \(host .*, pid \d+\) has died, or its host has: it does not answer within 5 s\. Start all"
    assert re.match(rf"estimator\.multihost\._supervisor\.ProcessLostError: {lost}", ended.lines[-1])


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
    ended = shared_cluster().run("testing.scenarios.team_lives.end", str(folder), slow, processes=3)
    for process in ended:
        assert process.code == 0, "\n".join(process.lines)
        assert not [line for line in process.lines if re.search(r"\b[eE]rror|Error", line)]
    assert saved_at(os.path.join(folder, f"end-{slow}")) == [0, 2]


def test_processes_may_disconnect_by_themselves_before_they_end():
    for process in shared_cluster().run("testing.scenarios.team_lives.disconnect"):
        assert process.code == 0, "\n".join(process.lines)
        assert not [line for line in process.lines if re.search(r"\b[eE]rror|Error", line)]


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


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_a_signal_before_the_first_step_ends_all(folder, number, code):
    ended = shared_cluster().run("testing.scenarios.team_lives.terminate_one", str(folder), int(number))
    assert [process.code for process in ended] == [code, code]


# Threads that write a checkpoint, all parts of it or none.


def test_training_continues_while_processes_write(tmp_path):
    """Nobody sees the checkpoint before the last of them has written its part."""
    for rows in run("testing.scenarios.team_saves.train_while_it_writes", str(tmp_path)):
        assert merged(rows) == {"seen": [[0]], "at_the_end": [0, 2, 4, 5], "threads": []}


@pytest.mark.parametrize(("who", "where"), [(0, "own"), (1, "own"), (0, "for all")])
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
