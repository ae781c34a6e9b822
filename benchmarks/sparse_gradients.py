"""Step times of an embedding table by its number of rows: sparse gradients against dense ones.

    python benchmarks/sparse_gradients.py [--rounds 5] [--rows 10000 100000 1000000] [--save]

The table has 32 columns, a batch looks up 512 ids. The gradient is sparse with `est.embedding_lookup`, dense with
`est.get_variable(...)[ids]`. The state is donated, on 1 and 2 towers (CPU devices, or GPUs where there are enough).
The figure is the least over rounds of the mean time of a step; in brackets its ratio to the first table's. The sizes
alternate, so that other load on the machine affects all of them.
"""

import argparse
import itertools
import time

import jax

jax.config.update("jax_num_cpu_devices", 2)

import numpy as np  # noqa: E402
import optax  # noqa: E402
import results  # noqa: E402

import estimator as est  # noqa: E402
from replicate import TowerOptimizer, replicate_model_fn  # noqa: E402

WIDTH, BATCH, IDS = 32, 64, 8  # ids per example
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lazy adam": lambda: est.lazy(optax.adam(1e-3)),
}


def dense_lookup(name, ids, shape):
    return est.get_variable(name, shape)[ids]


def make_run(rows, optimizer, lookup, devices):
    """A function that trains for a number of steps."""

    def model_fn(features, labels, mode):
        v = est.get_variable("v", (WIDTH, 1))
        output = (lookup("table", features, (rows, WIDTH)).mean(1) @ v)[:, 0]
        loss = est.losses.mean_squared_error(labels, output)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optimizer()).minimize(loss))

    model = est.transform(replicate_model_fn(model_fn, devices=devices), donate=True)
    random = np.random.default_rng(0)
    labels = np.ones(BATCH, np.float32)
    batches = [random.integers(0, rows, (BATCH, IDS), np.int32) for _ in range(10)]
    state = model.init(jax.random.key(0), batches[0], labels)

    def run(steps):
        nonlocal state
        for ids in itertools.islice(itertools.cycle(batches), steps):
            state, spec = model.train_step(state, ids, labels)
            spec.loss.block_until_ready()

    return run


def microseconds(runs, rounds):
    """The minimum of the mean step times of each run; runs alternate, in rounds of a fifth of a second."""
    steps = []
    for run in runs:
        run(3)
        start = time.perf_counter()
        run(3)
        steps.append(max(3, int(0.2 / (time.perf_counter() - start) * 3)))
    times = []
    for _ in range(rounds):
        times.append([])
        for run, n in zip(runs, steps, strict=True):
            start = time.perf_counter()
            run(n)
            times[-1].append((time.perf_counter() - start) / n * 1e6)
    return [min(column) for column in zip(*times, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    results.add_option(parser)
    arguments = parser.parse_args()
    measured = []
    print(f"{'optimizer':10}{'towers':>7} {'gradient':10}" + "".join(f"{rows:>19,} rows" for rows in arguments.rows))
    kinds = {"sparse": est.embedding_lookup, "dense": dense_lookup}
    for towers, name, kind in itertools.product((1, 2), OPTIMIZERS, kinds):
        devices = jax.local_devices()[:towers]
        if len(devices) < towers:
            print(f"{name:10}{towers:7} (only {len(devices)} devices)")
            continue
        print(f"{name:10}{towers:7} {kind:10}", end="", flush=True)
        runs = [make_run(rows, OPTIMIZERS[name], kinds[kind], devices) for rows in arguments.rows]
        times = microseconds(runs, arguments.rounds)
        print("".join(f"{t:12.0f} us ({t / times[0]:6.2f})" for t in times), flush=True)
        row = {"optimizer": name, "towers": towers, "gradient": kind}
        measured.append(row | {f"{rows:,} rows, us": t for rows, t in zip(arguments.rows, times, strict=True)})
        measured[-1]["last / first"] = times[-1] / times[0]
    if arguments.save:
        named = {
            f"{row['optimizer']}, {row['towers']} towers, {row['gradient']}": row["last / first"] for row in measured
        }
        plot = results.ratios("time with the largest table / with the smallest", named, log=True)
        results.save("A step of 512 lookups in tables of several sizes", {"": measured}, plot)


if __name__ == "__main__":
    main()
