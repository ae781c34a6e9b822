"""All that one GPU can show in ten minutes, compared with the loops that an expert of jax writes by hand.

    python benchmarks/gpu.py [--minutes 9] [--small] [--only mlp] [--json figures.json] [--save]

- mlp, transformer, resnet: the time of a training step, with float32 and bfloat16, and with RunConfig(steps_per_loop=1)
  and "auto", against a loop around one `jit`, or around a scan of 20 steps for the multi-layer perceptron and "auto".
  The time of the main thread and the CPU time of the process, per step, say what the host does. The losses of both
  sides are compared first;
- input: a step behind an input that sleeps for 20 ms. No side reads losses, so the loop by hand overlaps as well;
- memory-by-hand, memory-estimator: the peak of a training step, as the compiled program says, and as the device has
  counted it. A device counts the peak of a process, so each side has a process of its own;
- checkpoints: how long a save of 1 GB stops training, against orbax's asynchronous checkpointer by hand;
- prediction: examples per second, against a loop that computes a batch while it fetches the one before;
- tests: those marked `gpu`.

Both sides of a part alternate in one process, get the same numpy batches and the same optax optimizer, donate their
state, and keep at most two programs in flight; none is waited for but at the ends of what is timed. The Estimator has
its defaults, but saves no checkpoints where they are not what is measured. A time per step is a run of `2 n` steps less
one of `n`, after a round that compiles. Figures are medians over rounds, the ratio is the median of the rounds' ratios.
There are as many rounds as the time of a part allows. Each part is a process of its own: none finds the memory that
another has left behind, and one that fails leaves the others alone.

Without a GPU, and with `--small`, models are small, and the figures show only that the command works. `--save`, for the
figures of a GPU, writes the results, their page and picture.
"""

import argparse
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import checkpoints
import gpu_models
import input_pipeline
import jax
import numpy as np
import results
from absl import logging
from turns import in_turns, medians, per_step, rounds_within

import estimator as est

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"
DTYPES = {"float32": 1e-2, "bfloat16": 5e-2}  # and by how much losses may differ: a GPU multiplies float32 as tf32
LOOPS = 1, "auto"  # RunConfig(steps_per_loop=...)
MODELS = {  # how to make each, of real size and small
    "mlp": (
        gpu_models.mlp,
        {"widths": (784, 256, 256, 10), "batch_size": 128},
        {"widths": (64, 128, 10), "batch_size": 32},
    ),
    "transformer": (
        gpu_models.transformer,
        {"layers": 12, "width": 768, "heads": 12, "length": 512, "batch_size": 8, "words": 32000},
        {"layers": 1, "width": 96, "heads": 4, "length": 32, "batch_size": 16, "words": 256},
    ),
    "resnet": (
        gpu_models.resnet,
        {"stages": (3, 4, 6, 3), "width": 64, "size": 224, "batch_size": 64, "classes": 1000},
        {"stages": (1,), "width": 32, "size": 32, "batch_size": 32, "classes": 10},
    ),
}


def model_of(name, small, dtype):
    make, real_size, small_size = MODELS[name]
    return make(dtype, **(small_size if small else real_size))


def estimator_of(model, steps_per_loop=1):
    config = est.RunConfig(save_checkpoints_secs=None, save_checkpoints_steps=None, steps_per_loop=steps_per_loop)
    return est.Estimator(gpu_models.model_fn_of(model), tempfile.mkdtemp(), config)


def some(batches, count):
    return itertools.islice(itertools.cycle(batches), count)


def rounds_of(small, seconds):
    return rounds_within(seconds, least=2, most=2) if small else rounds_within(seconds, least=3, most=9)


def clocks():
    """Seconds: of the clock, of this thread, and of this process on all cores."""
    return np.array([time.perf_counter(), time.thread_time(), time.process_time()])


def enough_steps(run, base, small):
    """A multiple of `base` that takes some tenths of a second; the run is compiled already."""
    start = time.perf_counter()
    run(base)
    return base * math.ceil(min(40, (0.05 if small else 0.6) / (time.perf_counter() - start)))


