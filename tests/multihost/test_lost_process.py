"""Processes that lose one of them: what the others do, and that none waits for ever."""

import os
import re
import signal
import threading

import jax
import pytest
from testing.cluster import shared_cluster

from estimator.multihost import _supervisor
from estimator.multihost._supervisor import Peers, ProcessLostError, Supervisor

WORK = "testing.scenarios.distributed.work"
LATE = "; this process still waits for it after 1 s. It ends with exit code 76."
SILENT = " has died, or its host has: nothing was heard of it for 2 s"
ERROR = " ended with ValueError: no such file"
AGAIN = ". Start all processes again: training resumes from the last checkpoint."


def assert_names(ended, loss):
    """By an error of Python, or where a collective cannot be interrupted by its own exit code; with one line."""
    if ended.code == 76:
        assert f"initialize_distributed: {loss}{LATE}" in ended.lines
    else:
        assert ended.code == 1
        assert ended.lines[-1] == f"estimator.multihost._supervisor.ProcessLostError: {loss}{AGAIN}"
    assert not any("Check failure stack trace" in line for line in ended.lines)


def loss_of(ended, index):
    """What is said of a process that has died."""
    (pid,) = [line.split()[1] for line in ended[index].lines if line.startswith("pid ")]
    return f"process {index} (host {os.uname().nodename}, pid {pid})"


DIES = {  # who, how, of how many; its exit code; what the others say of it, if jax lets them
    "killed": (1, "kill", 2, -signal.SIGKILL, SILENT),
    "killed, not a copy that holds its connection": (1, "fork", 2, -signal.SIGKILL, SILENT),
    "process 0 killed": (0, "kill", 3, -signal.SIGKILL, None),
    "an error": (1, "raise", 2, 1, ERROR),
    "an error of process 0": (0, "raise", 3, 1, ERROR),
}


@pytest.mark.parametrize("case", DIES)
def test_one_that_dies_is_named_by_the_others_which_end(case):
    victim, way, processes, code, loss = DIES[case]
    ended = shared_cluster().run(WORK, victim, way, processes=processes)
    assert ended[victim].code == code
    assert way != "raise" or ended[victim].lines[-2:] == ["ValueError: no such file", "in the folder"]
    assert "the copy ends" not in ended[victim].lines
    for other in (*ended[:victim], *ended[victim + 1 :]):
        assert other.secs - ended[victim].secs < 12  # the heartbeat's time and 10 seconds
        if loss is None:
            assert other.code == -signal.SIGABRT
            assert any("the leader task" in line.lower() for line in other.lines), other.lines
        else:
            assert_names(other, loss_of(ended, victim) + loss)


def test_a_loss_is_seen_from_python_and_can_be_caught():
    ended = shared_cluster().end(WORK, 1, "poll", processes=2, moment=(1, "working"), kills=[(1, signal.SIGKILL)])
    loss = loss_of(ended, 1) + SILENT
    assert ended[1].code == -signal.SIGKILL
    assert f"lost: {loss}" in ended[0].lines
    assert f"caught: {loss}{AGAIN} from JaxRuntimeError('closed by peer')" in ended[0].lines
    # The error of jax that leaves the process is explained there.
    assert (ended[0].code, ended[0].lines[-1]) == (
        1,
        f"estimator.multihost._supervisor.ProcessLostError: {loss}{AGAIN}",
    )


def test_one_that_is_stopped_counts_as_dead_and_ends_when_it_wakes():
    kills = [(2, signal.SIGSTOP), (1, None), (0, None), (2, signal.SIGCONT)]
    ended = shared_cluster().end(WORK, -1, "stop", processes=3, moment=(2, "working"), kills=kills)
    for process in ended[:2]:
        assert process.code == 76
        assert_names(process, loss_of(ended, 2) + SILENT)
    assert ended[2].code in (76, -signal.SIGABRT)  # it says so, or jax does first


LOSS = "process 1 (host b, pid 4711) ended with RuntimeError: The input of process 0"


@pytest.fixture
def watched():
    """As of a process that is watched, where no other has died yet."""
    return watch()


def watch(grace_secs=60.0, end_process=None, look=lambda supervisor: None):
    supervisor = Supervisor()
    supervisor.begin_watch(Peers(end_process, lambda: look(supervisor), (), grace_secs, grace_secs))
    return supervisor


def test_an_error_stays_as_it_is_where_nobody_watches():
    supervisor, error = Supervisor(), jax.errors.JaxRuntimeError("closed by peer")
    assert supervisor.explain(error) is error
    assert supervisor.loss is None


def test_an_error_of_jax_is_explained_by_who_does_not_answer():
    """And not only when the heartbeats have stopped."""
    asking = watch(look=lambda supervisor: supervisor.note_loss(LOSS))
    assert str(asking.explain(jax.errors.JaxRuntimeError("closed by peer"))) == f"{LOSS}{AGAIN}"


def test_an_error_that_is_not_of_jax_is_not_waited_for(watched):
    error = ValueError("no")
    assert watched.explain(error) is error


def test_one_that_has_ended_before_explains_an_error_of_jax(watched, monkeypatch):
    watched.last_ended = "process 1 (host b, pid 4711)"
    monkeypatch.setattr(_supervisor, "_SECS_AFTER_AN_END", 0.01)
    error = jax.errors.JaxRuntimeError("closed by peer")
    explanation = watched.explain(error)
    assert str(explanation) == f"process 1 (host b, pid 4711) has ended before this one{AGAIN}"
    assert explanation.__cause__ is error
    assert watched.explain(ValueError("no")).args == ("no",)


def test_an_own_error_stays_though_another_process_was_lost_by_it(watched):
    watched.note_loss(LOSS)
    own, saving = OSError("the disk is gone"), OSError("the checkpoint")
    assert watched.explain(own) is own
    saving.__cause__ = jax.errors.JaxRuntimeError("closed by peer")
    assert isinstance(watched.explain(saving), ProcessLostError)


LATE_END = f"{LOSS}; this process still waits for it after 0.2 s"


@pytest.mark.parametrize(
    ("what_happens", "reason"),
    [
        (["exit"], None),  # there is no loss that could hinder the exit
        (["loss"], LATE_END),
        (["loss", "raise"], None),
        (["raise", "loss"], None),
        (["loss", "raise", "exit"], LATE_END),
        (["exit", "loss"], LATE_END),
    ],
)
def test_a_process_that_waits_too_long_for_a_lost_one_is_ended(what_happens, reason):
    """A loss after the error of an early end does not lead back."""
    reasons, ended = [], threading.Event()

    def end(why):
        reasons.append(why)
        ended.set()
        threading.Event().wait()  # as a process that has ended, whose thread acts no more

    supervisor = watch(0.2, end)
    for event in what_happens:
        supervisor.note_loss(LOSS) if event == "loss" else getattr(supervisor, f"note_{event}")()
    assert ended.wait(60 if reason else 0.6) == bool(reason)
    assert reasons == ([reason] if reason else [])
    if "loss" not in what_happens:
        return supervisor.raise_if_lost(needs_all=True)
    with pytest.raises(ProcessLostError, match=re.escape(LOSS + AGAIN)):
        supervisor.raise_if_lost()
