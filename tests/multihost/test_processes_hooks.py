"""Hooks of several processes: called at the same steps in all; what they log and write is there once."""

import csv
import os
import re

import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.outcomes import merged, said_by
from testing.summaries import scalars, steps_of

import estimator as est


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("hooked"))


@pytest.fixture(scope="module")
def ended(folder):
    return shared_cluster().run("testing.scenarios.team_hooks.hooked", folder)


@pytest.fixture(scope="module")
def values(ended):
    """What each process said, by name."""
    return [merged(rows) for rows in said_by(ended)]


def test_clocks_may_differ(values, folder):
    assert values[0]["clock"] == values[1]["clock"]
    assert len(values[0]["clock"]) > 2
    assert values[0]["ended"] == values[1]["ended"] == ["input", 30]
    assert values[0]["saved"] == values[1]["saved"]
    assert len(saved_at(os.path.join(folder, "secs"))) > 2


def test_all_stop_where_one_wants_to(values):
    for each in values:
        assert each["stopped"] == [["enough", 5], ["enough", 13], ["StopAtStepHook", 16]]
        assert each["timed"] == ["input", 300]
        assert each["ended_by_nan"] == "NaN loss"
        assert each["watched"] == values[0]["watched"]
        assert each["watched"][0] == "the loss" and each["watched"][1] < each["by_secs"][1] + 300
        assert each["shorter"] == ["input", each["watched"][1] + 6]
    assert values[0]["by_secs"] == values[1]["by_secs"]
    assert values[0]["by_secs"][0] == "StopAtSecsHook"


def test_process_0_alone_logs_and_has_the_hooks_of_the_chief(values, ended):
    assert values[0]["chief"] == 0
    assert "chief" not in values[1]
    lines = [
        [line for line in process.lines if re.match(r"INFO:absl:(loss =|Loss for|Evaluation|Export|Warm)", line)]
        for process in ended
    ]
    assert len(lines[0]) > 20
    assert lines[1] == []
    where = re.compile(r"INFO:absl:\d towers, \d in each of 2 processes, here on cpu:[\d-]+, \d+ rows = \d x \d+; .*")
    first, *_ = filter(where.fullmatch, ended[0].lines)
    assert first.endswith("; variables mirrored; 40 trained numbers in 3 variables"), first
    assert not any(map(where.fullmatch, ended[1].lines))


def test_neither_a_start_nor_a_save_compiles_programs_beside_the_steps(ended):
    for process in ended:
        compiled = re.findall(r"Compiling jit\((\w+)\) with global shapes", "\n".join(process.lines))
        assert {"_init", "step"} <= set(compiled)
        assert not {"copy", "_has_nan"} & set(compiled)


def test_log_lines_name_the_process_whose_input_is_slow(ended, values):
    slowest = re.compile(r".* steps/sec, .*, process 1 slowest: \S+ s longer reading its input\)")
    lines = [line for line in ended[0].lines if "slowest" in line]
    assert any(map(slowest.fullmatch, lines)), lines
    assert values[0]["waited"] == values[1]["waited"]
    assert len(values[0]["waited"]) == 2 and min(values[0]["waited"]) > 0.03  # both wait for the slow one


def test_what_is_written_is_there_once(folder, values):
    for name in ("secs", "stopped", "stopped/eval"):
        directory = os.path.join(folder, name)
        for points in scalars(directory).values():
            written = steps_of(points)
            assert written == sorted(set(written))
        steps = [row["step"] for row in est.read_history(directory)]
        assert steps == sorted(set(steps))
    for name in ("stopped", "stopped/eval"):
        with open(os.path.join(folder, name, "metrics.csv"), newline="") as file:
            rows = [(int(row["step"]), float(row["value"])) for row in csv.DictReader(file) if row["tag"] == "loss"]
        assert rows == [(row["step"], row["loss"]) for row in est.read_history(os.path.join(folder, name))]
    assert os.listdir(os.path.join(folder, "exported")) == [os.path.basename(values[0]["exported"])]


def test_all_have_the_same_results(values):
    for name in ("in_memory", "evaluated", "exported", "warm", "moved"):
        assert values[0][name] == values[1][name]
    in_memory = values[0]["in_memory"]
    start = in_memory[0]["global_step"]
    assert [result["global_step"] - start for result in in_memory] == [0, 2, 3]
    assert in_memory[-1] == values[0]["evaluated"]
    assert values[0]["warm"] == ["b", "v", "w"]
