"""Limits on the phases of a run: a process that hangs ends with the others, all name it, and the next run resumes."""

import re
import signal
import time

import pytest
from testing.cluster import shared_cluster
from testing.outcomes import merged, run

import estimator as est

TRAIN = "testing.scenarios.team_hangs.train"
STEPS = 10
LIMITS = {"begin": 10.0, "checkpoint": 6.0, "end": 6.0}  # in seconds; in other phases 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("limits")


def train(model_dir, steps=STEPS):
    """Trains where nothing hangs; returns the variables, the same in both processes."""
    one, other = (merged(rows)["values"] for rows in run(TRAIN, str(model_dir), None, None, steps, {}))
    assert one == other
    return one


@pytest.fixture(scope="module")
def undisturbed(folder):
    return train(folder / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "who", "phase"),
    [
        ("input", 1, "input"),
        ("restore", 1, "begin"),
        ("save", 0, "checkpoint"),
        ("hook", 1, "hook"),
        ("end", 1, "end"),
        ("collective", 0, "hook"),
        ("stopped", 1, "hook"),
        ("stopped", 0, "hook"),
    ],
)
def test_a_process_that_hangs_ends_with_the_others_and_the_next_run_is_equal(folder, undisturbed, where, who, phase):
    cluster, model_dir = shared_cluster(), str(folder / f"{where}-{who}")
    if where == "restore":
        train(model_dir, 4)
    cluster.start(TRAIN, model_dir, where, who, STEPS, {phase: LIMITS.get(phase, 3.0)})
    cluster.wait_for(who, "hangs")
    began = time.monotonic()
    if where == "stopped":
        cluster.kill(who, signal.SIGSTOP)
        cluster.wait_for_end(1 - who)
        cluster.kill(who)
    ended = cluster.ended()
    assert time.monotonic() - began < LIMITS.get(phase, 3.0) + 30
    does = "does not answer" if where == "stopped" else "waits for no other"
    why = rf"process {who} \(host \S+, pid \d+\) {does}, and the limit of .* has passed"
    for index, process in enumerate(ended):
        lines = "\n".join(process.lines)
        if where == "stopped" and index == who:
            assert process.code == -signal.SIGKILL
            continue
        assert process.code == 76, lines
        assert re.search(rf"^initialize_distributed: {why}\. It ends with exit code 76\.$", lines, re.M), lines
        report = lines[re.search(rf"{why}\.$", lines, re.M).start() :]
        assert re.search(rf"^Process {index} on \S+: For the last \d+\.\d s it is in phase '{phase}'", report, re.M)
        assert "Thread 'MainThread' (the run), most recent call last:" in report
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
