"""Training runs of several processes whose threads write checkpoints, for `testing.cluster` to start in each."""

import threading
import time

import jax

from estimator.checkpoint import _save
from estimator.storage._sealed_folder import SealedFolder
from testing.estimators import saved_at
from testing.hooks import AtSteps
from testing.scenarios.team import make, say, start
from testing.scenarios.team_lives import Source, Tell, tiny

SECS = 30


def before_commit(does):
    """Lets each process do something when its part is written, before it waits for the others."""
    wait = _save.Barrier.__call__

    def called(self, *, key, timeout_ms):
        does(key)
        wait(self, key=key, timeout_ms=timeout_ms)

    _save.Barrier.__call__ = called


def train_while_it_writes(model_dir):
    """The write of step 2 ends after step 4, in the last of the processes; says which checkpoints hooks see."""
    start()
    completes, seen = threading.Event(), []

    def hold(key):
        if "ckpt-2" in key and jax.process_index():
            assert completes.wait(SECS)

    def complete(context):
        seen.append(saved_at(model_dir))
        completes.set()

    before_commit(hold)
    hook = AtSteps({3: complete})
    make(model_dir, tiny, save_checkpoints_steps=2).train(lambda: Source(), max_steps=5, hooks=[hook])
    threads = [thread.name for thread in threading.enumerate() if "save" in thread.name]
    say(seen=seen, at_the_end=saved_at(model_dir), threads=threads)


def fail(model_dir, who, where):
    """The write of step 2 fails in a process: its own part, or what process 0 does for all."""
    start()

    def break_own(key):
        if "ckpt-2" in key and jax.process_index() == who:
            raise OSError("the disk is gone")

    def break_last(self, **kwargs):
        if self.path.endswith("ckpt-2"):
            raise OSError("the disk is gone")
        seal(self, **kwargs)

    if where == "own":
        before_commit(break_own)
    else:
        seal, SealedFolder.seal = SealedFolder.seal, break_last
    began = time.monotonic()
    try:
        make(model_dir, tiny, save_checkpoints_steps=2).train(lambda: Source(), max_steps=8, hooks=[Tell()])
    except Exception as error:
        say(error=type(error).__name__, text=str(error), secs=time.monotonic() - began)
    say(threads=[thread.name for thread in threading.enumerate() if "save" in thread.name])
