"""Large models, batches and runs: time per step, peak memory and start of the Estimator, against loops by hand.

    python benchmarks/scale.py [--rounds 3] [--only table batches] [--save]
    python benchmarks/scale.py --quick       # small sizes, to see that it runs

Each case has a quarter of its size, and all of it, since cost must grow as the work does:

- variables: 500 and 2,000 of them, vectors of 16, of which a linear model takes the sum, with adam;
- variable: a single one of 256 MB and of 1 GB, with gradient descent;
- table: 2.5 and 10 million rows of 16 columns, of which a step looks up 4,096, with adagrad;
- batches: of 25 and 100 MB, for a linear model, from a generator;
- processes: 2 and 8 on this host, a tower each, with 4 MB of variables; the first one is measured.

Each side has processes of its own, and saves its first and its last state, by hand with orbax's checkpointer. The
Estimator has its default RunConfig. The figures are medians over rounds, the ratios medians of the rounds' ratios:

    case | of | by hand, ms | Estimator, ms | ratio | ratio, CPU       a step, once the first state is saved
    memory by hand, MB | memory, MB | ratio of memory                  the peak of the process
    start by hand, s | start, s | ratio of starts                      until the first step is done, without imports

- long: a run of 200,000 steps of a small model, with a checkpoint every 20,000, and there

    steps | steps per second | memory, MB | threads | open files

  In its second half they are no more than in the first, and the memory not by more than 2 %; else it is an error.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results

CASES = {  # what is counted; a quarter and all of it; the quick size; after how many steps to look at the clock
    "variables": ("variables", (500, 2000), 20, (1, 200, 600)),
    "variable": ("MB", (256, 1024), 4, (1, 4, 12)),
    "table": ("rows", (2_500_000, 10_000_000), 10_000, (1, 200, 1200)),
    "batches": ("MB each", (25, 100), 4, (1, 10, 50)),
    "processes": ("processes", (2, 8), 2, (1, 20, 120)),
}
LOOKUPS, COLUMNS = 4096, 16
LONG, BETWEEN = 200_000, 20_000  # steps of the long run, and from one look at it to the next
LONG_TABLE = "A run of 200,000 steps"
SIDES = "by hand", "Estimator"


@dataclasses.dataclass
class Work:
    """A case.

    Attributes:
      shapes: of the variables by name; the only one of `table` is looked up.
      loss: function of the variables, or of the rows that were looked up, and of a batch.
      tx: the optimizer.
      batch: the batch of this process, yielded at each step.
    """

    shapes: dict[str, tuple[int, ...]]
    loss: Callable[..., jax.Array]
    tx: optax.GradientTransformation
    batch: tuple[np.ndarray, np.ndarray]

    def initial(self) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        return {name: initializer(key, shape) for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)}


initializer = jax.nn.initializers.normal(0.05)


def work_of(case: str, size: int) -> Work:
    random = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    def linear_loss(variables: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ variables["w"] - y[:, None]) ** 2)

    def sum_loss(variables: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ jnp.concatenate([*variables.values()]).sum(0) - y) ** 2)

    def deep_loss(variables: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in variables.values():
            x = jnp.tanh(x @ w)
        return jnp.mean((x[:, 0] - y) ** 2)

    def rows_loss(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((rows.sum(1) - y) ** 2)

    match case:
        case "variables":
            shapes = {f"w{i}": (1, COLUMNS) for i in range(size)}
            return Work(shapes, sum_loss, optax.adam(1e-3), (floats(32, COLUMNS), floats(32)))
        case "variable":
            shape = 1024, size * 2**20 // 4 // 1024
            return Work({"w": shape}, linear_loss, optax.sgd(1e-3), (floats(4, 1024), floats(4)))
        case "table":
            batch = random.integers(0, size, LOOKUPS, np.int32), floats(LOOKUPS)
            return Work({"table": (size, COLUMNS)}, rows_loss, optax.adagrad(0.1), batch)
        case "batches":
            rows = size * 2**20 // 4 // 256
            return Work({"w": (256, 1)}, linear_loss, optax.sgd(1e-3), (floats(rows, 256), floats(rows)))
        case _:
            shapes = {"w0": (1024, 1008), "w1": (1008, 1)}
            return Work(shapes, deep_loss, optax.sgd(1e-3), (floats(32, 1024), floats(32)))


class Watch:
    """Notes when a run has done so many steps, and looks at the process. Call `done` where these are finished."""

    def __init__(self, marks: tuple[int, ...]) -> None:
        self.marks = marks
        self.called = time.time()
        self.times: list[tuple[float, float]] = []  # the clock, and what the process has used of all cores

    def done(self) -> None:
        self.times.append((time.time(), time.process_time()))

    def figures(self) -> dict[str, float]:
        first, begin, end = self.times
        time_of_step, cpu_of_step = ((b - a) / (self.marks[2] - self.marks[1]) for a, b in zip(begin, end, strict=True))
        return {
            "step": 1e3 * time_of_step,
            "CPU": 1e3 * cpu_of_step,
            "memory": status("VmHWM") / 1024,
            "start": first[0] - self.called,
        }


def status(field: str) -> float:
    """A number that Linux keeps of this process, such as VmRSS, its memory in kB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def by_hand(case: str, size: int, marks: tuple[int, ...], folder: str, processes: int) -> dict[str, float]:
    work, watch = work_of(case, size), Watch(marks)

    def step(state, x, y):
        variables, slots = state
        loss, gradients = jax.value_and_grad(work.loss)(variables, x, y)
        updates, slots = work.tx.update(gradients, slots, variables)
        return (optax.apply_updates(variables, updates), slots), loss

    def step_of_rows(state, ids, y):
        """The gradients of a row that occurs several times are added before adagrad squares them."""
        table, sums = state
        loss, gradients = jax.value_and_grad(work.loss)(table[ids], ids, y)
        once, which = jnp.unique(ids, return_inverse=True, size=ids.size, fill_value=len(table))
        total = jax.ops.segment_sum(gradients, which, ids.size)
        sums = sums.at[once].add(total**2, mode="drop")
        scale = -0.1 * jax.lax.rsqrt(sums.at[once].get(mode="clip") + 1e-7)
        return (table.at[once].add(scale * total, mode="drop"), sums), loss

    def initial():
        if case == "table":
            (table,) = work.initial().values()
            return table, jnp.full_like(table, 0.1)
        variables = work.initial()
        return variables, work.tx.init(variables)

    everywhere, place = None, lambda batch: batch
    if processes > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "tower")
        everywhere, rows = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("tower",)))
        place = functools.partial(jax.tree.map, functools.partial(jax.make_array_from_process_local_data, rows))
    program = jax.jit(step_of_rows if case == "table" else step, donate_argnums=0)
    state = jax.device_put(initial(), everywhere)  # XLA takes long for a program of thousands of random arrays
    checkpointer, in_flight = None, collections.deque()
    for i, batch in enumerate(batches(work, marks), 1):
        state, loss = program(state, *place(batch))
        in_flight.append(loss)
        if len(in_flight) > 2:
            in_flight.popleft().block_until_ready()
        if i in marks:
            loss.block_until_ready()
            watch.done()
        if i == 1:
            import orbax.checkpoint as ocp  # the Estimator imports it, too, when there is a loss

            checkpointer = ocp.StandardCheckpointer()
            checkpointer.save(os.path.join(folder, "first"), state)
        elif i == marks[1] - 1:
            checkpointer.wait_until_finished()
    checkpointer.save(os.path.join(folder, "last"), state)
    checkpointer.close()
    return watch.figures()


