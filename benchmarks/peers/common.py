"""What all sides of the comparison share: models' sizes, data, initial values, and the clock. It needs numpy alone."""

import argparse
import dataclasses
import json
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LEARNING_RATE, ADAM_EPSILON, NORM_EPSILON = 1e-3, 1e-8, 1e-5
MAC = sys.platform == "darwin"  # which counts memory in bytes
VOCABULARY, WIDTH, LENGTH, BLOCKS, HEADS = 64, 64, 32, 2, 4
MODELS = {"mlp": "MLP 32-64-1", "cnn": "small CNN", "transformer": "small transformer"}


@dataclasses.dataclass(frozen=True)
class Work:
    """One epoch over `x` and `y`, in order: `steps` batches of `batch_size` rows, the first `warm` of them untimed."""

    model: str
    batch_size: int
    warm: int
    steps: int
    x: np.ndarray
    y: np.ndarray

    @property
    def marks(self) -> tuple[int, int, int]:
        """After how many steps to look at the clock."""
        return 1, self.warm, self.steps

    def initial(self) -> dict[str, np.ndarray]:
        """The initial values; kernels are `[inputs, outputs]` and `[height, width, inputs, outputs]`."""
        return {"mlp": _initial_mlp, "cnn": _initial_cnn, "transformer": _initial_transformer}[self.model]()


def work_of(model: str, quick: bool = False) -> Work:
    batch_size, warm, steps = {"mlp": (128, 1000, 5000), "cnn": (64, 40, 120), "transformer": (32, 40, 120)}[model]
    if quick:
        warm, steps = 20, 40
    random = np.random.default_rng(1)
    rows = steps * batch_size
    if model == "mlp":
        x = random.standard_normal((rows, 32), np.float32)
        y = np.sin(x[:, :4].sum(1, keepdims=True)) + np.float32(0.3) * random.standard_normal((rows, 1), np.float32)
    elif model == "cnn":
        y = random.integers(0, 10, rows, np.int32)
        x = random.standard_normal((rows, 28, 28, 1), np.float32)
        x += random.standard_normal((10, 28, 28, 1), np.float32)[y] / 4
    else:
        tokens = np.zeros((rows, LENGTH + 1), np.int32)
        tokens[:, 0] = random.integers(0, VOCABULARY, rows)
        for i in range(LENGTH):
            tokens[:, i + 1] = (3 * tokens[:, i] + random.integers(0, 4, rows)) % VOCABULARY
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    return Work(model, batch_size, warm, steps, x, y)


def _layers(*layers: tuple[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    values = {}
    for name, shape in layers:
        scale = 1 / np.sqrt(np.prod(shape[:-1]))
        values[f"{name}/kernel"] = np.float32(scale * random.standard_normal(shape))
        values[f"{name}/bias"] = np.zeros(shape[-1], np.float32)
    return values


def _initial_mlp() -> dict[str, np.ndarray]:
    return _layers(("hidden", (32, 64)), ("out", (64, 1)))


def _initial_cnn() -> dict[str, np.ndarray]:
    return _layers(("conv0", (3, 3, 1, 16)), ("conv1", (3, 3, 16, 32)), ("out", (7 * 7 * 32, 10)))


def _initial_transformer() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "mix": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    dense = [(f"{name}{i}", shape) for i in range(BLOCKS) for name, shape in sizes.items()]
    values = _layers(*dense, ("out", (WIDTH, VOCABULARY)))
    for name in (*(f"{norm}{i}" for i in range(BLOCKS) for norm in ("before", "between")), "last"):
        values |= {f"{name}/scale": np.ones(WIDTH, np.float32), f"{name}/bias": np.zeros(WIDTH, np.float32)}
    values["tokens/embedding"] = np.float32(random.standard_normal((VOCABULARY, WIDTH)))
    values["positions/embedding"] = np.float32(0.1 * random.standard_normal((LENGTH, WIDTH)))
    return values


class Watch:
    """Notes when a run has done `work.marks` steps. Call `done` where these are finished, not only started."""

    def __init__(self, work: Any) -> None:
        self.waiting = list(work.marks)
        self.times: list[tuple[int, float, float]] = []  # the clock, and what the process has used of all cores
        self.memory = 0.0  # the peak until the last mark, in MB
        self.rates: dict[str, float] = {}

    def done(self, steps: int) -> None:
        while self.waiting and steps >= self.waiting[0]:
            self.waiting.pop(0)
            self.times.append((steps, time.time(), time.process_time()))
            self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if MAC else 2**10)

    def rate(self, name: str, rows: int, run: Callable[[], Any]) -> Any:
        """The result of `run`, which takes `rows` rows, whose number per second is kept."""
        start = time.time()
        result = run()
        self.rates[f"{name}, rows per second"] = rows / (time.time() - start)
        return result


def main(train: Callable[..., float], versions: dict[str, str], work_of: Callable[..., Any] = work_of, **options: int):
    """Runs `train(work, watch, **options)`, which returns a loss after all steps that all sides compute alike.

    `options` are the names and defaults of integers that the command line may set.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", default="", help="the folder of the data, for the models of real shapes")
    parser.add_argument("--started", type=float, default=time.time(), help="when the process was started (time.time())")
    parser.add_argument("--quick", action="store_true", help="40 steps, to see that it runs")
    parser.add_argument("--out", help="a file for the figures, which are printed without it")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in options}
    figures = {}
    for model in arguments.models:
        work = work_of(model, arguments.quick, *filter(None, [arguments.data]))
        watch, called = Watch(work), time.time()
        loss = train(work, watch, **given)
        (_, first, first_used), (begin, begin_time, begin_used), (end, end_time, end_used) = watch.times
        figures[model] = {
            "steps per second": (end - begin) / (end_time - begin_time),
            "CPU seconds per step": (end_used - begin_used) / (end - begin),
            "first step": first - arguments.started,
            "first step without imports and data": first - called,
            "CPU seconds to the first step": first_used,
            "peak memory, MB": watch.memory,
            **watch.rates,
            "loss": loss,
        }
    text = json.dumps({"figures": figures, "versions": versions | {"Python": sys.version.split()[0]}}, indent=1)
    if arguments.out:
        pathlib.Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        print(text)


def temporary() -> str:
    """A folder for what a framework writes."""
    return tempfile.mkdtemp(prefix="peers-")
