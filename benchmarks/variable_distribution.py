"""Step time and bytes of state per device of every variable distribution, against MIRRORED.

    python benchmarks/variable_distribution.py [--rounds 9] [--only small] [--towers 2 4 8] [--save]

Two models trained by adam, one of many small variables (200 of [32, 32]) and one of few large ones (4 of
[1024, 1024]), on 2, 4 and 8 towers (CPU devices, or GPUs where there are enough).

What is timed is `train_step` of `est.transform(..., donate=True)`, at most two steps in flight. All distributions get
the same batch, in one process, in an order that turns from round to round; the time is the median over rounds, the
ratio the median of the rounds' ratios. The bytes are variables and optimizer slots on the device with the most.

What remains of the ratio of SHARED_* are programs and transfers, one after another, where MIRRORED has one program:
for each device of variables one that packs them, a transfer to the towers, and one that updates them after a transfer
of the gradients, which jax makes by way of the host (its copy of an array of several devices to one waits for it).
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
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn  # noqa: E402

MODELS = {  # number of variables, width, batch size, steps per measurement
    "small": (200, 32, 64, 30),
    "large": (4, 1024, 64, 10),
}


def model_fn(features, labels, mode, params):
    x = features
    for i in range(params["variables"]):
        x = x + 0.1 * jnp.tanh(x @ est.get_variable(f"w{i}", (params["width"], params["width"])))
    loss = jnp.mean((x - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.adam(1e-3)).minimize(loss))


class Trainer:
    """A model in training, with all its variables placed by one distribution."""

    def __init__(self, distribution, devices, params, batch):
        replicated = replicate_model_fn(model_fn, devices=devices, variable_distribution=distribution)
        self.model = est.transform(replicated, params, donate=True)
        self.state = self.model.init(jax.random.key(0), *batch)
        self.batch = batch

    def bytes_per_device(self):
        sizes = collections.Counter()
        for leaf in jax.tree.leaves((self.state.variables, self.state.slots)):
            for shard in leaf.addressable_shards:
                sizes[shard.device] += shard.data.nbytes
        return max(sizes.values())

    def microseconds_per_step(self, steps):
        in_flight = collections.deque()
        start = time.perf_counter()
        for _ in range(steps):
            self.state, spec = self.model.train_step(self.state, *self.batch)
            in_flight.append(spec.loss)
            if len(in_flight) > 2:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / steps * 1e6


def measure(devices, params, batch, steps, rounds):
    """The times of the rounds and the bytes per device, by distribution."""
    trainers = {distribution: Trainer(distribution, devices, params, batch) for distribution in VariableDistribution}
    times = {distribution: [] for distribution in trainers}
    order = collections.deque(trainers)
    for i in range(rounds + 1):
        for distribution in order:
            microseconds = trainers[distribution].microseconds_per_step(steps)
            if i:  # the first round compiles
                times[distribution].append(microseconds)
        order.rotate(1)
    return {distribution: (times[distribution], trainers[distribution].bytes_per_device()) for distribution in trainers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8])
    results.add_option(parser)
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':6}{'towers':>7}  {'distribution':30}{'step':>12}{'ratio':>7}{'bytes/device':>14}{'ratio':>7}")
    for name, (variables, width, batch_size, steps) in MODELS.items():
        if arguments.only not in (None, name):
            continue
        params = {"variables": variables, "width": width}
        batch = tuple(np.random.default_rng(0).normal(size=(2, batch_size, width)).astype(np.float32))
        for towers in arguments.towers:
            devices = jax.local_devices()[:towers]
            if len(devices) < towers:
                print(f"{name:6}{towers:7}  (only {len(devices)} devices)")
                continue
            measured = measure(devices, params, batch, steps, arguments.rounds)
            mirrored_times, mirrored_bytes = measured[VariableDistribution.MIRRORED]
            for distribution, (times, size) in measured.items():
                ratio = statistics.median(a / b for a, b in zip(times, mirrored_times, strict=True))
                print(
                    f"{name:6}{towers:7}  {distribution:30}{statistics.median(times):9.0f} us{ratio:7.2f}"
                    f"{size:14,}{size / mirrored_bytes:7.2f}",
                    flush=True,
                )
                row = {"model": name, "towers": towers, "distribution": str(distribution)}
                rows.append(row | {"us": statistics.median(times), "time": ratio, "bytes": size / mirrored_bytes})
    if arguments.save:
        rows, panels = results.with_earlier(rows), {}
        for row in rows:
            line = panels.setdefault(row["model"], {}).setdefault(row["distribution"], [])
            line.append([row["towers"], row["time"]])
        plot = results.lines("towers", "time / time of MIRRORED", panels)
        results.save("Step time of variable distributions, as ratios to MIRRORED", {"": rows}, plot)


if __name__ == "__main__":
    main()
