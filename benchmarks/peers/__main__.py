"""Steps per second and the time to the first step: the Estimator, a loop by hand, Flax, Keras 3 and PyTorch Lightning.

    python benchmarks/peers [--rounds 3] [--models mlp cnn] [--save]
    python benchmarks/peers --models resnet bert wide_deep tagger --save    # those of real shapes
    python benchmarks/peers --quick          # a few steps in this environment, of the peers that it has

`--save` keeps what was saved of other models on this machine, and writes after each model: to resume a run that was
stopped, name the models that are left. Of a model of real shape the table has, with the ratios to the loop by hand,

    peer | steps per second, least to greatest, of by hand | CPU seconds per step, of by hand | first step, of by hand |
    CPU seconds to it, of by hand | peak memory, MB, of by hand | rows evaluated, and predicted, per second | loss

All train the same models from the same values on the same batches, one epoch in order, with adam; that they end with
the same loss is checked. Each has an environment of its own, made by the first call below `--environments` (1 to 2 GB),
and its own defaults: the scripts beside this file show what a user writes. A round runs each script once, in a process
of its own, one after the other, so that what else the machine does hits all alike; figures are medians over rounds.

To have PyTorch without CUDA on Linux, which saves gigabytes, add the index of its builds for CPUs before the first
call: `export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT)]

import common  # noqa: E402
import real.data  # noqa: E402
import results  # noqa: E402

JAX = ["jax>=0.10.2", "optax>=0.2.8"]
KERAS = ["keras>=3.15.1", JAX[0]]
PEERS = {  # by name: the script with its options, and what to install for it
    "Estimator": (["with_estimator.py"], ["-e", str(ROOT)]),
    "by hand": (["by_hand.py"], JAX),
    "Flax": (["with_flax.py"], ["flax>=0.12.8", *JAX]),
    "Keras, 20 steps per execution": (["with_keras.py", "--steps-per-execution", "20"], KERAS),
    "Keras": (["with_keras.py"], KERAS),
    "Lightning": (["with_lightning.py"], ["lightning>=2.6.6", "torch==2.13.0"]),  # not the newest: of more indices
}
REAL = {  # the same, for the models of real shapes, whose records others than the Estimator read by TensorFlow
    "Estimator": (["real/with_estimator.py"], PEERS["Estimator"][1]),
    "Estimator, 4 towers": (["real/with_estimator.py", "--towers", "4"], PEERS["Estimator"][1]),
    **{
        name: ([f"real/{PEERS[name][0][0]}"], [*PEERS[name][1], JAX[1], "tensorflow-cpu>=2.21"])
        for name in ("by hand", "Flax", "Keras", "Lightning")
    },
}
MODELS = real.data.MODELS | common.MODELS
RATIOS = (
    "steps per second",
    "CPU seconds per step",
    "first step",
    "CPU seconds to the first step",
    "peak memory, MB",
)
NEEDED = {"with_flax.py": "flax", "with_keras.py": "keras", "with_lightning.py": "lightning"}  # beside jax and optax
ELSEWHERE = {  # microseconds per step of the MLP on one tower; neither runs on a Python that jax runs on
    "TensorFlow 1.12 Estimator, elsewhere": (394, 569),
    "Caffe2 Parallelize, elsewhere": (374, 467),
}
TOLERANCE = 0.02  # of the loss after all steps, relative to the one by hand
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "replicate-model-fn" / "peers"


def interpreter(folder: pathlib.Path, script: str, requirements: list[str]) -> str:
    """The Python of the environment for a script, which is made where it is missing or has other requirements."""
    folder = (
        folder / f"{script.removesuffix('.py').replace('/', '-')}-{sys.version_info.major}.{sys.version_info.minor}"
    )
    python, made = folder / ("Scripts" if os.name == "nt" else "bin") / "python", folder / "requirements.json"
    if not made.exists() or json.loads(made.read_text()) != requirements:
        print(f"installing {' '.join(requirements)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        made.write_text(json.dumps(requirements))
    return str(python)


def run(python: str, command: list[str], models: list[str], quick: bool, data: str) -> dict:
    """What a script measures, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = pathlib.Path(folder, "out.json"), pathlib.Path(folder, "log.txt")
        environment = os.environ | {"TMPDIR": folder, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        options = ["--quick"] * quick + (["--data", data] if data else [])
        with log.open("w") as file:
            started = ["--started", repr(time.time()), "--out", str(out), *options]
            line = [python, str(HERE / command[0]), *command[1:], *started, *models]
            done = subprocess.run(line, env=environment, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise SystemExit(f"{' '.join(line)} failed:\n{log.read_text()[-4000:]}")
        return json.loads(out.read_text())


def check(losses: dict[str, float], model: str) -> None:
    expected = losses["by hand"]
    for name, loss in losses.items():
        if not abs(loss - expected) <= TOLERANCE * abs(expected):
            raise SystemExit(f"{name} ends the {model} with a loss of {loss}, and by hand it is {expected}.")


def real_row(name: str, runs: list[dict], by_hand: list[dict]) -> dict:
    """A row of a model of real shape; ratios are medians of the rounds' ratios."""
    rates = [run["steps per second"] for run in runs]
    row = {"peer": name}
    for key in RATIOS:
        row[key] = statistics.median(run[key] for run in runs)
        if key == "steps per second":
            row["least to greatest"] = spread(min(rates), max(rates))
        row[f"{key} of by hand"] = statistics.median(a[key] / b[key] for a, b in zip(runs, by_hand, strict=True))
    for key in ("evaluation, rows per second", "prediction, rows per second"):
        row[key] = statistics.median(run[key] for run in runs)
    return row | {"loss": f"{statistics.median(run['loss'] for run in runs):.5f}"}


def spread(least: float, most: float) -> str:
    return f"{results.shown(least)} to {results.shown(most)}"


def row(name: str, runs: list[dict]) -> dict:
    def medians(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    rates = [run["steps per second"] for run in runs]
    return {
        "peer": name,
        "steps per second": medians("steps per second"),
        "least to greatest": spread(min(rates), max(rates)),
        "first step after, s": medians("first step"),
        "without imports and data, s": medians("first step without imports and data"),
        "last loss": f"{medians('loss'):.5f}",
    }


def save(rows: dict[str, list[dict]], versions: dict[str, dict], missing: dict[str, str], rounds: int, load: float):
    """Writes the results of these models, and keeps what was saved of others on this machine."""
    path = results.FOLDER / f"{results.benchmark().stem}.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    saved = saved if saved.get("machine") == results.machine() else {"tables": {}}
    measured = saved.get("measured", {title: f"commit {saved['commit']}" for title in saved["tables"]})
    measured |= {MODELS[model]: f"commit {results.commit()}, {rounds} rounds, load {load:.1f}" for model in rows}
    tables = saved["tables"] | {MODELS[model]: each for model, each in rows.items()}
    tables = {title: tables[title] for title in MODELS.values() if title in tables}

    def panel(title: str, key: str, label: str) -> dict:
        return {"title": title, "label": label, "values": {r["peer"]: r[key] for r in tables[title]}}

    plot = [panel(title, "steps per second", "steps per second") for title in tables]
    if common.MODELS["mlp"] in tables:
        plot[list(tables).index(common.MODELS["mlp"])]["values"] |= {
            name: [1e6 / most, 1e6 / least] for name, (least, most) in ELSEWHERE.items()
        }
        plot.append(panel(common.MODELS["mlp"], "first step after, s", "seconds to the first step"))
    note = (
        "Medians of rounds, in each of which every peer has one process per model. Measured: "
        + "; ".join(f"{title}: {measured[title]}" for title in tables)
        + ". [How to read it](../docs/speed.md#beside-other-libraries)."
    )
    tables["Measured elsewhere: the MLP, on other days, on a machine with two busy cores"] = [
        {
            "peer": name,
            "us per step": f"{least} to {most}",
            "steps per second": f"{1e6 / most:,.0f} to {1e6 / least:,.0f}",
        }
        for name, (least, most) in ELSEWHERE.items()
    ]
    tables["Versions"] = [
        {"peer": name, "version": ", ".join(f"{package} {version}" for package, version in each.items())}
        for name, each in versions.items()
    ] + [{"peer": name, "version": f"not run: {reason}"} for name, reason in missing.items()]
    figures = results.figures_of("Beside other libraries", tables, results.bars(plot, pale=list(ELSEWHERE)), note)
    results.write(path, json.dumps(figures | {"measured": measured}, indent=1) + "\n")
    results.refresh()


def pythons_of(peers: dict, here: bool, environments: pathlib.Path) -> tuple[dict[str, str], dict[str, str]]:
    """The interpreter of each peer, and why others are missing."""
    pythons, missing = {}, {}
    for name, (command, requirements) in peers.items():
        needed = NEEDED.get(pathlib.Path(command[0]).name)
        if here and needed and not importlib.util.find_spec(needed):
            missing[name] = f"no {needed} here"
        elif here:
            pythons[name] = sys.executable
        else:
            try:
                pythons[name] = interpreter(environments, command[0], requirements)
            except subprocess.CalledProcessError:
                missing[name] = f"pip could not install {' '.join(requirements)}"
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    return pythons, missing


def compare(models: list[str], peers: dict, arguments: argparse.Namespace, data: str = "") -> None:
    """Runs peers with the same models, `--rounds` times, and saves after each round."""
    pythons, missing = pythons_of(peers, arguments.here or arguments.quick, arguments.environments)
    figures = {model: {name: [] for name in pythons} for model in models}
    versions, loads = {}, []
    for i in range(1 if arguments.quick else arguments.rounds):
        for name in pythons if i % 2 else reversed(pythons):
            measured = run(pythons[name], peers[name][0], models, arguments.quick, data)
            loads.append(os.getloadavg()[0])
            versions[name] = measured["versions"]
            for model in models:
                each = measured["figures"][model]
                figures[model][name].append(each)
                shown = ", ".join(f"{key} {results.shown(each[key])}" for key in RATIOS[1:]) if data else ""
                rate, first = each["steps per second"], each["first step"]
                print(f"{model:12} {name:30} {rate:10.1f} steps/s, first after {first:6.2f} s {shown}", flush=True)
        for model in models:
            check({name: figures[model][name][-1]["loss"] for name in pythons}, model)
        print(f"All end with the same losses, to {TOLERANCE:.0%}.", flush=True)
    if arguments.save:
        rows = {
            model: [
                real_row(name, figures[model][name], figures[model]["by hand"]) if data else row(name, runs)
                for name, runs in figures[model].items()
            ]
            for model in models
        }
        named = {name: versions[name] for name in pythons}
        save(rows, named, missing, arguments.rounds, statistics.median(loads))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/peers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--peers", nargs="+", help="these alone, beside the loop by hand")
    parser.add_argument("--quick", action="store_true", help="a few steps of each model, in the present environment")
    parser.add_argument("--here", action="store_true", help="all peers in the present environment")
    parser.add_argument("--environments", type=pathlib.Path, default=CACHE, help="the folder for them (%(default)s)")
    results.add_option(parser)
    arguments = parser.parse_args()

    def chosen(peers: dict) -> dict:
        return {k: v for k, v in peers.items() if not arguments.peers or k in (*arguments.peers, "by hand")}

    toys = [model for model in arguments.models if model in common.MODELS]
    for models in [toys] if arguments.quick and toys else [[model] for model in toys]:
        compare(models, chosen(PEERS), arguments)
    with tempfile.TemporaryDirectory() as folder:
        if real_models := [model for model in arguments.models if model in real.data.MODELS]:
            real.data.write(pathlib.Path(folder), real_models)
        for model in real_models:
            compare([model], chosen(REAL), arguments, folder)


if __name__ == "__main__":
    main()
