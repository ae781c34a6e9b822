"""How long a checkpoint stops training, how much slower steps are while it is written, and the memory it takes.

    python benchmarks/checkpoints.py [--megabytes 1000] [--rounds 3] [--save]

A model of variables and Adam's slots, together as large as asked for, is trained for some steps on one device. Each of
these is measured by `Estimator.train` in a process of its own, with RunConfig(save_checkpoints_async=False) and True:

- stall: how long the hook that saves holds up training;
- write: from there until the checkpoint is on disk;
- step: the median of steps while a checkpoint is written, and of the others. To write 1 GB may take a CPU core for some
  seconds, which steps on CPU devices may want as well;
- memory: the peak of the process's resident memory from the save to the file, less that before it. Where steps donate
  the memory that is being written (on CPU devices), it contains the other memory that they take.

At last, how long it takes, and how much memory, to begin to train from a checkpoint, and to evaluate it, which reads
the variables alone.
"""

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results

import estimator as est

STEPS = 12  # between two saves, at least
ARRAYS = 8


def model_fn(features, labels, mode, params):
    """Steps that compute for a while on a part of the variables, and update all of them."""
    x = features
    for i in range(ARRAYS):
        w = est.get_variable(f"w{i}", (params["rows"], 1024))
        x = x + jnp.tanh(x @ w[:1024])
    loss = est.losses.mean_squared_error(labels, x)
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(1e-4)).minimize(loss))


def rows_for(megabytes):
    """So that the variables and the two slots of each are as large."""
    return int(megabytes * 1e6 / 3 / ARRAYS / 1024 / 4)


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(256, 1024)).astype(np.float32), rng.normal(size=(256, 1024)).astype(np.float32)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


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


class Saving(est.Hook):
    """Saves a few times, the first of which are not counted, and times what happens."""

    def __init__(self, rounds):
        self.rounds = rounds + 1
        self.stalls, self.writes, self.peaks = [], [], []
        self.steps = {True: [], False: []}  # while something is written, and while not
        self._peak = Peak()
        self._saved, self._path, self._begun, self._last = 0, None, 0.0, None

    def next_step(self, step):
        return step + 1

    def after_run(self, context, values):
        jax.block_until_ready(context.state.variables)
        now = time.perf_counter()
        if self._last is not None:
            self.steps[self._path is not None].append(now - self._last)
        if self._path is not None and os.path.exists(self._path):
            self._note(now)
        if self._path is None and context.global_step % STEPS == 0:
            if self._saved == self.rounds:
                context.request_stop()
                return
            self._peak.start()
            self._begun = time.perf_counter()
            self._path = context.save(wait=False)
            self.stalls.append(time.perf_counter() - self._begun)
            if os.path.exists(self._path):
                self._note(time.perf_counter())
        self._last = time.perf_counter()

    def _note(self, now):
        self.writes.append(now - self._begun)
        self.peaks.append(self._peak.extra())
        self._saved += 1
        self._path = None


def measure_saves(model_dir, megabytes, rounds, saves_async):
    config = est.RunConfig(
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        save_checkpoints_async=saves_async,
        save_summary_steps=None,
        log_step_count_steps=None,
        steps_per_loop=1,
        keep_checkpoint_max=2,
    )
    hook = Saving(rounds)
    pair = batch()
    estimator = est.Estimator(model_fn, model_dir, config, {"rows": rows_for(megabytes)})
    estimator.train(lambda: iter(lambda: pair, None), hooks=[hook])
    medians = {name: statistics.median(getattr(hook, name)[1:]) for name in ("stalls", "writes")}
    medians["peak"] = max(hook.peaks)  # of the first save: later ones find memory that the process still has
    for is_writing, name in ((True, "writing"), (False, "idle")):
        steps = hook.steps[is_writing][1:]
        medians[name] = statistics.median(steps) if steps else None
        medians[f"{name} most"] = max(steps) if steps else None
    return medians


class Restored(Exception):
    """Ends a run that was measured."""


class Restoring(est.Hook):
    """Waits for the state, and ends the run."""

    def after_create_state(self, context):
        jax.block_until_ready(context.state[:2])
        raise Restored


def measure_restore(model_dir, megabytes, trains):
    """Until there is a state to train, or until an evaluation of one batch has ended."""
    pair = batch()
    estimator = est.Estimator(model_fn, model_dir, params={"rows": rows_for(megabytes)})
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="of variables and slots; at least 101")
    parser.add_argument("--rounds", type=int, default=3, help="saves that count")
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
            medians = in_process(measure_saves, model_dir, arguments.megabytes, arguments.rounds, saves_async)
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
        for trains in (True, False):
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
