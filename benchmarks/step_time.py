"""Microseconds per training step, compared with loops written by hand.

    python benchmarks/step_time.py [--rounds 9] [--only small] [--towers 1 2 4] [--save]

Two models, multi-layer perceptrons, on 1, 2 and 4 towers (CPU devices, or GPUs where there are enough):

- `Estimator.train` with one step per program, against a loop around one `jit`, or `jit(pmap)` with one packed psum;
- `Estimator.train` with RunConfig(steps_per_loop=20), against a loop around a `lax.scan` of 20 such steps.

Both sides get the same numpy batches and the same optax optimizer, donate their state, and keep at most two programs
in flight. The Estimator has its defaults: it checks for NaN and logs every 100 steps; the time includes no
checkpoint. Runs alternate in one process; the figure is the median over rounds, the ratio the median of the rounds'
ratios. The last column is the Estimator with `on_nan="skip"` over the Estimator without. In the compiled program of a
small step on CPU devices that is, for each device, one kernel per large gradient (two per small one) that looks at it,
two branches with a conversion of the condition each (0.8 us of 23 on one device), and one copy of each small gradient
out of the packed sum, since XLA fuses nothing into a branch. Without the branches XLA copies what the
optimizer reads, or computes its moments twice: that takes two times as long.
"""

import argparse
import itertools
import statistics
import tempfile

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import results  # noqa: E402
from jax.flatten_util import ravel_pytree  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from turns import in_turns, medians, per_step, run_by_hand  # noqa: E402

import estimator as est  # noqa: E402
from replicate import TowerOptimizer, replicate_model_fn  # noqa: E402

LOOP = 20
MODELS = {  # widths of a multi-layer perceptron, batch size, steps per measurement
    "small": ((32, 64, 1), 128, 2000),
    "larger": ((512, 1024, 1024, 10), 256, 24),
}


def initial(widths):
    random = np.random.default_rng(0)
    return {
        f"{kind}{i}": np.float32(random.normal(size=shape) * 0.05)
        for i, (a, b) in enumerate(itertools.pairwise(widths))
        for kind, shape in (("w", (a, b)), ("b", (b,)))
    }


def mean_loss(variables, x, y):
    layers = len(variables) // 2
    for i in range(layers):
        x = x @ variables[f"w{i}"] + variables[f"b{i}"]
        x = jax.nn.relu(x) if i < layers - 1 else x
    return jnp.mean((x - y) ** 2)


def optimizer():
    return optax.adam(1e-3)


def estimator_run(widths, devices, steps_per_loop, on_nan=None):
    def model_fn(features, labels, mode):
        variables = {name: est.get_variable(name, initializer=value) for name, value in initial(widths).items()}
        loss = mean_loss(variables, features, labels)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optimizer()).minimize(loss))

    if len(devices) > 1 or on_nan:
        model_fn = replicate_model_fn(model_fn, devices=devices, on_nan=on_nan)
    config = est.RunConfig(save_checkpoints_secs=None, save_checkpoints_steps=None, steps_per_loop=steps_per_loop)
    estimator = est.Estimator(model_fn, tempfile.mkdtemp(), config)
    return lambda batches: estimator.train(lambda: batches)


def hand_written_step(devices):
    """One training step by hand: plain, or a pmap within the jit with one packed psum."""
    tx = optimizer()

    def update(variables, slots, gradients):
        updates, slots = tx.update(gradients, slots, variables)
        return optax.apply_updates(variables, updates), slots

    if len(devices) == 1:

        def step(state, batch):
            loss, gradients = jax.value_and_grad(mean_loss)(state[0], *batch)
            return update(*state, gradients), loss

        return step

    def tower(variables, batch):
        packed, unpack = ravel_pytree(jax.value_and_grad(mean_loss)(variables, *batch))
        return unpack(jax.lax.pmean(packed, "batch"))

    mapped = jax.pmap(tower, axis_name="batch", in_axes=(None, 0), out_axes=None, devices=devices)

    def step(state, batch):
        split = jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), batch)
        loss, gradients = mapped(state[0], split)
        return update(*state, gradients), loss

    return step


def hand_written_run(widths, devices, steps_per_loop):
    step = hand_written_step(devices)
    if steps_per_loop > 1:
        one_step = step

        def step(state, batches):
            return jax.lax.scan(one_step, state, batches)

    shardings = {}
    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("batch",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        split = PartitionSpec("batch") if steps_per_loop == 1 else PartitionSpec(None, "batch")
        shardings = {
            "in_shardings": (everywhere, NamedSharding(mesh, split)),
            "out_shardings": (everywhere, everywhere),
        }
    program = jax.jit(step, donate_argnums=0, **shardings)

    def run(batches):
        variables = jax.tree.map(jnp.asarray, initial(widths))
        state = (variables, optimizer().init(variables))
        if shardings:
            state = jax.device_put(state, everywhere)
        run_by_hand(program, state, batches, steps_per_loop)

    return run


def microseconds_per_step(run, batches):
    return per_step(lambda n: run(batches[:n]), len(batches) // 2) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--towers", type=int, nargs="+", default=[1, 2, 4])
    results.add_option(parser)
    arguments = parser.parse_args()
    measured = []
    print(f"{'model':8}{'towers':>7}{'steps/program':>15}{'by hand':>12}{'Estimator':>12}{'ratio':>8}{'on_nan':>8}")
    for model, (widths, batch_size, steps) in MODELS.items():
        if arguments.only not in (None, model):
            continue
        random = np.random.default_rng(1)
        distinct = [
            (
                random.normal(size=(batch_size, widths[0])).astype(np.float32),
                random.normal(size=(batch_size, widths[-1])).astype(np.float32),
            )
            for _ in range(10)
        ]
        batches = list(itertools.islice(itertools.cycle(distinct), 2 * steps))
        for towers, steps_per_loop in itertools.product(arguments.towers, (1, LOOP)):
            devices = jax.local_devices()[:towers]
            if len(devices) < towers:
                print(f"{model:8}{towers:7}  (only {len(devices)} devices)")
                continue
            ours = estimator_run(widths, devices, steps_per_loop)
            watched = estimator_run(widths, devices, steps_per_loop, on_nan="skip")
            theirs = hand_written_run(widths, devices, steps_per_loop)
            sides = (theirs, ours, watched)
            rows = in_turns(sides, lambda run: microseconds_per_step(run, batches), arguments.rounds)  # noqa: B023
            by_hand, estimator, ratio = medians([row[:2] for row in rows])
            on_nan = statistics.median(c / b for _, b, c in rows)
            print(
                f"{model:8}{towers:7}{steps_per_loop:15}{by_hand:9.1f} us{estimator:9.1f} us{ratio:8.2f}{on_nan:8.2f}",
                flush=True,
            )
            row = {"model": model, "towers": towers, "steps per program": steps_per_loop}
            measured.append(
                row | {"by hand, us": by_hand, "Estimator, us": estimator, "ratio": ratio, "on_nan": on_nan}
            )
    if arguments.save:
        rows = results.with_earlier(measured)
        named = {}
        for row in rows:
            case = f"{row['model']}, {row['towers']} towers, {row['steps per program']} steps"
            named |= {case: row["ratio"], f"{case}: on_nan / without": row["on_nan"]}
        plot = results.ratios("time / time by hand", named)
        results.save("A step, with 1 and 20 steps per program", {"": rows}, plot)


if __name__ == "__main__":
    main()
