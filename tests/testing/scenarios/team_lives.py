"""Training runs of several processes that are cut off, resume, or hang, for `testing.cluster` to start in each."""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from estimator.loop._train import Training
from estimator.multihost._coordination_client import coordination_client
from estimator.multihost._process_group import CALLS
from replicate import TowerOptimizer
from testing.scenarios.team import make, say, start

ROWS = 12  # of a batch: for 2, 4 and 6 towers
_RNG = np.random.default_rng(1)
X = _RNG.normal(size=(60, ROWS, 3)).astype(np.float32)
Y = np.sin(X.sum(2, keepdims=True))


def tiny(features, labels, mode):
    """What compiles in no time."""
    loss = jnp.mean((labels - features["x"] @ est.get_variable("w", (3, 1))) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1, momentum=0.9)).minimize(loss))


class Source:
    """The batches of this process; says where it is taken up."""

    def __init__(self, wait=lambda i: None, positions=True):
        context = est.input_context()
        self._rows = context.per_process_batch_size(ROWS)
        self._begin = context.index * self._rows
        self._wait = wait
        self._i = 0
        if positions:
            self.get_state, self.set_state = self._get_state, self._set_state

    def __iter__(self):
        return self

    def __next__(self):
        if self._i == len(X):
            raise StopIteration
        self._wait(self._i)
        rows = slice(self._begin, self._begin + self._rows)
        self._i += 1
        return {"x": X[self._i - 1, rows]}, Y[self._i - 1, rows]

    def _get_state(self):
        return {"process": est.input_context().index, "i": self._i}

    def _set_state(self, state):
        say(position=state)
        self._i = state["i"]


class Tell(est.Hook):
    """Prints the steps, and how the run ended."""

    def after_run(self, context, values):
        print("step", context.step, flush=True)

    def end(self, context):
        say(ended=context.stop_reason, at=context.global_step, error=type(context.error).__name__)


def train(model_dir, max_steps, every=4, name="values", **source):
    """Trains up to a step, and tells where the variables are then."""
    start()
    estimator = make(model_dir, save_checkpoints_steps=every, resume_input="position")
    estimator.train(lambda: Source(**source), max_steps=max_steps)
    metrics = estimator.evaluate(lambda: Source(), steps=3)
    values = {name: value.tolist() for name, value in estimator.get_variable_value("*").items()}
    say(**{name: values, "metrics": metrics})


ELASTIC_ROWS = 24  # of a batch: for 2, 3 and 4 processes of two towers


def counts_rows(features, labels, mode):
    """Counts in "seen" how often it has seen each row."""
    w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    est.get_variable("seen", (6 * ELASTIC_ROWS,), jnp.int32, jax.nn.initializers.zeros, trainable=False)
    est.assign_add("seen", jax.nn.one_hot(features, 6 * ELASTIC_ROWS, dtype=jnp.int32).sum(0))
    return est.EstimatorSpec(mode, loss=w, train_op=TowerOptimizer(optax.sgd(0.0)).minimize(w))


def train_elastic(model_dir, max_steps):
    """Trains on grain's `ElasticIterator`; says which rows were seen how often, and which this process was given."""
    import grain

    start()
    context, given = est.input_context(), []
    shard = grain.sharding.ShardOptions(context.index, context.count)

    def take(i):
        given.append(int(i))
        return np.int32(i)

    def input_fn():
        rows = grain.MapDataset.range(6 * ELASTIC_ROWS).shuffle(seed=1).map(take)
        return grain.experimental.ElasticIterator(rows, ELASTIC_ROWS, shard, read_options=grain.ReadOptions(1, 1))

    trained = make(model_dir, counts_rows, steps_per_loop=1, resume_input="position")
    trained.train(input_fn, max_steps=max_steps)
    say(seen=trained.get_variable_value("seen").tolist(), given=given)


def stall(folder):
    """The input of process 1 does not come on, until both watchdogs have said so."""
    start()
    paths = [os.path.join(folder, f"watchdog-{index}") for index in (0, 1)]

    def has_reported(path):
        return os.path.exists(path) and "It waits for process 1." in open(path).read()

    def wait(i):
        began = time.monotonic()
        while (
            jax.process_index() == 1 and i == 6 and not all(map(has_reported, paths)) and time.monotonic() < began + 30
        ):
            time.sleep(0.1)

    watchdog = est.WatchdogHook(1.5, path=paths[jax.process_index()])
    stalled = make(os.path.join(folder, "stalled"), tiny, steps_per_loop=1)
    stalled.train(lambda: Source(wait), hooks=[watchdog], max_steps=8)


def drift(folder):
    """A bit of one copy changes: on the second device of process 1."""
    start()
    estimator = make(os.path.join(folder, "drifted"), tiny, check_replicas_every=4, steps_per_loop=1)
    inner = Training._start

    def corrupting(training, run, reporting):
        if training.global_step == 5 and jax.process_index() == 1:
            carry = training._carry
            array = carry.variables["w"]
            shards = [np.array(shard.data) for shard in array.addressable_shards]
            shards[1].reshape(-1).view(np.uint8)[2] ^= 1
            placed = [jax.device_put(x, s.device) for x, s in zip(shards, array.addressable_shards, strict=True)]
            changed = jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
            training._carry = carry._replace(variables={**carry.variables, "w": changed})
        return inner(training, run, reporting)

    Training._start = corrupting
    try:
        estimator.train(lambda: Source(), max_steps=12)
    except est.ReplicaMismatchError as error:
        say(mismatch=str(error))


def disconnect():
    """All disconnect by themselves, process 0 last, and end later than the threads that watch the others look again."""
    start(heartbeat_timeout_secs=3.0)
    if jax.process_index() == 0:  # jax aborts those that are connected when process 0 disconnects
        coordination_client().get_live_nodes(list(range(jax.process_count())))
    jax.distributed.shutdown()
    time.sleep(2)
    sys.exit(0)


def come_late(folder):
    """Process 1 does not come in time."""
    start()
    CALLS.start_timeout_secs = 3
    trained = make(os.path.join(folder, "late"), tiny)
    if jax.process_index() == 1:
        time.sleep(6)
    try:
        trained.train(lambda: Source())
    except Exception as error:
        say(error=type(error).__name__, text=str(error))
