"""How long a checkpoint stops training, how much slower steps are while it is written, and the memory it takes.

    python benchmarks/checkpoints.py [--megabytes 1000] [--rounds 3] [--processes 2] [--save]

A model of variables and Adam's slots, together as large as asked for, is trained for some steps on one device. Each of
these is measured by `Estimator.train` in a process of its own, with RunConfig(save_checkpoints_async=False) and True:

- stall: how long the hook that saves holds up training;
- write: from there until the checkpoint is on disk;
- step: the median of steps while a checkpoint is written, and of the others. To write 1 GB may take a CPU core for some
  seconds, which steps on CPU devices may want as well;
- memory: the peak of the process's resident memory from the save to the file, less that before it. Where steps donate
  the memory that is being written (on CPU devices), it contains the other memory that they take.

Of several processes, each with a device, the first one is measured.

At last, how long it takes, and how much memory, to begin to train from a checkpoint, and to evaluate it, which reads
the variables alone.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from jax.experimental import multihost_utils

import estimator as est
from replicate import TowerOptimizer, initialize_distributed, replicate_model_fn

ARRAYS = 8


def model_fn(features, labels, mode, params):
    """Steps that compute for a while on a part of the variables, and update all of them."""
    shape = shape_for(params["megabytes"])
    loss = loss_of([est.get_variable(f"w{i}", shape) for i in range(ARRAYS)], features, labels)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.adam(1e-4)).minimize(loss))


def loss_of(variables, x, labels):
    for w in variables:
        x = x + jnp.tanh(x @ w[: w.shape[1]])
    return jnp.mean(jnp.square(x - labels))


def shape_for(megabytes):
    """So that the variables and the two slots of each are as large; at least 2 MB."""
    width = 1024 if megabytes > 100 else 128
    return int(megabytes * 1e6 / 3 / ARRAYS / width / 4), width


def batch(megabytes):
    rng, shape = np.random.default_rng(0), (256, shape_for(megabytes)[1])
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def exists(path):
    """Whether a checkpoint is on disk; of several processes all have the answer of the first."""
    return bool(multihost_utils.broadcast_one_to_all(np.int32(os.path.exists(path))))


class Peak:
    """The largest resident memory since `start`, above that at `start`, in MB."""

    def __init__(self):
        self._peak = self._base = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while True:
            self._peak = max(self._peak, resident())
            time.sleep(0.005)

    def start(self):
        self._base = self._peak = resident()

    def extra(self):
        return self._peak - self._base


class Saves:
    """Times saves, the first of which are not counted, and the steps between them."""

    def __init__(self, rounds, steps):
        self.rounds, self.between = rounds + 1, steps
        self.stalls, self.writes, self.peaks = [], [], []
        self.steps = {True: [], False: []}  # while something is written, and while not
        self._peak = Peak()
        self._saved, self._path, self._begun, self._last = 0, None, 0.0, None

    def after_step(self, step, save):
        """To be called when a step has ended; returns whether all is measured.

        Args:
          step: its number.
          save: begins to save; returns the path that there is once the checkpoint is on disk.
        """
        now = time.perf_counter()
        if self._last is not None:
            self.steps[self._path is not None].append(now - self._last)
        if self._path is not None and exists(self._path):
            self._note(now)
        if self._path is None and step % self.between == 0:
            if self._saved == self.rounds:
                return True
            self._peak.start()
            self._begun = time.perf_counter()
            self._path = save()
            self.stalls.append(time.perf_counter() - self._begun)
            if exists(self._path):
                self._note(time.perf_counter())
        self._last = time.perf_counter()
        return False

    def _note(self, now):
        self.writes.append(now - self._begun)
        self.peaks.append(self._peak.extra())
        self._saved += 1
        self._path = None

    def medians(self):
        """Seconds by what takes them, and `peak`, in MB."""
        medians = {name: statistics.median(getattr(self, name)[1:]) for name in ("stalls", "writes")}
        medians["peak"] = max(self.peaks)  # of the first save: later ones find memory that the process still has
        for is_writing, name in ((True, "writing"), (False, "idle")):
            steps = self.steps[is_writing][1:]
            medians[name] = statistics.median(steps) if steps else None
            medians[f"{name} most"] = max(steps) if steps else None
        return medians


class Saving(est.Hook):
    def __init__(self, saves):
        self._saves = saves

    def next_step(self, step):
        return step + 1

    def after_run(self, context, values):
        jax.block_until_ready(context.state.variables)
        if self._saves.after_step(context.global_step, lambda: context.save(wait=False)):
            context.request_stop()


def measure_saves(model_dir, megabytes, rounds, steps, saves_async):
    config = est.RunConfig(
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        save_checkpoints_async=saves_async,
        save_summary_steps=None,
        log_step_count_steps=None,
        steps_per_loop=1,
        keep_checkpoint_max=2,
    )
    saves, pair = Saves(rounds, steps), batch(megabytes)
    estimator = est.Estimator(replicate_model_fn(model_fn), model_dir, config, {"megabytes": megabytes})
    estimator.train(lambda: iter(lambda: pair, None), hooks=[Saving(saves)])
    return saves.medians()


def measure_saves_together(index, processes, port, *args):
    initialize_distributed(f"127.0.0.1:{port}", processes, index)
    return measure_saves(*args)


def measure_saves_by_hand(directory, megabytes, rounds, steps):
    """The same with a loop by hand, and orbax's asynchronous checkpointer, which keeps the last two."""
    import orbax.checkpoint as ocp

    tx, pair, saves, paths = optax.adam(1e-4), batch(megabytes), Saves(rounds, steps), []

    def step(state, batch):
        variables, slots = state
        updates, slots = tx.update(jax.grad(loss_of)(variables, *batch), slots, variables)
        return optax.apply_updates(variables, updates), slots

    program = jax.jit(step, donate_argnums=0)
    shape = shape_for(megabytes)
    variables = [jax.random.normal(jax.random.key(i), shape) * shape[1] ** -0.5 for i in range(ARRAYS)]
    state = variables, tx.init(variables)
    with ocp.StandardCheckpointer() as checkpointer:

        def save():
            paths.append(os.path.join(directory, str(len(paths))))
            checkpointer.save(paths[-1], state)
            return paths[-1]

        for i in itertools.count(1):
            state = jax.block_until_ready(program(state, pair))
            if saves.after_step(i, save):
                return saves.medians()
            if len(paths) > 2:
                shutil.rmtree(paths[-3], ignore_errors=True)


