"""Milliseconds per training step with a slow input: a loop by hand, and `Estimator.train`.

    python benchmarks/input_pipeline.py [--input_ms 20] [--step_ms 30] [--steps 40] [--rounds 5] [--save]

The input sleeps, like one that reads from a disk or a network, and yields a small batch. The step is a compiled chain
of sines on one core, calibrated to `--step_ms`. Both loops read the loss of every step, the Estimator's by a hook, and
so wait for each step; the loop by hand then reads the input inline, while `train` has a thread for it.

The best case is the longer of the two times (the thread hides the shorter one), the worst is their sum. Figures are
medians over rounds, in which the loops take turns, of a run of 2 n steps less one of n.

Then `train` makes steps of 20 ms behind inputs of images: PNGs of 32x32 in uint8, which are decoded, cropped and
flipped, 64 in a batch, by a process of grain's or by a generator in the thread; and behind an input that is too slow.
A table has the share of the time in which it waits while no step is made, by its log line and by Python's profiler.
"""

import argparse
import cProfile
import functools
import io
import pstats
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from PIL import Image
from turns import in_turns, per_step

import estimator as est

SIZE = 4096
BATCH = np.ones((32, 16), np.float32)
IMAGES, BATCH_SIZE, IMAGES_STEP_MS, SLOW_MS = 2048, 64, 20, 40  # of the inputs of images


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


def estimator_of(sines):
    def model_fn(features, mode):
        w = est.get_variable("w", (SIZE,), initializer=jax.nn.initializers.ones, trainable=False)
        bias = est.get_variable("bias", (), initializer=jax.nn.initializers.zeros)
        after = sine_chain(w, sines) + features.mean()
        est.assign("w", after)
        loss = after.mean() + bias
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.0)).minimize(loss))

    config = est.RunConfig(save_summary_steps=None, save_checkpoints_secs=None, save_checkpoints_steps=None)
    return est.Estimator(model_fn, tempfile.mkdtemp(), config)


def by_estimator(sines, waits=True):
    estimator, hooks = estimator_of(sines), [ReadsEveryLoss()] if waits else []
    return lambda sleep, steps: estimator.train(lambda: input_fn(sleep, steps), hooks=hooks)


def encoded_images():
    """The bytes of PNGs, as files have them."""
    random = np.random.default_rng(0)
    for _ in range(IMAGES):
        smooth = random.integers(0, 256, (8, 8, 3), np.uint8).repeat(4, 0).repeat(4, 1)
        file = io.BytesIO()
        Image.fromarray(smooth + random.integers(0, 8, smooth.shape, np.uint8)).save(file, "png")
        yield file.getvalue()


def augment(png, random):
    """The image, padded by 4, cropped, and flipped every second time; uint8."""
    padded = np.pad(np.asarray(Image.open(io.BytesIO(png))), ((4, 4), (4, 4), (0, 0)))
    top, left = random.integers(0, 9, 2)
    crop = padded[top : top + 32, left : left + 32]
    return crop[:, ::-1] if random.random() < 0.5 else crop


def by_generator(images):
    random = np.random.default_rng(1)
    while True:
        yield np.stack([augment(images[i], random) for i in random.integers(0, IMAGES, BATCH_SIZE)])


def by_grain(images):
    import absl.flags
    import grain

    absl.flags.FLAGS.mark_as_parsed()  # grain has flags
    dataset = grain.MapDataset.source(images).shuffle(seed=1).repeat().random_map(augment, seed=2).batch(BATCH_SIZE)
    return dataset.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=1))


def too_slow(images):
    while True:
        time.sleep(SLOW_MS / 1e3)
        yield np.zeros((BATCH_SIZE, 32, 32, 3), np.uint8)


class WaitsForInput(est.Hook):
    """The share of the time from the first step to a last one in which the loop waits for its input."""

    def __init__(self, last):
        self.steps, self.profile, self.readings = (1, last), cProfile.Profile(), []

    def next_step(self, step):
        return next((each for each in self.steps if each > step), None)

    def after_run(self, context, values):
        self.profile.disable()
        self.readings.append((time.perf_counter(), context.input_wait))
        if context.global_step == 1:
            self.profile.enable()

    def as_logged(self):
        (begin, before), (end, after) = self.readings
        return (after - before) / (end - begin)

    def as_profiled(self):
        functions = pstats.Stats(self.profile).stats.items()
        waiting = sum(times[3] for (_, _, name), times in functions if name == "get_unless")
        return waiting / (self.readings[1][0] - self.readings[0][0])


def waiting(make_input, sines, steps):
    """A row of the table of inputs of images."""
    images = list(encoded_images())
    batches = iter(make_input(images))
    next(batches)
    start = time.perf_counter()
    for _ in range(steps // 4):
        next(batches)
    alone = (time.perf_counter() - start) / (steps // 4) * 1e3
    del batches  # and its process
    waits = WaitsForInput(steps)
    estimator_of(sines).train(lambda: make_input(images), hooks=[waits], steps=steps)
    name = {by_grain: "a process of grain's", by_generator: "a generator", too_slow: f"{SLOW_MS} ms of sleep"}[
        make_input
    ]
    shares = {"waiting, as logged": f"{waits.as_logged():.1%}", "as profiled": f"{waits.as_profiled():.1%}"}
    return {"input": name, "alone, ms a batch": alone, **shares}


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
    waits = []
    for make_input in (by_grain, by_generator, too_slow):
        waits.append(waiting(make_input, calibrated(IMAGES_STEP_MS / 1e3), 5 * arguments.steps))
        print(", ".join(f"{column} {results.shown(each)}" for column, each in waits[-1].items()), flush=True)
    if arguments.save:
        plot = results.ratios(
            "time / time without the input",
            {name: row["time with / without the input"] for name, row in zip(loops, rows, strict=True)},
        )
        results.save(
            f"An input of {arguments.input_ms:g} ms behind a step of {arguments.step_ms:g} ms",
            {"": rows, f"Steps of {IMAGES_STEP_MS} ms": waits},
            plot,
        )


if __name__ == "__main__":
    main()
