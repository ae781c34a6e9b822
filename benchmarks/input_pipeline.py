"""Milliseconds per training step with a slow input: a loop by hand, and `Estimator.train`.

    python benchmarks/input_pipeline.py [--input_ms 20] [--step_ms 30] [--steps 40] [--rounds 5] [--save]

The input sleeps, like one that reads from a disk or a network, and yields a small batch. The step is a compiled chain
of sines on one core, calibrated to `--step_ms`. Both loops read the loss of every step, the Estimator's by a hook, and
so wait for each step; the loop by hand then reads the input inline, while `train` has a thread for it.

The best case is the longer of the two times (the thread hides the shorter one), the worst is their sum. Figures are
medians over rounds, in which the loops take turns, of a run of 2 n steps less one of n.
"""

import argparse
import functools
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from turns import in_turns, per_step

import estimator as est

SIZE = 4096
BATCH = np.ones((32, 16), np.float32)


def sine_chain(w, sines):
    return jax.lax.fori_loop(0, sines, lambda _, w: jnp.sin(w), w)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def step(w, batch, sines):
    w = sine_chain(w, sines) + batch.mean()
    return w, w.mean()


def calibrated(step_seconds):
    """The number of sines that take the given time."""
    sines = 100
    for _ in range(5):
        step(jnp.ones(SIZE), BATCH, sines)[1].block_until_ready()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            step(jnp.ones(SIZE), BATCH, sines)[1].block_until_ready()
            times.append(time.perf_counter() - start)
        sines = max(1, round(sines * step_seconds / min(times)))
    return sines


def input_fn(sleep, steps):
    for _ in range(steps):
        if sleep:
            time.sleep(sleep)
        yield BATCH


def by_hand(sines, waits=True):
    """A function of the seconds of each batch, and of a number of steps; `waits`: reads every loss."""

    def run(sleep, steps):
        w = jnp.ones(SIZE)
        for batch in input_fn(sleep, steps):
            w, loss = step(w, batch, sines)
            if waits:
                float(loss)
        w.block_until_ready()

    return run


class ReadsEveryLoss(est.Hook):
    def after_run(self, context, values):
        assert values.loss is not None


def by_estimator(sines, waits=True):
    def model_fn(features, mode):
        w = est.get_variable("w", (SIZE,), initializer=jax.nn.initializers.ones, trainable=False)
        bias = est.get_variable("bias", (), initializer=jax.nn.initializers.zeros)
        after = sine_chain(w, sines) + features.mean()
        est.assign("w", after)
        loss = after.mean() + bias
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.0)).minimize(loss))

    config = est.RunConfig(save_summary_steps=None, save_checkpoints_secs=None, save_checkpoints_steps=None)
    estimator = est.Estimator(model_fn, tempfile.mkdtemp(), config)
    hooks = [ReadsEveryLoss()] if waits else []
    return lambda sleep, steps: estimator.train(lambda: input_fn(sleep, steps), hooks=hooks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input_ms", type=float, default=20)
    parser.add_argument("--step_ms", type=float, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    results.add_option(parser)
    arguments = parser.parse_args()
    rows = []
    sines, sleep = calibrated(arguments.step_ms / 1e3), arguments.input_ms / 1e3
    loops = {"by hand": by_hand(sines), "Estimator.train": by_estimator(sines)}
    sides = [functools.partial(run, pause) for run in loops.values() for pause in (0.0, sleep)]
    measured = in_turns(sides, lambda run: per_step(run, arguments.steps) * 1e3, arguments.rounds)
    columns = list(zip(*measured, strict=True))
    print(f"{arguments.input_ms:g} ms of input, a step of about {arguments.step_ms:g} ms ({sines} sines)")
    print(f"{'':18}{'no input':>12}{'input':>12}{'ratio':>9}")
    for name, without, with_input in zip(loops, columns[::2], columns[1::2], strict=True):
        ratio = statistics.median(b / a for a, b in zip(without, with_input, strict=True))
        figures = f"{statistics.median(without):9.1f} ms{statistics.median(with_input):9.1f} ms"
        print(f"{name:18}{figures}{ratio:9.3f}", flush=True)
        rows.append({"loop": name, "time with / without the input": ratio})
    if arguments.save:
        plot = results.ratios(
            "time / time without the input",
            {name: row["time with / without the input"] for name, row in zip(loops, rows, strict=True)},
        )
        results.save(
            f"An input of {arguments.input_ms:g} ms behind a step of {arguments.step_ms:g} ms", {"": rows}, plot
        )


if __name__ == "__main__":
    main()
