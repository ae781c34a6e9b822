"""Step times of an embedding table by its number of rows: sparse gradients against dense ones.

    python benchmarks/sparse_gradients.py [--rounds 5] [--rows 10000 100000 1000000]

The table has 32 columns, a batch looks up 512 ids. The gradient is sparse with `est.embedding_lookup`, dense with
`est.get_variable(...)[ids]`. The state is donated, on 1 and 2 towers (CPU devices, or GPUs where there are enough).
The figure is the least over rounds of the mean time of a step; in brackets its ratio to the smallest table's.
"""

import argparse
import itertools
import time

import jax

jax.config.update("jax_num_cpu_devices", 2)

import numpy as np  # noqa: E402
import optax  # noqa: E402

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
    """A function of a number of steps, which it trains."""

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


def microseconds(run, rounds):
    """The least mean time of a step; a round has as many steps as fill a fifth of a second."""
    run(3)
    start = time.perf_counter()
    run(3)
    steps = max(3, int(0.2 / (time.perf_counter() - start) * 3))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run(steps)
        times.append((time.perf_counter() - start) / steps)
    return min(times) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    arguments = parser.parse_args()
    print(f"{'optimizer':10}{'towers':>7} {'gradient':10}" + "".join(f"{rows:>19,} rows" for rows in arguments.rows))
    kinds = {"sparse": est.embedding_lookup, "dense": dense_lookup}
    for towers, name, kind in itertools.product((1, 2), OPTIMIZERS, kinds):
        devices = jax.local_devices()[:towers]
        if len(devices) < towers:
            print(f"{name:10}{towers:7} (only {len(devices)} devices)")
            continue
        print(f"{name:10}{towers:7} {kind:10}", end="")
        first = None
        for rows in arguments.rows:
            run = make_run(rows, OPTIMIZERS[name], kinds[kind], devices)
            time_per_step = microseconds(run, arguments.rounds)
            first = first or time_per_step
            print(f"{time_per_step:12.0f} us ({time_per_step / first:6.2f})", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
