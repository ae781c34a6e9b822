"""Time per step in several processes, and the part of the network: measured, and by a model up to 1,024 towers.

    python benchmarks/processes.py [--groups 2x1 4x1 3x1] [--repeats 2] [--results FILE] [--png FILE] [--save]

A group, say 2x1, is two processes of one CPU device each, on this host; they communicate over its loopback device. It
measures, with gradients of 10^3 to 10^7 floats: their sum over the towers; a step of `Estimator.train` of a model that
has little else to do; and how the processes agree before each chunk of training: the exchange of their batches,
`ProcessGroup.all_gather`, and the broadcast of process 0's plan. It counts the bytes of a sum (on Linux).

Other programs on the host, and the group's own processes, only increase a time. So there are many short rounds, and the
figure is the fastest round of all repeats; `spread` is the ratio of the slowest repeat's fastest round to it.

The latency and the bandwidth of a model of the network (network_model.py) are fitted to the sums of two towers, and
checked with the sums of more towers. On CPU devices XLA sums by a ring, in which towers of a process use loopback too.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import results
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.lines import Line2D
from network_model import ALGORITHMS, Link, Network, traffic

import estimator as est
from estimator.multihost._key_value_group import KeyValueGroup
from estimator.multihost._process_group import CALLS
from replicate import TowerOptimizer, initialize_distributed, replicate_model_fn

SIZES = [10**exponent for exponent in range(3, 8)]  # floats
GROUPS = ["1x1", "2x1", "3x1", "4x1", "2x2"]
FITTED = "2x1"  # two towers, which do not wait for a processor; the others check the model
# Otherwise glibc gets arrays of more than 32 MB from the kernel each time, which costs more than to sum them.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11)}
TOWERS = [2**exponent for exponent in range(1, 11)]
GIGABIT = 1e9 / 8
NETWORKS = {  # nominal, not measured; the bandwidth inside is per tower, across per host
    "10 Gbit/s": Network(8, Link(5e-6, 20e9), Link(30e-6, 10 * GIGABIT)),
    "100 Gbit/s": Network(8, Link(5e-6, 20e9), Link(10e-6, 100 * GIGABIT)),
    "NVLink and 8 x 400 Gbit/s InfiniBand": Network(8, Link(2e-6, 450e9), Link(5e-6, 3200 * GIGABIT)),
}


def times_of(call, repeats, rounds, finish=lambda: None):
    """Seconds per call in each round."""
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        finish()
        yield (time.perf_counter() - start) / repeats


def sent():
    """The bytes that the loopback device has sent so far; 0 if unknown."""
    path = pathlib.Path("/proc/net/dev")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def time_of_sum(size):
    """Seconds, and bytes sent, of a sum of `size` floats over all towers."""
    devices = jax.devices()
    by_tower = NamedSharding(Mesh(np.array(devices), "tower"), PartitionSpec("tower"))
    state = [jax.make_array_from_callback((len(devices) * size,), by_tower, lambda index: np.ones(size, np.float32))]
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(x, "tower"), mesh=by_tower.mesh, in_specs=by_tower.spec, out_specs=by_tower.spec
    )
    program = jax.jit(mean, donate_argnums=0)

    def call():
        state[0] = program(state[0]).block_until_ready()

    seconds, counted = [], []
    repeats = max(2, min(5, 10**6 // size))
    call()  # which compiles
    for _ in range(max(20, min(300, 10**8 // size))):
        before = sent()
        seconds += times_of(call, repeats, 1)
        counted.append((sent() - before) / repeats)
    return min(seconds), statistics.median(counted)


class Clock(est.Hook):
    """Notes the time after every N steps."""

    def __init__(self, every):
        self.every, self.times = every, []

    def next_step(self, step):
        return step - step % self.every + self.every

    def after_run(self, context, values):
        jax.block_until_ready(context.state.variables)
        self.times.append(time.perf_counter())


def time_of_step(size, model_dir):
    """Seconds per step of a model with one variable of `size` floats."""

    def model_fn(features, labels, mode):
        del labels
        weights = est.get_variable("weights", (size,), initializer=jax.nn.initializers.ones)
        loss = (weights**2).mean() * features.mean()
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    clock, rounds = Clock(max(5, min(50, 5 * 10**6 // size))), max(12, min(40, 10**8 // size))
    config = est.RunConfig(save_checkpoints_secs=None, save_summary_steps=None, log_step_count_steps=None)
    estimator = est.Estimator(replicate_model_fn(model_fn), model_dir, config)
    batch = np.ones(jax.local_device_count(), np.float32)
    estimator.train(lambda: itertools.repeat(batch), hooks=[clock], steps=rounds * clock.every)
    return min(np.diff(clock.times)[1:]) / clock.every


def measure(path):
    """Runs in each process of a group; the first writes the measurements to a file."""
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    initialize_distributed(timeout_secs=120)
    figures = {"sum": {}, "bytes": {}, "step": {}}
    for size in SIZES:
        figures["sum"][size], figures["bytes"][size] = time_of_sum(size)
        figures["step"][size] = time_of_step(size, os.path.join(os.path.dirname(path), f"model{size}"))
    if jax.process_count() > 1:
        group = KeyValueGroup("benchmark", CALLS.group)
        figures["exchange"] = min(times_of(lambda: group.all_gather(None), 10, 100))
        # Process 0 does not wait for the others, so they synchronize at the end.
        figures["plan"] = min(
            times_of(lambda: group.broadcast_from_chief(lambda: None), 90, 20, lambda: group.all_gather(None))
        )
    if jax.process_index() == 0:
        with open(path, "w") as file:
            json.dump(figures, file)


def run(group):
    """The measurements of the first process of a group."""
    processes, devices = map(int, group.split("x"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = {"worker": [f"127.0.0.1:{listener.getsockname()[1]}"] * processes}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        started = []
        for index in range(processes):
            task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            env = os.environ | {"TF_CONFIG": task, "DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} | KEEP_MEMORY
            command = [sys.executable, __file__, "--measure", path]
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
        if any([process.wait() for process in started]):
            sys.exit(f"A process of {group} has failed.")
        with open(path) as file:
            return json.load(file)


def fastest(repeats):
    """The smallest figure of some repeats, and the ratio of the largest to it."""
    if isinstance(repeats[0], dict):
        keys = {int(key) if key.isdigit() else key: key for key in repeats[0]}  # JSON has no other keys
        return {name: fastest([figures[key] for figures in repeats]) for name, key in keys.items()}
    return min(repeats), max(repeats) / max(min(repeats), 1e-12)


def ring(group, size):
    return traffic("ring", towers_of(group), 1, 4 * size)


def towers_of(group):
    return math.prod(map(int, group.split("x")))


def fitted(measured):
    """The link, the same for all towers, with the least relative errors."""
    points = [(ring(FITTED, size), measured[FITTED]["sum"][size][0]) for size in SIZES]
    rows = np.array([[each.rounds_across / seconds, each.bytes_across / seconds] for each, seconds in points])
    latency, seconds_per_byte = np.linalg.lstsq(rows, np.ones(len(rows)))[0]
    return Link(latency, 1 / seconds_per_byte)


def show(measured, link):
    """Prints the measurements beside the model's predictions."""
    alone, processors = measured["1x1"]["step"], os.cpu_count()
    print(f"{'':16}{'sum':>10}{'spread':>8}{'model':>10}{'ratio':>7}{'bytes':>7}", end="")
    print(f"{'step':>12}{'spread':>8}{'model':>10}{'ratio':>7}")
    for group, figures in measured.items():
        towers = towers_of(group)
        for size in SIZES:
            (seconds, spread), (step, step_spread) = figures["sum"][size], figures["step"][size]
            expected = ring(group, size)
            model = expected.seconds(Network(1, link, link))
            model_step = model + alone[size][0] * max(1, towers / processors)
            line = f"{group:6}{size:10}{seconds * 1e6:10.0f}{spread:8.2f}"
            if "exchange" in figures:
                counted = figures["bytes"][size][0] / towers / expected.bytes_across
                line += f"{model * 1e6:10.0f}{model / seconds:7.2f}{counted:7.2f}"
                line += f"{step * 1e6:12.0f}{step_spread:8.2f}{model_step * 1e6:10.0f}{model_step / step:7.2f}"
            else:
                line += f"{'':24}{step * 1e6:12.0f}{step_spread:8.2f}"
            print(line)
    print(
        f"\nmicroseconds; model: latency {link.latency * 1e6:.0f} us, bandwidth {link.bandwidth / 1e9:.2f} GB/s", end=""
    )
    print(f", fitted to {FITTED}; bytes: counted / model\n")
    for group, figures in measured.items():
        if "exchange" in figures:
            (exchange, spread), (plan, plan_spread) = figures["exchange"], figures["plan"]
            print(f"{group:6} exchange {exchange * 1e6:.0f} us ({spread:.2f})", end=", ")
            print(f"plan of process 0 {plan * 1e6:.0f} us ({plan_spread:.2f})")


