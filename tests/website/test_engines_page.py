"""The scripts of the page on engines, of those that run on this host."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from testing.website.scripts import run_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how_to" / "engines.md"
NAMES = ("train", "ray_train", "ray_tune", "dask_train")


@pytest.fixture
def run(tmp_path):
    """Runs a script; returns what it prints."""
    scripts = re.findall(r"^```py(?:thon)?\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    for name, script in zip(NAMES, scripts, strict=True):
        (tmp_path / f"{name}.py").write_text(script, encoding="utf-8")

    def run(name):
        if name == "train":
            return run_script("train.py", folder=tmp_path)[0]
        process = subprocess.run(
            [sys.executable, f"{name}.py"],
            cwd=tmp_path,
            # Without an address, Ray would join a cluster that another test has started beside this one.
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "RAY_ADDRESS": "local"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-5000:]
        return process.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "results"),
    [("train", "sklearn", 1), ("ray_train", "ray.train", 1), ("dask_train", "distributed", 2)],
)
def test_a_script_trains(run, name, package, results):
    pytest.importorskip(package)
    said = re.findall(r"{'accuracy': ([\d.]+), 'loss': [\d.]+, 'global_step': 200.0}", run(name))
    assert len(said) == results and all(float(accuracy) > 0.9 for accuracy in said)


@pytest.mark.slow
def test_the_scheduler_of_the_script_for_tune_stops_the_bad_trials(run):
    pytest.importorskip("ray.tune")
    said = run("ray_tune")
    steps = {rate: int(step) for rate, step in re.findall(r"^trial (\S+) (\d+) [\d.]+$", said, re.M)}
    (best,) = re.findall(r"^best (\S+)$", said, re.M)
    assert sorted(steps) == ["0.0003", "0.003", "0.03", "1e-05"]
    assert best in ("0.03", "0.003") and steps[best] == 200 and min(steps.values()) < 200