def compared(columns, by_hand, estimator, ratio):
    """A row of a table: `columns`, and the figures of both sides."""
    return columns | {"by hand": by_hand, "Estimator": estimator, "ratio": ratio}


def steps(name, small, seconds):
    """The time per step, and what the host does in it."""
    end = time.monotonic() + seconds
    cases = list(zip(DTYPES, LOOPS, strict=True) if small else itertools.product(DTYPES, LOOPS))
    times, host, hands = [], [], {}
    for i, (dtype, steps_per_loop) in enumerate(cases):
        model = model_of(name, small, dtype)
        steps_by_hand = 1 if steps_per_loop == 1 else model.loop
        by_hand = hands.setdefault((dtype, steps_by_hand), gpu_models.ByHand(model, steps_by_hand))
        estimator = estimator_of(model, steps_per_loop)

        def theirs(n, by_hand=by_hand, model=model):
            by_hand.train(some(model.batches, n))

        def ours(n, estimator=estimator, model=model):
            estimator.train(lambda: some(model.batches, n))

        difference = difference_of_losses(by_hand, estimator, DTYPES[dtype])
        n = enough_steps(theirs, 100 if model.loop > 1 else 4, small)
        rounds = rounds_of(small, (end - time.monotonic()) / (len(cases) - i))
        rows = in_turns((theirs, ours), functools.partial(per_step, steps=n, clock=clocks), rounds)
        wall, thread, process = (medians([[side[clock] for side in row] for row in rows]) for clock in range(3))
        columns = {"model": name, "dtype": dtype, "steps_per_loop": steps_per_loop}
        times.append(
            compared(columns | {"unit": "ms"}, wall[0] * 1e3, wall[1] * 1e3, wall[2])
            | {"steps": n, "rounds": len(rows), "losses differ by": f"{difference:.1e}"}
        )
        for what, (a, b, ratio) in (("main thread", thread), ("process", process)):
            host.append(compared(columns | {"time of the": what, "unit": "us"}, a * 1e6, b * 1e6, ratio))
    return {"A training step": times, "The host, per step": host}


class LastLoss(est.Hook):
    def __init__(self, step):
        self._step = step

    def next_step(self, step):
        return self._step if step < self._step else None

    def after_run(self, context, values):
        self.value = float(values.loss)


def difference_of_losses(by_hand, estimator, tolerance):
    """Trains both sides for some steps; the relative difference of their last losses."""
    batches = list(some(by_hand.model.batches, max(4, by_hand.steps_per_program)))
    theirs = float(np.ravel(by_hand.train(batches))[-1])
    last = LastLoss(len(batches))
    estimator.train(lambda: batches, hooks=[last])
    difference = abs(last.value / theirs - 1)
    if not difference <= tolerance:
        raise AssertionError(f"After {len(batches)} steps the loss is {theirs} by hand, {last.value} of the Estimator.")
    return difference


def slow_input(small, seconds):
    """Steps behind an input that sleeps, and without."""
    step, sleep, n = (0.006, 0.004, 10) if small else (0.03, 0.02, 20)
    sines = input_pipeline.calibrated(step)
    loops = input_pipeline.by_hand(sines, waits=False), input_pipeline.by_estimator(sines, waits=False)
    sides = [functools.partial(run, pause) for pause in (0.0, sleep) for run in loops]
    rows = in_turns(sides, functools.partial(per_step, steps=n), rounds_of(small, seconds))
    without, behind = ([row[i : i + 2] for row in rows] for i in (0, 2))
    table = []
    for name, pairs in (("no input", without), (f"an input of {sleep * 1e3:g} ms", behind)):
        by_hand, estimator, ratio = medians(pairs)
        table.append(compared({"step behind": name, "unit": "ms"}, by_hand * 1e3, estimator * 1e3, ratio))
    hidden = statistics.median(b[1] / max(a[1], sleep) for a, b in zip(without, behind, strict=True))
    table[-1]["to the longer of the step and the input"] = hidden
    return {"A slow input": table}


