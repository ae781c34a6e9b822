"""Training runs of several processes in which some hang, wait or get signals, for `testing.cluster` to start."""

import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.multihost import _coordination_client, _process_watch, _supervisor
from estimator.multihost._coordination_client import coordination_client
from testing.hooks import When
from testing.scenarios.team import make, say, start
from testing.scenarios.team_lives import Source, Tell, tiny
from testing.scenarios.team_saves import before_commit

STEPS, SAVE_EVERY = 28, 4


def train(model_dir, does=(), max_steps=STEPS, group=None, config=None):
    """Trains, and says where the variables are then.

    Args:
      does: lists of a process, or None for each; a moment; and what it does then. Moments are "begin", when it calls
        input_fn; "input", before each batch, or "input 6"; "restore"; "save", of the step 8; "write", of its part of a
        checkpoint; "hook", after the step 6; "end", of the run; and "after" all. It sleeps a number of seconds, does
        "hang", makes an "allgather" without the others, or gets the signal "SIGTERM", say.
      group: the options of its start.
      config: fields of the RunConfig.
    """
    start(**(group or {}))
    me = jax.process_index()

    def act(*moments):
        for what in (what for who, moment, what in does if who in (None, me) and moment in moments):
            if isinstance(what, str) and what.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[what])
            elif isinstance(what, str):
                print("hangs", flush=True)
                # The other process does not take part.
                multihost_utils.process_allgather(np.float32(6)) if what == "allgather" else threading.Event().wait()
            else:
                time.sleep(what)

    def before(method, moment, is_so=lambda *args: True):
        def called(*args, **kwargs):
            if is_so(*args):
                act(moment)
            return method(*args, **kwargs)

        return called

    Checkpoint.restore = before(Checkpoint.restore, "restore")
    Checkpoints.save = before(Checkpoints.save, "save", lambda self, state, *args: int(state.global_step) == 8)
    before_commit(lambda key: act("write") if "async_write_complete" in key else None)
    settings = {"save_checkpoints_steps": SAVE_EVERY, "resume_input": "count", "steps_per_loop": 1} | (config or {})
    limits = est.Limits(**settings.pop("limits", {}))
    estimator = make(model_dir, tiny, limits=limits, **settings)

    def input_fn():
        act("begin")
        return Source(lambda i: act("input", f"input {i}"), positions=False)

    hooks = [Tell(), When(6, after_run=lambda context: act("hook"), end=lambda context: act("end"))]
    try:
        estimator.train(input_fn, hooks=hooks, max_steps=max_steps)
    except (est.Preempted, KeyboardInterrupt):
        act("after")
        raise
    say(values={name: value.tolist() for name, value in estimator.get_variable_value("*").items()})
    act("after")
    sys.exit(0)


def evaluate_until_terminated(model_dir):
    """One gets a signal while all evaluate during a training run."""
    start()

    def wait(i):
        if i == 2:
            print("evaluating", flush=True)
        time.sleep(0.1)

    estimator = make(model_dir, tiny, save_checkpoints_steps=1000)
    train_spec = est.TrainSpec(lambda: Source(lambda i: time.sleep(0.05)), 40, hooks=[Tell()])
    est.train_and_evaluate(estimator, train_spec, est.EvalSpec(lambda: Source(wait)), eval_every_steps=5)


class Counted:
    """The client of jax's coordination service, which counts its calls."""

    calls = 0

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        Counted.calls += 1
        return getattr(self._client, name)


def wait(model_dir, secs):
    """The input of process 1 takes long for a batch; says how often each process asks the service meanwhile."""
    start()
    for module in (_coordination_client, _process_watch, _supervisor):  # and what calls `connected_client`
        module.coordination_client = lambda: Counted(coordination_client())

    def in_input(i):
        if i == 6:
            time.sleep(1)  # in which the news of before are looked at
            before = Counted.calls
            if jax.process_index():
                time.sleep(secs - 1)
            else:
                threading.Timer(secs - 1, lambda: say(calls=Counted.calls - before)).start()
                return
            say(calls=Counted.calls - before)

    make(model_dir, tiny, steps_per_loop=1).train(lambda: Source(in_input), max_steps=8)
