"""Training runs in odd circumstances: forked workers, no streams, no rights, other training runs."""

import itertools
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import logging

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.inputs._prefetch import Prefetcher
from testing.estimators import X, Y, endless, make, saved_at, times
from testing.hooks import At, When


def endless_training(model_dir, keep=2):
    """Saves every step, says when the first checkpoint is on disk, and ends with the signal that ends it."""

    def input_fn():
        yield X, Y
        while not saved_at(model_dir):
            time.sleep(0.01)
        print("blocked", flush=True)
        yield from itertools.repeat((X, Y))

    make(model_dir, save_checkpoints_steps=1, keep_checkpoint_max=keep).train(input_fn)


class State(NamedTuple):
    """What a checkpoint takes, of several kinds of leaves."""

    variables: Any
    slots: Any
    global_step: Any
    key: Any


def make_state(step=0):
    variables = {
        "w1": jnp.full((8, 2), step, jnp.float32),
        "scope/b": jnp.arange(3, dtype=jnp.bfloat16),
        "net": {"params": {"Dense_0": {"kernel": jnp.ones((2, 2)) * 3}}},
        "count": jnp.int32(step),
    }
    slots = {"adam": optax.adam(0.1).init(variables), "sgd": optax.sgd(0.1).init(variables)}
    return State(variables, slots, jnp.int32(step), jax.random.key(step))


def save_endlessly(directory, step):
    """Saves every step after this one, and keeps two."""
    checkpoints = Checkpoints(directory, 2)
    for each in itertools.count(step + 1):
        checkpoints.save(make_state(each))


def read_checkpoint(path, name):
    """Reads an array, without a warning, and says on how many devices there are."""
    warnings.simplefilter("error")
    print(jax.device_count(), Checkpoint(path).read(name).tolist())


def train_until_killed(model_dir, *trackers):
    """Is killed after step 150 by itself; a checkpoint is that of step 100."""
    os.environ.pop("WANDB_SERVICE", None)  # of the tests' process, which would hold the run after the kill
    os.chdir(os.path.dirname(model_dir))  # where MLflow makes a folder

    def kill(context):
        context.look()
        os.kill(os.getpid(), signal.SIGKILL)

    config = {"save_summary_steps": 10, "save_checkpoints_steps": 100, "save_checkpoints_async": False}
    trained = make(model_dir, trackers=[eval(each) for each in trackers], **config)
    trained.train(endless, hooks=[When(150, after_run=kill)])


def deep(features, labels, mode):
    """What XLA needs seconds to compile."""
    x = features
    for i in range(12):
        w = est.get_variable(f"w{i}", (2, 2))
        x = jnp.tanh(x @ w) + jnp.sin(x) * jnp.cos(x @ w.T)
    loss = est.losses.mean_squared_error(labels, x[:, :1])
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(1e-3)).minimize(loss))


def compile_long(model_dir):
    os.environ["XLA_FLAGS"] = ""
    jax.config.update("jax_enable_compilation_cache", False)  # a run before may have compiled it
    time.sleep(0.2)  # it has been said that the process has started
    try:
        print("blocked", flush=True)
        make(model_dir, deep).train(lambda: itertools.repeat((X, Y)))
    except KeyboardInterrupt:
        print("caught", flush=True)
        raise


def fork_while_saving(model_dir):
    """Forks while the first checkpoint is written, which lasts until the child has ended."""
    estimator, finalize, has_ended = make(model_dir), ocp.PyTreeCheckpointHandler.finalize, threading.Event()

    def fork():
        pid = os.fork()
        if not pid:
            print("in the child:", estimator.latest_checkpoint(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        has_ended.set()

    def finalize_later(self, directory):
        assert has_ended.wait(30)
        finalize(self, directory)

    ocp.PyTreeCheckpointHandler.finalize = finalize_later
    estimator.train(times(2), hooks=[At(1, fork)])


def evaluate_in_fork(model_dir):
    estimator = make(model_dir).train(times(1))
    pid = os.fork()
    if not pid:
        try:
            estimator.evaluate(times(1))
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)


def orphan_in_training(model_dir):
    """Forks a child, which outlives the training."""

    def input_fn():
        yield X, Y
        if not os.fork():
            print("blocked", flush=True)
            time.sleep(20)
            os._exit(0)
        time.sleep(60)

    make(model_dir, steps_per_loop=1).train(input_fn)


def without_streams(model_dir):
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None
    make(model_dir).train(times(3)).evaluate(times(2))
    with open(os.path.join(model_dir, "streams"), "w") as file:
        file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))


def evaluate_without_rights(model_dir):
    """Trains, and then has no right to write there; what is imported on the way may not be readable then."""
    estimator = make(model_dir).train(times(3))
    list(estimator.predict(lambda: X))
    make(os.path.join(model_dir, "other")).evaluate(times(1))
    for directory, _, _ in os.walk(model_dir):
        os.chmod(directory, 0o555)
    if os.geteuid() == 0:
        os.setuid(65534)
    estimator = make(model_dir)
    print("step", estimator.evaluate(times(1))["global_step"], flush=True)
    print("rows", len(list(estimator.predict(lambda: X))), flush=True)
    try:
        estimator.train(times(1))
    except OSError as error:
        print(type(error).__name__, error, flush=True)


def stall(model_dir):
    """The input never comes on, which the watchdog ends."""

    def input_fn():
        yield X, Y
        print("hangs", flush=True)
        threading.Event().wait()

    make(model_dir, steps_per_loop=1).train(input_fn, hooks=[est.WatchdogHook(1, action="end")])


def wait_for_input():
    """With handlers of its own, for an input that blocks."""

    def stop(*_):
        raise KeyboardInterrupt

    def input():
        print("blocked", flush=True)
        time.sleep(60)
        yield X

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    logging.set_verbosity(logging.ERROR)
    try:
        with Prefetcher(input(), list) as ready:
            ready.request(1)
            ready.get()
    except KeyboardInterrupt:
        print("interrupted", threading.active_count())


def count_cache_hits(directory):
    """Says how many programs of a training are found in a compilation cache."""
    hits = []
    jax.config.update("jax_compilation_cache_dir", None)  # that of the tests
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
    jnp.ones(3) + 1  # a program before the Estimator does not matter
    make(None, compilation_cache_dir=directory).train(times(1))
    print(sum(hits))