def memory(side, small, seconds):
    """The peak of steps of the transformer: the states of both sides have the same arrays."""
    del seconds
    model = model_of("transformer", small, "float32")
    first = model.batches[0]
    if side == "by hand":
        by_hand = gpu_models.ByHand(model)
        state = jax.eval_shape(by_hand.state)
        stats = by_hand.program.lower(state, first).compile().memory_analysis()
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        donated = stats.alias_size_in_bytes
        peak = stats.argument_size_in_bytes + stats.output_size_in_bytes - donated + stats.temp_size_in_bytes
        by_hand.train(some(model.batches, 6))
    else:
        use = est.memory_report(gpu_models.model_fn_of(model), *first)["model_fn"]
        held, donated, peak = use.state, use.donated, use.peak
        estimator_of(model).train(lambda: some(model.batches, 6))
    counted = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # a CPU counts nothing
    megabytes = {"state": held, "donated": donated, "peak of the program": peak, "peak counted": counted}
    row = {f"{name}, MB": "" if count is None else count / 1e6 for name, count in megabytes.items()}
    return {"Memory": [{"side": side} | row]}


def saves(small, seconds):
    """How long saves stop training, how long they take, and steps meanwhile."""
    del seconds
    megabytes = 4 if small else 1000

    def measured(measure, *args):
        with tempfile.TemporaryDirectory() as directory:
            return measure(directory, megabytes, 2, 12, *args)

    theirs = functools.partial(measured, checkpoints.measure_saves_by_hand)
    ours = functools.partial(measured, checkpoints.measure_saves, True)
    [(by_hand, estimator)] = in_turns((theirs, ours), lambda side: side(), 1)
    names = {"stalls": "training stands still", "writes": "until it is on disk", "idle": "a step before and after"}
    names["writing"] = "a step while it is written"
    return {
        f"A checkpoint of {megabytes} MB": [
            compared({"time": text, "unit": "ms"}, by_hand[name] * 1e3, estimator[name] * 1e3, ratio)
            for name, text in names.items()
            if by_hand[name] is not None and estimator[name] is not None
            for ratio in [estimator[name] / by_hand[name]]
        ]
    }


def prediction(small, seconds):
    """Examples per second; the ratio is of times."""
    end, table = time.monotonic() + seconds, []
    logging.set_verbosity(logging.ERROR)  # each `predict` would say that it begins with initial values
    dtypes = list(DTYPES)[: 1 if small else None]
    for i, dtype in enumerate(dtypes):
        model = model_of("resnet", small, dtype)
        by_hand, estimator = gpu_models.ByHand(model), estimator_of(model)

        def theirs(n, by_hand=by_hand, model=model):
            return [each[:1] for each in by_hand.predict(some(model.batches, n))]

        def ours(n, estimator=estimator, model=model):
            predictions = estimator.predict(lambda: some(model.batches, n), yield_single_examples=False)
            return [each[:1] for each in predictions]

        a, b = np.float32(theirs(4)), np.float32(ours(4))
        np.testing.assert_allclose(a, b, atol=DTYPES[dtype] * np.abs(a).max())
        n = enough_steps(theirs, 4, small)
        rounds = rounds_of(small, (end - time.monotonic()) / (len(dtypes) - i))
        seconds_by_hand, seconds_ours, ratio = medians(
            in_turns((theirs, ours), functools.partial(per_step, steps=n), rounds)
        )
        rows = len(model.batches[0][0])
        columns = {"model": "resnet", "dtype": dtype, "unit": "examples/s"}
        table.append(compared(columns, rows / seconds_by_hand, rows / seconds_ours, ratio))
    return {"Prediction (ratio of times)": table}


def gpu_tests(seconds):
    """Runs the tests that are marked `gpu`, from the files that have any."""
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *files]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=TESTS.parent, timeout=seconds)
    print(done.stdout)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    return {"Tests marked `gpu`": [{"outcome": lines[-1]}]}, done.returncode


PARTS = {  # what to measure, and the share of the time
    "mlp": (functools.partial(steps, "mlp"), 60),
    "transformer": (functools.partial(steps, "transformer"), 100),
    "resnet": (functools.partial(steps, "resnet"), 140),
    "memory-by-hand": (functools.partial(memory, "by hand"), 25),  # behind the steps, whose programs it finds compiled
    "memory-estimator": (functools.partial(memory, "Estimator"), 25),
    "input": (slow_input, 35),
    "checkpoints": (saves, 60),
    "prediction": (prediction, 55),
    "tests": (None, 30),
}


