"""Limits on the phases of a run: a process that hangs ends with the others, all name it, and the next run resumes."""

import re
import signal

import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.outcomes import merged, run

import estimator as est

TRAIN = "testing.scenarios.team_hangs.train"
STEPS = 10
LIMITS = {"begin": 10.0, "checkpoint": 6.0, "end": 6.0}  # in seconds; in other phases 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("limits")


def train(model_dir):
    """Trains where nothing hangs; returns the variables, the same in both processes."""
    one, other = (merged(rows)["values"] for rows in run(TRAIN, str(model_dir), None, None, STEPS, {}))
    assert one == other
    return one


HANGS = {  # where, who, the phase; one after the other, each in the run that resumes the one before
    "in training": [("input", 1, "input"), ("hook", 1, "hook"), ("collective", 0, "hook"), ("stopped", 1, "hook")],
    "at its ends": [("save", 0, "checkpoint"), ("restore", 1, "begin"), ("stopped", 0, "hook"), ("end", 1, "end")],
}


@pytest.fixture(scope="module")
def undisturbed(folder):
    return train(folder / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_a_process_that_hangs_ends_with_the_others_and_the_next_run_is_equal(folder, undisturbed, name):
    model_dir = str(folder / name)
    for where, who, phase in HANGS[name]:
        is_stopped = where == "stopped"
        kills = [(who, signal.SIGSTOP), (1 - who, None), (who, signal.SIGKILL)] if is_stopped else []
        limit = LIMITS.get(phase, 3.0)
        how = {"processes": 2, "moment": (who, "hangs"), "kills": kills, "within": limit + 30}
        ended = shared_cluster().end(TRAIN, model_dir, where, who, STEPS, {phase: limit}, **how)
        does = "does not answer" if is_stopped else "waits for no other"
        why = rf"process {who} \(host \S+, pid \d+\) {does}, and the limit of .* has passed"
        for index, process in enumerate(ended):
            lines = "\n".join([f"{where} in {who}:", *process.lines])
            if is_stopped and index == who:
                assert process.code == -signal.SIGKILL, lines
                continue
            assert process.code == 76, lines
            assert re.search(rf"^initialize_distributed: {why}\. It ends with exit code 76\.$", lines, re.M), lines
            report = lines[re.search(rf"{why}\.$", lines, re.M).start() :]
            assert re.search(rf"^Process {index} on \S+: For the last \d+\.\d s it is in phase '{phase}'", report, re.M)
            assert "Thread 'MainThread' (the run), most recent call last:" in report
        assert saved_at(model_dir)[-1] == (STEPS if where == "end" else 4)
    assert train(model_dir) == undisturbed


@pytest.mark.slow
def test_processes_that_wait_hardly_ask_the_service(folder):
    """Each request costs both sides some 60 context switches; polling made 30 of them per second."""
    for (said,) in run("testing.scenarios.team_hangs.wait", str(folder / "waits"), 6):
        assert said["calls"] < 20


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "30m", True])
def test_a_limit_is_a_positive_number_of_seconds(value):
    text = f"`step` of Limits should be a positive number of seconds, or None for no limit; got {value!r}."
    with pytest.raises(ValueError, match=re.escape(text)):
        est.Limits(step=value)


def test_limits_of_a_run_are_limits():
    text = "`limits` should be an `est.Limits`, say `RunConfig(limits=est.Limits(step=600))`, or None; got 30."
    with pytest.raises(ValueError, match=re.escape(text)):
        est.RunConfig(limits=30)
    assert est.RunConfig(limits=None).limits is None


def test_a_phase_has_its_own_limit_and_a_slow_step_ten_times_as_long():
    limits = est.Limits(input=60, step=100, end=None)
    assert [limits.secs(phase, 30.0) for phase in ("input", "step", "end", "output")] == [60, 300, *[float("inf")] * 2]
    assert limits.secs("step", 5.0) == 100 and limits.shortest() == 60
    assert est.Limits(*[None] * 7).shortest() == float("inf")
