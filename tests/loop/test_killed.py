"""A training run that is killed again and again ends like one that was not."""

import contextlib
import os
import random
import re
import signal
import time

import numpy as np
import pytest
from testing.estimators import saved_at, values
from testing.processes import Processes
from testing.scenarios import killed_training

import estimator as est

KILLS = 5  # of each training
WITHIN_WRITES = "numpy_input_fn"  # the training that is killed while it writes checkpoints; others at random points
COMPILES_ALL = "grain's MapDataset"  # the one whose undisturbed run does not use the programs of the others


def kill_at_random(processes, name, model_dir, when):
    processes.start("train", name, model_dir)
    for _ in range(when.randrange(1, 6)):
        assert processes.read().startswith("step ")
    time.sleep(when.uniform(0, 0.03))
    processes.send(signal.SIGKILL)
    assert processes.ended() == -signal.SIGKILL


def unfinished(model_dir):
    """Each directory that is being written, or was when its process was killed."""
    directories = set()
    for each in os.scandir(model_dir) if os.path.isdir(model_dir) else ():
        if re.fullmatch(r"ckpt-\d+\.unfinished", each.name):
            with contextlib.suppress(FileNotFoundError):
                directories.add((each.name, os.stat(each.path).st_ino, os.stat(each.path).st_ctime_ns))
    return directories


def kill_within_a_write(processes, name, model_dir, saves_first):
    """Kills a training while it writes its first checkpoint or, if it `saves_first`, a later one."""
    left = unfinished(model_dir)
    while not unfinished(model_dir) - left:  # again, if it was done with the write in the meantime
        before = saved_at(model_dir)
        processes.start("train_with_slow_disk", name, model_dir)
        while (saves_first and saved_at(model_dir)[-1:] == before[-1:]) or not unfinished(model_dir) - left:
            assert processes.is_alive(), "the training ended before it was seen within a write"
            time.sleep(0.002)
        processes.send(signal.SIGKILL)
        assert processes.ended() == -signal.SIGKILL


def killed_again_and_again(name, base):
    """Kills a training run, each time in the process that resumes it, and returns its end."""
    when = random.Random(name)
    processes = Processes("testing.scenarios.killed_training")
    try:
        killed = str(base / "killed")
        viewer = killed_training.make(name, killed)
        for turn in range(KILLS):
            before = viewer.latest_checkpoint()
            if name == WITHIN_WRITES:
                kill_within_a_write(processes, name, killed, saves_first=turn % 2 == 0)
            else:
                kill_at_random(processes, name, killed, when)
            assert before is None or viewer.latest_checkpoint() is not None
            if steps := saved_at(killed):
                assert viewer.get_variable_value("global_step") == steps[-1]
        for where in ("killed", "whole"):
            processes.start("train", name, str(base / where), where == "whole" and name == COMPILES_ALL)
            while not (line := processes.read()).startswith("remembered"):
                assert line.startswith("step ")
            assert line.split()[1:] == [str(step) for step in range(10, killed_training.STEPS + 1, 10)]
            assert processes.ended() == 0
    finally:
        processes.close()
    return values(viewer), values(killed_training.make(name, base / "whole"))


class Asking(est.Hook):
    """Asks for a value at some steps, each of which is then a program of its own."""

    def __init__(self, *steps):
        self.steps = steps

    def next_step(self, step):
        return next((s for s in self.steps if s > step), None)

    def before_run(self, context):
        return ["largest", "loss"]


@pytest.mark.slow
@pytest.mark.covers("1.3 auto-resume")
@pytest.mark.parametrize(("towers", "steps_per_loop", "stops"), [(1, "auto", [17, 30]), (2, "0.1s", [30])])
@pytest.mark.usefixtures("users_compiler")
def test_the_bits_do_not_depend_on_where_a_run_is_cut_nor_on_what_hooks_ask_for(
    tmp_path, towers, steps_per_loop, stops
):
    def run(steps_per_loop, stops, *names):
        for last in stops:
            estimator = killed_training.make_with(
                tmp_path / str(names), towers, "adam", steps_per_loop=steps_per_loop, save_summary_steps=None
            )
            estimator.train(killed_training.arrays, hooks=[Asking(*names)], max_steps=last)
        return values(estimator)

    whole, other = run(7, [30]), run(steps_per_loop, stops, 1, 11, 21)
    assert [key for key in whole if other[key].tobytes() != whole[key].tobytes()] == []


@pytest.mark.covers("1.3 auto-resume")
@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize("name", killed_training.RUNS)
def test_trainings_killed_at_twenty_points_are_those_that_were_not(tmp_path, name):
    assert len(killed_training.RUNS) * KILLS == 20 and {COMPILES_ALL, WITHIN_WRITES} < killed_training.RUNS.keys()
    killed, whole = killed_again_and_again(name, tmp_path)
    assert killed.keys() == whole.keys() and len(killed) > 5
    assert whole["global_step"] == killed_training.STEPS
    seen = whole["seen"]
    assert len(np.unique(seen)) == killed_training.ROWS and len(np.unique(seen, axis=0)) > 200
    assert [key for key in whole if killed[key].tobytes() != whole[key].tobytes()] == []
    left = [x for x in os.listdir(tmp_path / "killed") if not re.match(r"ckpt-\d+$|events\.|history", x)]
    assert left == []
