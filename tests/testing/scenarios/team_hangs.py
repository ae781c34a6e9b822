"""Training runs of two processes in which one hangs, for `testing.cluster` to start."""

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
from testing.scenarios.team_lives import Source, tiny


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


def train(model_dir, where, who, max_steps, limits):
    """Trains; the process `who` hangs, unless it is None, `where`: in "input", "restore", "save", "hook", "end" or a
    "collective"; where it is "stopped", it waits for the signal."""
    start(heartbeat_timeout_secs=100.0)  # jax ends a process that does not hear of process 0 for so long

    def hang(here):
        if where == here and jax.process_index() == who:
            print("hangs", flush=True)
            threading.Event().wait()

    def before(method, here, is_so):
        def called(*args, **kwargs):
            if is_so(*args):
                hang(here)
            return method(*args, **kwargs)

        return called

    def in_input(i):
        if i == 6:
            hang("input")

    def in_hook(context):
        hang("hook")
        hang("stopped")
        if where == "collective" and jax.process_index() == who:
            print("hangs", flush=True)
            multihost_utils.process_allgather(np.float32(6))  # the other process does not take part

    Checkpoint.restore = before(Checkpoint.restore, "restore", lambda *args: True)
    Checkpoints.save = before(Checkpoints.save, "save", lambda self, state, *args: int(state.global_step) == 8)
    config = {"save_checkpoints_steps": 4, "resume_input": "count", "limits": est.Limits(**limits), "steps_per_loop": 1}
    estimator = make(model_dir, tiny, **config)
    hook = When(6, after_run=in_hook, end=lambda context: hang("end"))
    estimator.train(lambda: Source(in_input, positions=False), hooks=[hook], max_steps=max_steps)
    say(values={name: value.tolist() for name, value in estimator.get_variable_value("*").items()})
