"""Milliseconds per training step with an input that takes its time: in line, and made ready by a thread.

    python benchmarks/input_pipeline.py [--input_ms 20] [--step_ms 30] [--steps 40] [--rounds 3]

The input sleeps, as one that reads from a disk or a network does, and gives a small batch. The step is a compiled
chain of sines on one core, calibrated to take so long. Two loops run it:

- "reads every loss" waits for each step before it goes on, as a loop does that looks at values between steps;
- "two in flight" waits for the step before last only; devices then work while the input is made, thread or not.

The best case is the longer of the two times (the thread hides the shorter one), the worst is their sum. Figures are
medians over rounds, in which the loops take turns.
"""

import argparse
import collections
import functools
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from estimator._input import batches
from estimator._prefetch import Prefetcher

SIZE = 4096


@functools.partial(jax.jit, donate_argnums=0)
def step(w, batch, sines):
    w = jax.lax.fori_loop(0, sines, lambda _, w: jnp.sin(w), w) + batch.mean()
    return w, w.mean()


def seconds(sines, repetitions):
    w, batch = jnp.ones(SIZE), np.ones((32, 16), np.float32)
    step(w, batch, sines)[1].block_until_ready()  # compiles
    times = []
    for _ in range(repetitions):
        w = jnp.ones(SIZE)
        start = time.perf_counter()
        step(w, batch, sines)[1].block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def calibrated(step_seconds):
    """The number of sines that takes so long."""
    sines = 100
    for _ in range(4):
        sines = max(1, round(sines * step_seconds / seconds(sines, 9)))
    return sines


def input_fn(sleep, steps):
    for _ in range(steps):
        if sleep:
            time.sleep(sleep)
        yield np.ones((32, 16), np.float32)


def in_line(source):
    return (features for features, _ in source)


def in_thread(source):
    with Prefetcher(source, lambda pairs: jax.device_put([features for features, _ in pairs])) as ready:
        ready.request(1)
        while True:
            ready.request(1)
            piece = ready.get()
            if not piece.size:
                return
            yield from piece.batches


def milliseconds_per_step(reader, sleep, sines, steps, in_flight):
    """Of all but the first step, which waits for the first batch whatever is done."""
    w, losses, start = jnp.ones(SIZE), collections.deque(), 0.0
    for i, batch in enumerate(reader(batches(input_fn(sleep, steps + 1)))):
        w, loss = step(w, batch, sines)
        losses.append(loss)
        if len(losses) > in_flight or i == 0:
            losses.popleft().block_until_ready()
        start = start or time.perf_counter()
    w.block_until_ready()
    return (time.perf_counter() - start) / steps * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input_ms", type=float, default=20)
    parser.add_argument("--step_ms", type=float, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sines, sleep = calibrated(arguments.step_ms / 1e3), arguments.input_ms / 1e3
    loops = {"reads every loss": 0, "two in flight": 2}
    inputs = {"no input": (in_line, 0.0), "in line": (in_line, sleep), "in thread": (in_thread, sleep)}
    times = collections.defaultdict(list)
    for _ in range(arguments.rounds):
        for loop, kind in itertools.product(loops, inputs):
            reader, pause = inputs[kind]
            times[loop, kind].append(milliseconds_per_step(reader, pause, sines, arguments.steps, loops[loop]))
    print(f"{arguments.input_ms:g} ms of input, a step of about {arguments.step_ms:g} ms ({sines} sines)")
    print(f"{'':18}" + "".join(f"{kind:>12}" for kind in inputs) + f"{'thread / no input':>20}")
    for loop in loops:
        medians = [statistics.median(times[loop, kind]) for kind in inputs]
        ratio = statistics.median(b / a for a, b in zip(times[loop, "no input"], times[loop, "in thread"], strict=True))
        print(f"{loop:18}" + "".join(f"{median:9.1f} ms" for median in medians) + f"{ratio:20.3f}")


if __name__ == "__main__":
    main()
