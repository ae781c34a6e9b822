"""Step time of towers that synchronize once per block, against synchronous training and against a loop written by hand.

    python benchmarks/block_sync.py [--rounds 9] [--only small] [--towers 2 4 8] [--save]

Two models trained by momentum: a small one, of two layers 64-32-10, and a larger one, of four layers of 512. All run
64 steps per program (`train_loop`), on 2, 4 and 8 towers (CPU devices, or GPUs where there are enough): synchronously,
in blocks of 1, 4, 16 and 64 steps, and, written by hand with `jax.pmap`, as 64 local steps and one average.

All get the same batches, in one process, in an order that turns from round to round; the time is the median over
rounds, the ratio to synchronous training the median of the rounds' ratios.

Blocks of 64 take about as long as the loop by hand. In the program of the larger model, XLA copies three of the four
variables in each step by hand, and none with BlockSync, whose update is a branch of its own; the averages at the ends
of blocks cost it two copies of each variable.
"""

import argparse
import collections
import statistics
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import results  # noqa: E402

import estimator as est  # noqa: E402
from replicate import BlockSync, TowerOptimizer, bmuf, replicate_model_fn  # noqa: E402

STEPS = 64  # in a program
MODELS = {"small": ((64, 32, 10), 64), "larger": ((512, 512, 512, 512, 512), 256)}  # widths, rows in a batch
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def forward(variables, x):
    for w in variables[:-1]:
        x = jnp.tanh(x @ w)
    return x @ variables[-1]


def model_fn(features, labels, mode, params):
    pairs = zip(params["widths"], params["widths"][1:], strict=False)
    variables = [est.get_variable(f"w{i}", shape) for i, shape in enumerate(pairs)]
    loss = jnp.mean((forward(variables, features) - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(OPTIMIZER).minimize(loss))


def estimators_way(block_sync, devices, widths, batches):
    """A function that runs the steps of one program."""
    replicated = replicate_model_fn(model_fn, devices=devices, block_sync=block_sync)
    model = est.transform(replicated, {"widths": widths}, donate=True)
    state = model.init(jax.random.key(0), *(x[0] for x in batches))

    def run():
        nonlocal state
        state, spec = model.train_loop(state, batches)
        jax.block_until_ready((state, spec.loss))

    return run


def by_hand(devices, widths, batches):
    """The same for local steps and one average, as one writes it without a library."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    variables = [0.05 * jax.random.normal(k, shape) for k, *shape in zip(keys, widths, widths[1:], strict=False)]
    slots = OPTIMIZER.init(variables)

    def block(variables, slots, batches):
        def step(carry, batch):
            variables, slots = carry
            loss, gradients = jax.value_and_grad(lambda v: jnp.mean((forward(v, batch[0]) - batch[1]) ** 2))(variables)
            updates, slots = OPTIMIZER.update(gradients, slots, variables)
            return (optax.apply_updates(variables, updates), slots), loss

        (variables, slots), losses = jax.lax.scan(step, (variables, slots), batches)
        return jax.lax.pmean(variables, "tower"), slots, losses

    towers = len(devices)
    mapped = jax.pmap(block, axis_name="tower", devices=devices)
    program = jax.jit(mapped, donate_argnums=(0, 1))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (towers, *x.shape)), (variables, slots))

    def split(x):
        return x.reshape(STEPS, towers, x.shape[1] // towers, *x.shape[2:]).swapaxes(0, 1)

    def run():
        nonlocal state
        *state, losses = program(*state, jax.tree.map(split, batches))
        jax.block_until_ready((state, losses))

    return run


def measure(devices, widths, rows, rounds):
    """The microseconds per step of the rounds, by name."""
    rng = np.random.default_rng(0)
    batches = tuple(rng.normal(size=(STEPS, rows, n)).astype(np.float32) for n in (widths[0], widths[-1]))
    runs = {"synchronous": estimators_way(None, devices, widths, batches)}
    for steps in (1, 4, 16, 64):
        runs[f"block of {steps}"] = estimators_way(BlockSync(steps, bmuf()), devices, widths, batches)
    runs["by hand, 64"] = by_hand(devices, widths, batches)
    times = {name: [] for name in runs}
    order = collections.deque(runs)
    for i in range(rounds + 1):
        for name in order:
            start = time.perf_counter()
            runs[name]()
            if i:  # the first round compiles
                times[name].append((time.perf_counter() - start) / STEPS * 1e6)
        order.rotate(1)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8])
    results.add_option(parser)
    arguments = parser.parse_args()
    measured = []
    print(f"{'model':8}{'towers':>6}  {'':14}{'step':>12}{'ratio':>7}")
    for name, (widths, rows) in MODELS.items():
        if arguments.only not in (None, name):
            continue
        for towers in arguments.towers:
            devices = jax.local_devices()[:towers]
            if len(devices) < towers:
                print(f"{name:8}{towers:6}  (only {len(devices)} devices)")
                continue
            times = measure(devices, widths, rows, arguments.rounds)
            for way, mine in times.items():
                ratio = statistics.median(a / b for a, b in zip(mine, times["synchronous"], strict=True))
                print(f"{name:8}{towers:6}  {way:14}{statistics.median(mine):9.0f} us{ratio:7.2f}", flush=True)
                measured.append(
                    {"model": name, "towers": towers, "way": way, "us": statistics.median(mine), "ratio": ratio}
                )
    if arguments.save:
        measured, panels = results.with_earlier(measured), {}
        for row in measured:
            if row["way"].startswith("block of "):
                line = panels.setdefault(row["model"], {}).setdefault(f"{row['towers']} towers", [])
                line.append([int(row["way"].removeprefix("block of ")), row["ratio"]])
        plot = results.lines("steps in a block", "time / time of synchronous training", panels)
        title = "Step time with one synchronization per block, as ratios to synchronous training"
        results.save(title, {"": measured}, plot)


if __name__ == "__main__":
    main()
