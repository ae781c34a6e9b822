"""A training that is killed, again and again, is in the end the one that was not."""

import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import helpers_killed
import numpy as np
import pytest
from helpers_processes import Processes

KILLS = 5  # of each training


def values(estimator):
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def killed_again_and_again(name, base):
    """Kills a training at random points, each in the process that goes on with it, and returns what it became."""
    when = random.Random(name)
    processes = Processes("helpers_killed")
    killed = str(base / "killed"), str(base / "programs")
    try:
        viewer = helpers_killed.make(name, base / "killed")
        for _ in range(KILLS):
            before = viewer.latest_checkpoint()
            processes.start("train", name, *killed)
            for _ in range(when.randrange(1, 6)):
                assert processes.read().startswith("step ")
            time.sleep(when.uniform(0, 0.03))
            processes.send(signal.SIGKILL)
            assert processes.ended() == -signal.SIGKILL
            assert before is None or viewer.latest_checkpoint() is not None
        for run in (killed, [str(base / "whole")]):  # which compiles its own programs
            processes.start("train", name, *run)
            assert processes.ended() == 0
    finally:
        processes.close()
    return values(viewer), values(helpers_killed.make(name, base / "whole"))


@pytest.mark.slow
def test_trainings_killed_at_twenty_points_are_those_that_were_not(tmp_path):
    runs = list(helpers_killed.RUNS)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(killed_again_and_again, runs, [tmp_path / str(i) for i in range(len(runs))]))
    assert len(runs) * KILLS == 20
    for i, (name, (killed, whole)) in enumerate(zip(runs, outcomes, strict=True)):
        assert killed.keys() == whole.keys() and len(killed) > 5
        assert whole["global_step"] == helpers_killed.STEPS
        seen = whole["seen"]
        assert len(np.unique(seen)) == helpers_killed.ROWS and len(np.unique(seen, axis=0)) > 200
        differing = [key for key in whole if killed[key].tobytes() != whole[key].tobytes()]
        assert differing == [], name
        left = [x for x in os.listdir(tmp_path / str(i) / "killed") if not re.match(r"ckpt-\d+$|events\.|history", x)]
        assert left == []
