"""Processes that lose one of them: what the others do, and that none waits for ever."""

import os
import re
import signal
import threading

import jax
import pytest
from testing.cluster import shared_cluster

from estimator.multihost import _liveness
from estimator.multihost._runtime import RUNTIME

WORK = "testing.scenarios.distributed.work"
LATE = "; this process still waits for it after 1 s. It ends with exit code 76."
AGAIN = ". Start all processes again: training resumes from the last checkpoint."


def pid_of(cluster, index, what="pid"):
    (line,) = [line for line in cluster.lines(index) if line.startswith(what + " ")]
    return int(line.split()[1])


def assert_names(ended, loss):
    """By an error of Python, or where a collective cannot be interrupted by its own exit code; with one line."""
    if ended.code == 76:
        assert f"initialize_distributed: {loss}{LATE}" in ended.lines
    else:
        assert ended.code == 1
        assert ended.lines[-1] == f"estimator.multihost._liveness.ProcessLostError: {loss}{AGAIN}"
    assert not any("Check failure stack trace" in line for line in ended.lines)


def loss_of(ended, index):
    """What is said of a process that has died."""
    (pid,) = [line.split()[1] for line in ended[index].lines if line.startswith("pid ")]
    return f"process {index} (host {os.uname().nodename}, pid {pid})"


@pytest.mark.parametrize(("victim", "way"), [(0, "kill"), (1, "fork")])
def test_one_that_is_killed_is_named_by_the_other(victim, way):
    ended = shared_cluster().run(WORK, victim, way)
    assert ended[victim].code == -signal.SIGKILL
    assert_names(ended[1 - victim], loss_of(ended, victim) + " has died: its connection closed")
    assert "the copy ends" not in ended[victim].lines  # one that holds its connection does not hide its death
    assert ended[1 - victim].secs - ended[victim].secs < 20


def test_an_error_of_one_is_named_by_the_other():
    ended = shared_cluster().run(WORK, 1, "raise")
    assert ended[1].code == 1
    assert ended[1].lines[-2:] == ["ValueError: no such file", "in the folder"]
    assert_names(ended[0], loss_of(ended, 1) + " ended with ValueError: no such file")


def test_a_loss_is_seen_from_python_and_can_be_caught():
    cluster = shared_cluster()
    cluster.start(WORK, 0, "poll")
    cluster.wait_for(0, "working")
    cluster.kill(0)
    ended = cluster.ended()
    loss = loss_of(ended, 0) + " has died: its connection closed"
    assert ended[0].code == -signal.SIGKILL
    assert f"lost: {loss}" in ended[1].lines
    assert f"caught: {loss}{AGAIN} from JaxRuntimeError('closed by peer')" in ended[1].lines
    # The error of jax that leaves the process is explained there.
    assert (ended[1].code, ended[1].lines[-1]) == (1, f"estimator.multihost._liveness.ProcessLostError: {loss}{AGAIN}")


def test_one_that_is_silent_counts_as_dead_and_ends_when_it_wakes():
    cluster = shared_cluster()
    cluster.start(WORK, -1, "stop", 1.0, 2.0)
    cluster.wait_for(1, "working")
    cluster.kill(1, signal.SIGSTOP)
    cluster.wait_for_end(0)
    cluster.kill(1, signal.SIGCONT)
    ended = cluster.ended()
    loss = loss_of(ended, 1) + " has died, or its host has: nothing was heard of it for 2 s"
    assert_names(ended[0], loss)
    assert ended[1].code == 76 and any(loss in line for line in ended[1].lines)


def test_the_end_of_the_host_of_process_0_is_named():
    """The hub ends with its host; where the host only falls silent, as when its power fails, nothing is closed."""
    cluster = shared_cluster()
    for number, what in ((signal.SIGKILL, "has died, and its hub: the connection closed"), (signal.SIGSTOP, "for 2 s")):
        cluster.start(WORK, -1, "", 1.0, 2.0)
        cluster.wait_for(1, "working")
        hub = pid_of(cluster, 0, "hub")
        os.kill(hub, number)
        ended = cluster.ended()
        if number == signal.SIGSTOP:
            os.kill(hub, signal.SIGKILL)
        assert [process.code for process in ended] == [76, 76]
        for process in ended:
            assert any(re.search(rf"process 0 \(host \S+, pid \d+\) .*{what}", line) for line in process.lines)


def test_an_error_stays_as_it_is_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(RUNTIME, "is_watched", False)
    error = ValueError("no")
    assert _liveness.explained(error) is error
    assert RUNTIME.loss is None


def test_what_is_no_error_of_jax_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(RUNTIME, "is_watched", True)
    error = ValueError("no")
    assert _liveness.explained(error, wait_secs=60) is error


def test_one_that_has_ended_before_explains_an_error_of_jax(monkeypatch):
    monkeypatch.setattr(RUNTIME, "is_watched", True)
    monkeypatch.setattr(RUNTIME, "ended", "process 1 (host b, pid 4711)")
    monkeypatch.setattr(RUNTIME, "loss_known", threading.Event())
    error = jax.errors.JaxRuntimeError("closed by peer")
    explanation = _liveness.explained(error, wait_secs=0.01)
    assert str(explanation) == f"process 1 (host b, pid 4711) has ended before this one{AGAIN}"
    assert explanation.__cause__ is error
    assert _liveness.explained(ValueError("no"), wait_secs=0.01).args == ("no",)
