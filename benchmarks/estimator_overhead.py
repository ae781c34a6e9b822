"""The cost of the Estimator with its defaults, compared with loops written by hand.

    python benchmarks/estimator_overhead.py [--rounds 9] [--only small] [--save]

- `train` of a small model, against loops around a `lax.scan` of 20 steps (as in step_time.py), and of 100;
- `train` of a model whose step takes some 20 ms, against a loop around one `jit`;
- ten `evaluate` calls in a row, against ten loops around one `jit`.

The Estimator has its default RunConfig: it checks for NaN, logs, writes summaries, and saves a checkpoint every ten
minutes, at the first and at the last step. One-time costs of a run are excluded, as in step_time.py: the time of n
steps is the time of a run of 2 n steps minus the time of a run of n. Both sides get the same numpy batches. Runs
alternate in one process; the figure is the median over rounds, the ratio the median of the rounds' ratios.
"""

import argparse
import itertools
import tempfile
import time

import jax
import numpy as np
import results
from step_time import hand_written_run, initial, mean_loss, microseconds_per_step, optimizer
from turns import in_turns, medians

import estimator as est

LOOPS = 20, 100  # steps per program by hand; the Estimator chooses itself
EVALUATIONS, EVAL_BATCHES = 10, 50


def model_fn_of(widths):
    def model_fn(features, labels, mode):
        variables = {name: est.get_variable(name, initializer=value) for name, value in initial(widths).items()}
        loss = mean_loss(variables, features, labels)
        est.summary.scalar("loss_again", loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optimizer()).minimize(loss))

    return model_fn


def batches_of(widths, batch_size, count):
    random = np.random.default_rng(1)
    distinct = [
        (
            random.normal(size=(batch_size, widths[0])).astype(np.float32),
            random.normal(size=(batch_size, widths[-1])).astype(np.float32),
        )
        for _ in range(10)
    ]
    return list(itertools.islice(itertools.cycle(distinct), count))


def compare(name, measure, theirs, ours, rounds, unit):
    """Prints and returns the medians of both, and the median of their ratios."""
    by_hand, estimator, ratio = medians(in_turns((theirs, ours), measure, rounds))
    print(f"{name:36}{by_hand:12.1f}{estimator:12.1f} {unit:9}{ratio:6.3f}", flush=True)
    return {"case": name, "unit": unit, "by hand": by_hand, "Estimator": estimator, "ratio": ratio}


def training(name, widths, batch_size, steps, steps_per_loop, rounds):
    batches = batches_of(widths, batch_size, 2 * steps)

    def ours(batches):
        estimator.train(lambda: batches)

    estimator = est.Estimator(model_fn_of(widths), tempfile.mkdtemp())
    theirs = hand_written_run(widths, jax.local_devices()[:1], steps_per_loop)
    return compare(name, lambda run: microseconds_per_step(run, batches), theirs, ours, rounds, "us/step")


def evaluation(rounds):
    widths, batch_size = (16, 32, 4), 32
    batches = batches_of(widths, batch_size, EVAL_BATCHES)
    estimator = est.Estimator(model_fn_of(widths), tempfile.mkdtemp()).train(lambda: batches, steps=1)
    variables = {name: estimator.get_variable_value(name) for name in initial(widths)}
    step = jax.jit(mean_loss)

    def theirs():
        for _ in range(EVALUATIONS):
            losses = [step(on_device, *batch) for batch in batches]
            np.mean(jax.device_get(losses))

    def ours():
        for _ in range(EVALUATIONS):
            estimator.evaluate(lambda: batches)

    def milliseconds(run):
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    on_device = jax.device_put(variables)
    return compare(f"{EVALUATIONS} evaluations of {EVAL_BATCHES} batches", milliseconds, theirs, ours, rounds, "ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["small", "20ms", "evaluate"])
    results.add_option(parser)
    arguments = parser.parse_args()
    rows = []
    print(f"{'':36}{'by hand':>12}{'Estimator':>12} {'':9}{'ratio':>6}")
    if arguments.only in (None, "small"):
        for loop in LOOPS:
            rows.append(training(f"train, small model, scan of {loop}", (16, 32, 4), 32, 4000, loop, arguments.rounds))
    if arguments.only in (None, "20ms"):
        rows.append(training("train, 20 ms step", (512, 1024, 1024, 10), 512, 20, 1, arguments.rounds))
    if arguments.only in (None, "evaluate"):
        rows.append(evaluation(arguments.rounds))
    if arguments.save:
        plot = results.ratios("time / time by hand", {row["case"]: row["ratio"] for row in rows})
        results.save("The Estimator against loops by hand", {"": rows}, plot)


if __name__ == "__main__":
    main()
