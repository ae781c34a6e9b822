"""The supervisor of a process that loses another one; `test_deaths.py` has real ones."""

import re
import threading

import jax
import pytest

from estimator.multihost import _supervisor
from estimator.multihost._supervisor import Peers, ProcessLostError, Supervisor

AGAIN = ". Start all processes again: training resumes from the last checkpoint."
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
