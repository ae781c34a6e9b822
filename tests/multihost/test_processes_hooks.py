"""Hooks of several processes: called at the same steps in all; what they log and write is there once."""

import os
import re

import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.outcomes import merged, said_by

import estimator as est


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("hooked"))


@pytest.fixture(scope="module")
def ended(folder):
    return shared_cluster().run("testing.scenarios.team_hooks.hooked", folder, processes=2, timeout=100)


@pytest.fixture(scope="module")
def found(ended):
    """What each process said, by name."""
    return [merged(rows) for rows in said_by(ended)]


def test_clocks_may_differ(found, folder):
    assert found[0]["clock"] == found[1]["clock"]
    assert len(found[0]["clock"]) > 2
    assert found[0]["ended"] == found[1]["ended"] == ["input", 40]
    assert found[0]["saved"] == found[1]["saved"]
    assert len(saved_at(os.path.join(folder, "secs"))) > 2


def test_all_stop_where_one_wants_to(found):
    for each in found:
        assert each["stopped"] == [["enough", 5], ["enough", 13], ["StopAtStepHook", 16]]
        assert each["timed"] == ["input", 300]
        assert each["ended_by_nan"] == "NaN loss"
        assert each["watched"] == found[0]["watched"]
        assert each["watched"][0] == "the loss" and each["watched"][1] < each["by_secs"][1] + 300
        assert each["shorter"] == ["input", each["watched"][1] + 6]
    assert found[0]["by_secs"] == found[1]["by_secs"]
    assert found[0]["by_secs"][0] == "StopAtSecsHook"


def test_process_0_alone_logs_and_has_the_hooks_of_the_chief(found, ended):
    assert found[0]["chief"] == 0
    assert "chief" not in found[1]
    told = [
        [line for line in process.lines if re.match(r"INFO:absl:(loss =|Loss for|Evaluation|Export|Warm)", line)]
        for process in ended
    ]
    assert len(told[0]) > 20
    assert told[1] == []


def test_what_is_written_is_there_once(folder, found):
    for name in ("secs", "stopped", "stopped/eval"):
        files = os.listdir(os.path.join(folder, name))
        assert sum("tfevents" in file for file in files) == 1
        steps = [row["step"] for row in est.read_history(os.path.join(folder, name))]
        assert steps == sorted(set(steps))
    assert os.listdir(os.path.join(folder, "exported")) == [os.path.basename(found[0]["exported"])]


def test_all_find_the_same(found):
    for name in ("in_memory", "evaluated", "exported", "warm", "moved"):
        assert found[0][name] == found[1][name]
    in_memory = found[0]["in_memory"]
    start = in_memory[0]["global_step"]
    assert [result["global_step"] - start for result in in_memory] == [0, 2, 3]
    assert in_memory[-1] == found[0]["evaluated"]
    assert found[0]["warm"] == ["b", "v", "w"]
