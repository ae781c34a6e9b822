"""Several processes that train together compute what one does with as many devices."""

import os

import helpers_team as team
import numpy as np
import pytest
from helpers_cluster import shared_cluster


def run(function, *args, processes=2, timeout=100):
    """Runs it in processes, all of which end well; returns what they printed."""
    return checked(shared_cluster().run(f"helpers_team.{function}", *args, processes=processes, timeout=timeout))


def checked(ended):
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
            np.testing.assert_allclose(
                found[key], want[key], rtol=2e-5, atol=2e-6, err_msg=f"{name}, process {i}: {key}"
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("law"))


def run_both(function, folder):
    """Runs it in two processes, and meanwhile alone."""
    shared_cluster().start(f"helpers_team.{function}", folder, processes=2, timeout=100)
    getattr(team, function)(folder)
    return checked(shared_cluster().ended())


def test_steps_of_two_processes_equal_those_of_one(folder):
    run_both("transformed", folder)
    for name in ("mirrored", "sharded", "accumulated", "skipped"):
        assert_law(folder, name)
    assert read(folder, 1, 0, "skipped")["['skipped']"] == 1


def test_estimators_of_two_processes_do_what_one_does(folder):
    run_both("estimated", folder)
    for name in ("mirrored-1", "sharded-4", "mirrored-auto"):
        assert_law(folder, name)
        if name != "sharded-4":
            assert_law(folder, f"{name}-recorded")
    for name in ("mirrored-1", "sharded-4"):
        assert_law(folder, f"{name}-eval")
        of_all = read(folder, 1, 0, f"{name}-predictions")
        rows = sum((list(zip(*columns(read(folder, 2, i, f"{name}-predictions")), strict=True)) for i in range(2)), [])
        assert len(rows) == sum(map(sum, team.SPLITS))
        want = {tuple(x): output for x, output in zip(*columns(of_all), strict=True)}
        assert {tuple(x) for x, _ in rows} == want.keys()
        for x, output in rows:
            np.testing.assert_allclose(output, want[tuple(x)], rtol=2e-5, atol=2e-6)


def columns(found):
    """Features and outputs of predicted examples."""
    return [[found[f"[{i}]['{key}']"] for i in range(len(found) // 2)] for key in ("x", "output")]
