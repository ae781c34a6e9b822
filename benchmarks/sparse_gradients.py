"""Step times of an embedding table: by its number of rows, sparse gradients against dense ones, and against by hand.

    python benchmarks/sparse_gradients.py [--rounds 5] [--rows 10000 100000 1000000] [--save]

The table has 32 columns, a batch looks up 512 ids. The gradient is sparse with `est.embedding_lookup`, dense with
`est.get_variable(...)[ids]`. The state is donated, on 1 and 2 towers (CPU devices, or GPUs where there are enough).
The figure is the least over rounds of the mean time of a step; in brackets its ratio to the first table's. The sizes
alternate, so that other load on the machine affects all of them.

Then a step of 4,096 lookups in a table of a million rows, with adagrad, on one device: the program alone, and
`Estimator.train`, against jax by hand, which sorts the ids, sums the gradients of equal ones, gathers the rows of the
accumulator, and scatters both; it does not know padding or ids that are too large. CPU time, the median of the rounds'
ratios. Last the collectives of that step on 4 towers, each of which needs all ids, and the gradients of all their rows.
"""

import argparse
import functools
import itertools
import tempfile
import time

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import results  # noqa: E402
from turns import in_turns, medians, run_by_hand  # noqa: E402

import estimator as est  # noqa: E402
from replicate import TowerOptimizer, replicate_model_fn  # noqa: E402
from replicate.explain import collectives  # noqa: E402

WIDTH, BATCH, IDS = 32, 64, 8  # ids per example
ROWS, LARGE_BATCH = 10**6, 512  # against by hand
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lazy adam": lambda: est.lazy(optax.adam(1e-3)),
}


def dense_lookup(name, ids, shape):
    return est.get_variable(name, shape)[ids]


def make_model_fn(rows, optimizer, lookup, width=WIDTH):
    def model_fn(features, labels, mode):
        v = est.get_variable("v", (width, 1))
        output = (lookup("table", features, (rows, width)).mean(1) @ v)[:, 0]
        loss = est.losses.mean_squared_error(labels, output)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optimizer()).minimize(loss))

    return model_fn


def make_batches(rows, size):
    random = np.random.default_rng(0)
    return [random.integers(0, rows, (size, IDS), np.int32) for _ in range(10)], np.ones(size, np.float32)


def make_run(rows, optimizer, lookup, devices):
    """A function that trains for a number of steps."""
    model = est.transform(replicate_model_fn(make_model_fn(rows, optimizer, lookup), devices=devices), donate=True)
    batches, labels = make_batches(rows, BATCH)
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


def step_by_hand(state, batch):
    (ids, labels), (table, v, of_table, of_v) = batch, state

    def mean_loss(rows, v):
        return jnp.mean(((rows.mean(1) @ v)[:, 0] - labels) ** 2)

    def divide(gradient, squares):
        return -0.1 * gradient * jnp.where(squares > 0, jax.lax.rsqrt(squares + 1e-7), 0.0)

    loss, (of_rows, gradient) = jax.value_and_grad(mean_loss, (0, 1))(table.at[ids].get(mode="clip"), v)
    flat = ids.reshape(-1)
    ordered = jnp.sort(flat)
    ranks = jnp.cumsum(jnp.append(True, ordered[1:] != ordered[:-1])) - 1
    once = jnp.full_like(flat, len(table)).at[ranks].set(ordered)
    places = jnp.searchsorted(once, flat)
    sums = jax.ops.segment_sum(of_rows.reshape(len(flat), -1), places, len(flat))
    squares = of_table.at[once].get(mode="clip") + sums**2
    table = table.at[once].add(divide(sums, squares), mode="drop")
    of_v = of_v + gradient**2
    return (table, v + divide(gradient, of_v), of_table.at[once].set(squares, mode="drop"), of_v), loss


def cpu_per_step(train, steps, warm_up=20):
    """Microseconds of the process, from one batch to another."""
    at = []

    def batches():
        ids, labels = make_batches(ROWS, LARGE_BATCH)
        for i, each in enumerate(itertools.islice(itertools.cycle(ids), warm_up + steps + 1)):
            if i in (warm_up, warm_up + steps):
                at.append(time.process_time())
            yield each, labels

    train(batches)
    return (at[1] - at[0]) / steps * 1e6


def against_hand(width, rounds, steps=400):
    """A row for the program alone, and one for `Estimator.train`."""
    model_fn = make_model_fn(ROWS, OPTIMIZERS["adagrad"], est.embedding_lookup, width)
    (ids, *_), labels = make_batches(ROWS, LARGE_BATCH)
    model, config = est.transform(model_fn), est.RunConfig(save_checkpoints_secs=None, save_checkpoints_steps=None)
    key = jax.random.key(0)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(carry, batch):
        state, spec = model.train_step(est.State(*carry, key), *batch)
        return tuple(state[:3]), spec.loss

    compiled_by_hand = jax.jit(step_by_hand, donate_argnums=0)

    def by_hand(batches):
        table, v = jax.random.uniform(key, (ROWS, width)), jax.random.uniform(key, (width, 1))
        state = table, v, jnp.full_like(table, 0.1), jnp.full_like(v, 0.1)
        run_by_hand(compiled_by_hand, state, batches())

    def program_alone(batches):
        run_by_hand(program, tuple(model.init(key, ids, labels)[:3]), batches())

    def estimator(batches):
        est.Estimator(model_fn, tempfile.mkdtemp(), config).train(batches)

    for name, side in (("program", program_alone), ("Estimator.train", estimator)):
        *times, ratio = medians(in_turns([by_hand, side], lambda train: cpu_per_step(train, steps), rounds))
        yield {"side": name, "columns": width, "by hand, us": times[0], "us": times[1], "ratio": ratio}


def gathered_on_towers(towers=4):
    """The collectives of the step, with the bytes that a tower has after each."""
    model_fn = make_model_fn(ROWS, OPTIMIZERS["adagrad"], est.embedding_lookup)
    model = est.transform(replicate_model_fn(model_fn, devices=jax.local_devices()[:towers]))
    (ids, *_), labels = make_batches(ROWS, LARGE_BATCH)
    state = model.init(jax.random.key(0), ids, labels)
    program = jax.jit(model.train_step).lower(state, ids, labels).compile().as_text()
    return [{"collective": f"{x.kind} of {x.dtype}", "bytes": x.bytes} for x in collectives(program)]


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
    hands = [row for width in (8, WIDTH) for row in against_hand(width, arguments.rounds)]
    towers = gathered_on_towers()
    for row in hands + towers:
        print(
            ", ".join(f"{name}: {value if isinstance(value, str) else round(value, 2)}" for name, value in row.items())
        )
    if arguments.save:
        named = {
            f"{row['optimizer']}, {row['towers']} towers, {row['gradient']}": row["last / first"] for row in measured
        }
        plot = results.ratios("time with the largest table / with the smallest", named, log=True)
        tables = {
            "": measured,
            "A step of 4,096 lookups in a million rows, adagrad": hands,
            f"Collectives of that step on 4 towers, {WIDTH} columns": towers,
        }
        results.save("A step of 512 lookups in tables of several sizes", tables, plot)


if __name__ == "__main__":
    main()