def batches(work: Work, marks: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return (work.batch for _ in range(marks[-1]))


def by_estimator(case: str, size: int, marks: tuple[int, ...], folder: str, processes: int) -> dict[str, float]:
    import estimator as est
    from replicate import TowerOptimizer, replicate_model_fn

    work, watch = work_of(case, size), Watch(marks)

    def model_fn(features, labels, mode):
        if case == "table":
            variables = est.embedding_lookup("table", features, work.shapes["table"], initializer=initializer)
        else:
            variables = {name: est.get_variable(name, shape, None, initializer) for name, shape in work.shapes.items()}
        loss = work.loss(variables, features, labels)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(work.tx).minimize(loss))

    class Clock(est.Hook):
        def next_step(self, step):
            return next((mark for mark in (1, marks[1] - 1, *marks[1:]) if mark > step), None)

        def after_run(self, context, values):
            if context.global_step == marks[1] - 1:
                while not os.path.exists(os.path.join(folder, "ckpt-0")):
                    time.sleep(0.01)
            else:
                float(values.loss)  # waits for the step
                watch.done()

    if processes > 1:
        model_fn = replicate_model_fn(model_fn)
    est.Estimator(model_fn, folder).train(lambda: batches(work, marks), hooks=[Clock()])
    return watch.figures()


def long_run(steps: int, between: int) -> list[dict[str, float]]:
    """What the process has, each time so many steps are done."""
    import estimator as est

    rows, begun = [], [time.time()]

    class Look(est.Hook):
        def next_step(self, step):
            return step - step % between + between

        def after_run(self, context, values):
            context.save()
            begun.append(time.time())
            row = {"steps": context.global_step, "steps per second": between / (begun[-1] - begun[-2])}
            row |= {"memory, MB": status("VmRSS") / 1024, "threads": status("Threads")}
            rows.append(row | {"open files": float(len(os.listdir("/proc/self/fd")))})
            print(", ".join(f"{name} {results.shown(value)}" for name, value in rows[-1].items()), flush=True)

    def model_fn(features, labels, mode):
        loss = est.losses.mean_squared_error(labels, est.layers.dense(est.layers.dense(features, 64, jnp.tanh), 1))
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(1e-3)).minimize(loss))

    random = np.random.default_rng(0)
    pairs = [tuple(random.standard_normal((128, width), np.float32) for width in (32, 1)) for _ in range(10)]
    est.Estimator(model_fn, tempfile.mkdtemp()).train(
        lambda: itertools.islice(itertools.cycle(pairs), steps), hooks=[Look()]
    )
    return rows