def draw(path, measured, link):
    """Draws the measurements, and the model's predictions for other networks."""
    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 10})
    figure, axes = plt.subplots(2, 3, figsize=(15, 9.5))
    networks = {"as measured here, one tower per host": Network(1, link, link)} | NETWORKS
    draw_measured(axes[0, 0], measured, link)
    draw_seconds(axes[0, 1], networks, 4e3, "4 KB")
    draw_seconds(axes[0, 2], networks, 1e8, "100 MB")
    draw_agreements(axes[1, 0], measured)
    draw_traffic(axes[1, 1], lambda total: total.rounds, "Sequential messages per step")
    draw_traffic(
        axes[1, 2], lambda total: total.bytes_across, "Bytes over a host's link per step, in sizes of the gradients"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def save(measured, link):
    """Keeps the measurements, and the model's predictions of the sums, in microseconds."""
    rows, lines = [], {}
    for group, figures in measured.items():
        for what in ("sum", "step") if "exchange" in figures else ("step",):
            micros = {size: figures[what][size][0] * 1e6 for size in SIZES}
            rows.append({"microseconds": f"{what} of {group}"} | {f"{size:,} floats": micros[size] for size in SIZES})
            lines[f"{what} of {group}"] = [[size, micros[size]] for size in SIZES]
        model = {f"{size:,} floats": ring(group, size).seconds(Network(1, link, link)) * 1e6 for size in SIZES}
        rows.append({"microseconds": f"sum of {group}, by the model"} | model)
    model = f"{link.latency * 1e6:.0f} us and {link.bandwidth / 1e9:.2f} GB/s"
    note = f"The model has a latency and a bandwidth of {model}, fitted to {FITTED}."
    results.save(
        "Sums and steps in several processes", {"": rows}, results.lines("floats", "microseconds", {"": lines}), note
    )


STYLES = dict(zip(ALGORITHMS, ("-", "--", "-.", ":"), strict=True))
NAMES = {"recursive_halving_doubling": "halving and doubling"}


def draw_measured(axis, measured, link):
    groups = [group for group in measured if "exchange" in measured[group]]
    for i, group in enumerate(groups):
        axis.plot(SIZES, [measured[group]["sum"][size][0] for size in SIZES], "o", color=f"C{i}", label=group)
        model = [ring(group, size).seconds(Network(1, link, link)) for size in SIZES]
        axis.plot(SIZES, model, color=f"C{i}", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="floats", ylabel="seconds")
    axis.set_title("A sum over the towers, measured (dots) and by the model")
    axis.legend(title="processes x devices")


def draw_seconds(axis, networks, size, name):
    for i, network in enumerate(networks.values()):
        for algorithm, style in STYLES.items():
            if network.towers_per_host > 1 or algorithm in ("ring", "tree"):  # the others are one of these
                totals = [traffic(algorithm, *hosts_of(n, network.towers_per_host), size) for n in TOWERS]
                axis.plot(TOWERS, [each.seconds(network) for each in totals], style, color=f"C{i}", linewidth=1.3)
    handles = [Line2D([], [], color=f"C{i}", label=name) for i, name in enumerate(networks)]
    over_towers(axis, f"Seconds that a sum of {name} takes per step, by the model")
    axis.set_ylabel("seconds")
    axis.set_ylim(top=30 * axis.get_ylim()[1])  # room for the legend
    axis.legend(handles=handles, loc="upper left", fontsize=8, title="lines as in the pictures below")


def draw_traffic(axis, value, title):
    for algorithm, style in STYLES.items():
        values = {n: value(traffic(algorithm, *hosts_of(n, 8), 1)) for n in TOWERS}
        values = {n: each for n, each in values.items() if each}  # one host sends nothing
        axis.plot(values.keys(), values.values(), style, color="black", label=NAMES.get(algorithm, algorithm))
    over_towers(axis, title)
    axis.legend(title="8 towers per host")


def draw_agreements(axis, measured):
    hosts = [n // 8 for n in TOWERS if n >= 16]
    for i, (name, label) in enumerate({"exchange": "each gives its word", "plan": "process 0 gives its plan"}.items()):
        times = {int(group.split("x")[0]): each[name][0] for group, each in measured.items() if name in each}
        axis.plot(times.keys(), times.values(), "o", color=f"C{i}", label=label)
        slope, constant = np.polyfit(list(times), list(times.values()), 1)
        axis.plot(hosts, [constant + slope * n for n in hosts], color=f"C{i}", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set(yscale="log", xlabel="processes", ylabel="seconds")
    axis.set_title("An agreement per piece, measured (dots) and a straight line")
    axis.legend()


def over_towers(axis, title):
    axis.set_xscale("log", base=2)
    axis.set(yscale="log", xlabel="towers", title=title, xlim=(TOWERS[0], TOWERS[-1]))


def hosts_of(towers, per_host):
    """How many hosts, and towers on each."""
    return max(1, towers // per_host), min(towers, per_host)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", default=GROUPS, help="which to measure")
    parser.add_argument("--repeats", type=int, default=2, help="how often")
    parser.add_argument("--results", help="a file of earlier measurements, to which these are added")
    parser.add_argument("--png", help="where to draw")
    results.add_option(parser)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(arguments.measure)
    kept = pathlib.Path(arguments.results or os.devnull)
    runs = json.loads(kept.read_text() or "[]") if kept.exists() else []
    for _ in range(arguments.repeats):
        for group in arguments.groups:
            runs.append([group, run(group)])
            kept.write_text(json.dumps(runs))
    measured = {group: fastest([each for name, each in runs if name == group]) for group, _ in runs}
    link = fitted(measured)
    show(measured, link)
    if arguments.png:
        draw(arguments.png, measured, link)
    if arguments.save:
        save(measured, link)


if __name__ == "__main__":
    main()