class Restored(Exception):
    """Ends a run that was measured."""


class Restoring(est.Hook):
    """Waits for the state, and ends the run."""

    def after_create_state(self, context):
        jax.block_until_ready(context.state[:2])
        raise Restored


def measure_restore(model_dir, megabytes, trains):
    """Until there is a state to train, or until an evaluation of one batch has ended."""
    pair = batch(megabytes)
    estimator = est.Estimator(model_fn, model_dir, params={"megabytes": megabytes})
    jax.block_until_ready(jnp.ones(3) + 1)
    peak = Peak()
    peak.start()
    begun = time.perf_counter()
    if trains:
        with contextlib.suppress(Restored):
            estimator.train(lambda: [pair], hooks=[Restoring()])
    else:
        estimator.evaluate(lambda: [pair])
    return {"seconds": time.perf_counter() - begun, "peak": peak.extra()}


def in_process(function, *args):
    """The result of a function that a process of its own calls."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def in_processes(processes, *args):
    """The measures of the first of several processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor(processes) as threads:
        calls = [
            threads.submit(in_process, measure_saves_together, index, processes, port, *args)
            for index in range(processes)
        ]
        return [call.result() for call in calls][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="of variables and slots")
    parser.add_argument("--rounds", type=int, default=3, help="saves that count")
    parser.add_argument("--steps", type=int, default=12, help="between two saves, at least")
    parser.add_argument("--processes", type=int, default=1, help="that train and save together")
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    results.add_option(parser)
    arguments = parser.parse_args()
    saves, restores = [], []
    directory = tempfile.mkdtemp(dir=arguments.directory)
    print(f"{arguments.megabytes} MB of variables and slots")
    try:
        stalls = {}
        for saves_async in (False, True):
            model_dir = os.path.join(directory, str(saves_async))
            sizes = model_dir, arguments.megabytes, arguments.rounds, arguments.steps, saves_async
            if arguments.processes > 1:
                medians = in_processes(arguments.processes, *sizes)
            else:
                medians = in_process(measure_saves, *sizes)
            stalls[saves_async] = medians["stalls"]
            text = "async" if saves_async else "sync "
            text += f"  stall {medians['stalls'] * 1e3:7.1f} ms  write {medians['writes'] * 1e3:7.1f} ms"
            text += f"  memory {medians['peak']:5.0f} MB  step {medians['idle'] * 1e3:6.1f} ms"
            if medians["writing"] is not None:
                text += (
                    f", while writing {medians['writing'] * 1e3:6.1f} ms ({medians['writing'] / medians['idle']:.2f})"
                )
                text += f", at most {medians['writing most'] * 1e3:.1f} ms"
            print(text, flush=True)
            seconds = {name: medians[name] for name in ("stalls", "writes", "idle", "writing")}
            row = {"save": "async" if saves_async else "waiting", "memory, MB": medians["peak"]}
            saves.append(row | {f"{name}, ms": 1e3 * each for name, each in seconds.items() if each is not None})
        print(f"the stall is {stalls[True] / stalls[False]:.4f} of a save that waits")
        for trains in (True, False) if arguments.processes == 1 else ():
            restored = in_process(measure_restore, os.path.join(directory, "True"), arguments.megabytes, trains)
            size = arguments.megabytes if trains else arguments.megabytes / 3
            print(
                f"{'train' if trains else 'evaluate':8}  from a checkpoint in {restored['seconds'] * 1e3:7.1f} ms; "
                f"memory at most {restored['peak']:5.0f} MB, for {size:.0f} MB of state",
                flush=True,
            )
            restores.append(
                {
                    "until": "train" if trains else "evaluate",
                    "ms": 1e3 * restored["seconds"],
                    "memory, MB": restored["peak"],
                }
            )
    finally:
        shutil.rmtree(directory)
    if arguments.save:
        tables = {"Saving": saves, "Restoring": restores}
        stops = {
            f"{row['save']}: {name}": row[f"{name}, ms"] / saves[0]["stalls, ms"]
            for row in saves
            for name in ("stalls", "writes")
        }
        plot = results.ratios("time / time of a save that waits", stops, log=True)
        results.save(f"Checkpoints of {arguments.megabytes} MB of variables and slots", tables, plot)


if __name__ == "__main__":
    main()