def check_flat(rows: list[dict[str, float]]) -> None:
    """Ends the process with an error if a long run takes more and more."""
    half = len(rows) // 2
    for name, tolerance in (("memory, MB", 1.02), ("threads", 1.0), ("open files", 1.0)):
        values = [row[name] for row in rows]
        before, after = max(values[:half]), max(values[half:])
        if after > tolerance * before:
            raise SystemExit(f"In a long run, {name} grow from {before} to {after}: {values}.")


def run(side: str, case: str, size: int, quick: bool) -> dict[str, float]:
    """The figures of the first process of a side."""
    processes = size if case == "processes" else 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = ["--side", side, "--only", case, "--size", str(size), "--folder", folder, "--port", str(port)]
        line = [sys.executable, __file__, *given, *["--quick"] * quick]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(results.ROOT)}
        started = [
            subprocess.Popen(
                [*line, "--index", str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for i in range(processes)
        ]
        outputs = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit(f"{' '.join(line)} failed:\n{''.join(output[-3000:] for output in outputs)}")
        return json.loads(outputs[0].splitlines()[-1])


def measure_side(arguments: argparse.Namespace) -> None:
    """What a process of a side does; the first one prints its figures."""
    (case,) = arguments.only
    processes = arguments.size if case == "processes" else 1
    marks = (1, 3, 6) if arguments.quick else CASES[case][-1]
    if processes > 1:
        from replicate import initialize_distributed

        address = f"127.0.0.1:{arguments.port}", processes, arguments.index
        (initialize_distributed if arguments.side == "Estimator" else jax.distributed.initialize)(*address)
    measure = {"by hand": by_hand, "Estimator": by_estimator}[arguments.side]
    print(json.dumps(measure(case, arguments.size, marks, arguments.folder, processes)))


def row_of(case: str, size: int, rounds: list[list[dict[str, float]]]) -> dict:
    """A row of the table, of the figures of both sides in each round."""

    def medians(key: str) -> tuple[float, float, float]:
        sides = zip(*[[figures[key] for figures in sides] for sides in rounds], strict=True)
        return *map(statistics.median, sides), statistics.median(b[key] / a[key] for a, b in rounds)

    row = {"case": case, "of": f"{size:,} {CASES[case][0]}"}
    for key, columns in (
        ("step", ("by hand, ms", "Estimator, ms", "ratio")),
        ("CPU", (None, None, "ratio, CPU")),
        ("memory", ("memory by hand, MB", "memory, MB", "ratio of memory")),
        ("start", ("start by hand, s", "start, s", "ratio of starts")),
    ):
        row |= {column: value for column, value in zip(columns, medians(key), strict=True) if column}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[*CASES, "long"], nargs="+", default=[*CASES, "long"])
    parser.add_argument("--quick", action="store_true", help="one round of small sizes, to see that it runs")
    results.add_option(parser)
    for name, kind in (("side", str), ("size", int), ("folder", str), ("port", int), ("index", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return measure_side(arguments)
    if arguments.save and arguments.quick:
        parser.error("--save is for the figures of the whole sizes; leave out --quick.")
    rows = []
    for case in (each for each in arguments.only if each != "long"):
        for size in [CASES[case][2]] if arguments.quick else CASES[case][1]:
            rounds = [
                [run(side, case, size, arguments.quick) for side in SIDES]
                for _ in range(1 if arguments.quick else arguments.rounds)
            ]
            rows.append(row_of(case, size, rounds))
            print(", ".join(f"{name} {results.shown(value)}" for name, value in rows[-1].items()), flush=True)
    looks = []
    if "long" in arguments.only:
        looks = long_run(*(2_000, 200) if arguments.quick else (LONG, BETWEEN))
        if not arguments.quick:  # whose threads are still being started
            check_flat(looks)
    if arguments.save:
        tables = {"": results.with_earlier(rows), LONG_TABLE: results.with_earlier(looks, LONG_TABLE)}
        plot = results.ratios(
            "time of a step / time by hand", {f"{row['case']}: {row['of']}": row["ratio"] for row in tables[""]}
        )
        results.save("Large models, batches and runs", tables, plot)
    return None


if __name__ == "__main__":
    main()
