"""Several processes that train together compute what one does with as many devices."""

import os

import helpers_team as team
import numpy as np
import pytest
from helpers_cluster import shared_cluster


def run(function, *args, processes=2, timeout=100):
    """Runs it in processes, all of which end well; returns what they printed."""
    ended = shared_cluster().run(f"helpers_team.{function}", *args, processes=processes, timeout=timeout)
    for i, process in enumerate(ended):
        assert process.code == 0, f"process {i} ended with {process.code}:\n" + "\n".join(process.lines)
    return [process.lines for process in ended]


def read(folder, processes, index, name):
    with np.load(os.path.join(folder, f"{name}-{processes}-{index}.npz")) as found:
        return dict(found)


def assert_law(folder, name, processes=2):
    """All processes have found what one has."""
    want = read(folder, 1, 0, name)
    for i in range(processes):
        found = read(folder, processes, i, name)
        assert found.keys() == want.keys()
        for key in want:
            np.testing.assert_allclose(found[key], want[key], rtol=2e-5, atol=2e-6, err_msg=f"{name}, process {i}: {key}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("law"))


def test_steps_of_two_processes_equal_those_of_one(folder):
    run("transformed", folder)
    team.transformed(folder)
    for name in ("mirrored", "sharded", "sum, accumulated", "scaled"):
        assert_law(folder, name)