def run_part(name, small, seconds, limit, env):
    """Measures a part in a process of its own; its tables, and None or what went wrong."""
    try:
        if name == "tests":
            tables, returncode = gpu_tests(limit)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "tables.json")
                command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds), "--json", path]
                returncode = subprocess.run([*command, *["--small"] * small], env=env, timeout=limit).returncode
                tables = {} if returncode else json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except subprocess.TimeoutExpired:
        return {}, f"{name} was ended after {limit:.0f} s"
    return tables, f"{name} failed" if returncode else None


def run_parts(names, small, minutes, env):
    """All tables by title, and what went wrong. The time that one part leaves goes to the next ones."""
    deadline = time.monotonic() + 60 * minutes
    tables, failures = {}, []
    for i, name in enumerate(names):
        left = deadline - time.monotonic()
        seconds = left * PARTS[name][1] / sum(PARTS[each][1] for each in names[i:])
        if left < 1:
            failures.append(f"{name} was left out: no time was left")
            continue
        print(f"{name}: about {seconds:.0f} s", flush=True)
        made, failure = run_part(name, small, seconds - 8, min(left, 2 * seconds + 30), env)
        failures += [failure] if failure else []
        for title, rows in made.items():
            print(f"\n{title}\n\n{results.table(rows)}\n", flush=True)
            tables.setdefault(title, []).extend(rows)
    if len(tables.get("Memory", [])) == 2:
        by_hand, estimator = tables["Memory"]
        for kind in ("peak of the program", "peak counted"):
            if estimator[f"{kind}, MB"]:
                estimator[f"{kind}, ratio"] = estimator[f"{kind}, MB"] / by_hand[f"{kind}, MB"]
    return tables, failures


def plot_of(tables):
    ratios = {}
    for title, rows in tables.items():
        for row in rows:
            if "ratio" in row and not title.startswith("The host"):
                texts = [f"{row[key]}" for key in list(row)[: list(row).index("unit")]]
                ratios[", ".join(["predict" if "Prediction" in title else "", *texts]).strip(", ")] = row["ratio"]
            ratios |= {f"memory, {key[: -len(', ratio')]}": row[key] for key in row if key.endswith(", ratio")}
    return results.ratios("time, or memory / by hand", ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="at most, for all parts; default: 9, and 15 in small")
    parser.add_argument("--small", action="store_true", help="small models, as where there is no GPU")
    parser.add_argument("--only", choices=PARTS, nargs="+", metavar="PART", help="some of: " + ", ".join(PARTS))
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    results.add_option(parser)
    arguments = parser.parse_args()
    if arguments.part:
        tables = PARTS[arguments.part][0](arguments.small, arguments.seconds)
        results.write(pathlib.Path(arguments.json), json.dumps(tables))
        return
    # Another process asks, since one that has seen a GPU holds most of its memory.
    probe = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend())"], stdout=subprocess.PIPE)
    backend = probe.stdout.decode().strip()
    if probe.returncode:
        parser.error("jax finds no device; see above.")
    small = arguments.small or backend == "cpu"
    if arguments.save and (small or arguments.only):
        parser.error(f"--save is for all figures of a GPU; this is {backend}, {'small' if small else 'some parts'}.")
    if backend == "cpu":
        print("There is no GPU: jax.default_backend() is 'cpu'. These figures show only that the command works.\n")
    minutes = arguments.minutes or (15 if small else 9)
    with tempfile.TemporaryDirectory() as cache:  # programs of both sides are tuned once, so they have the same kernels
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        tables, failures = run_parts(arguments.only or list(PARTS), small, minutes, env)
    title, note = "One GPU" if backend != "cpu" else "The command for a GPU, on a CPU", ". ".join(failures)
    if arguments.json:
        figures = results.figures_of(title, tables, plot_of(tables), note)
        results.write(pathlib.Path(arguments.json), json.dumps(figures, indent=1) + "\n")
    if failures:
        sys.exit(note)
    if arguments.save:
        results.save(title, tables, plot_of(tables))


if __name__ == "__main__":
    main()
