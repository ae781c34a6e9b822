"""`benchmarks/gpu.py`, in small and on a CPU: every part has figures that can be.

The transformer and the resnet are timed by the same code as the multi-layer perceptron, so they are run where no other
model is: one for its memory, the other for predictions. Their training steps are traced alone.
"""

import json
import math
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import pytest

import estimator as est

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACED = ["transformer", "resnet"]


@pytest.fixture
def gpu(monkeypatch):
    """The names in the script."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))


@pytest.mark.slow
def test_the_command_for_a_gpu_runs_on_a_cpu_in_small(gpu, tmp_path):
    assert set(TRACED) < set(gpu["PARTS"])
    parts = [part for part in gpu["PARTS"] if part not in TRACED]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/gpu.py", "--json", str(tmp_path / "figures.json"), "--only", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There is no GPU: jax.default_backend() is 'cpu'." in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["command"].startswith("python benchmarks/gpu.py")
    assert "CPU cores" in figures["machine"] and not figures["note"]
    tables = figures["tables"]
    floats = [each for rows in tables.values() for row in rows for each in row.values() if isinstance(each, float)]
    assert all(map(math.isfinite, floats))

    steps = tables.pop("A training step")
    assert {(row["model"], row["dtype"], row["steps_per_loop"]) for row in steps} == {
        ("mlp", "float32", 1),
        ("mlp", "bfloat16", "auto"),
    }
    for row in steps:  # no times here: what else the machine does would decide
        assert float(row["losses differ by"]) <= (1e-5 if row["dtype"] == "float32" else 1e-3)
        assert row["rounds"] >= 2 and row["steps"] >= 4
    assert len(tables.pop("The host, per step")) == 2 * len(steps)

    by_hand, estimator = tables.pop("Memory")
    for side in (by_hand, estimator):
        assert 0 < side["state, MB"] < side["peak of the program, MB"]
        assert side["donated, MB"] == pytest.approx(side["state, MB"], rel=1e-3)  # no second copy
    assert estimator["peak of the program, ratio"] == pytest.approx(1, abs=0.05)

    slow, checkpoint = tables.pop("A slow input"), tables.pop("A checkpoint of 4 MB")
    assert [row["step behind"] for row in slow] == ["no input", "an input of 4 ms"]
    assert {"training stands still", "until it is on disk"} <= {row["time"] for row in checkpoint}
    assert all(row["by hand"] > 0 and row["Estimator"] > 0 for row in checkpoint)
    [predicted] = tables.pop("Prediction (ratio of times)")
    assert predicted["model"] == "resnet"
    [tests] = tables.pop("Tests marked `gpu`")
    assert "3 skipped" in tests["outcome"] and "needs a GPU; jax.default_backend() is 'cpu'" in done.stdout
    assert not tables

    assert len(figures["plot"]["values"]) == len(steps) + 1 + len(slow) + len(checkpoint) + 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("transformer", "float32"), ("resnet", "bfloat16")])
def test_both_sides_of_other_models_have_a_training_step(gpu, name, dtype):
    model = gpu["model_of"](name, True, dtype)
    by_hand, estimator = gpu["gpu_models"].ByHand(model), est.transform(gpu["gpu_models"].model_fn_of(model))
    batch = model.batches[0]
    with jax.numpy_dtype_promotion("standard"):  # as in the script
        before = jax.eval_shape(by_hand.state)
        after, loss = jax.eval_shape(by_hand.program, before, batch)
        state = jax.eval_shape(estimator.init, jax.random.key(0), *batch)
        trained, spec = jax.eval_shape(estimator.train_step, state, *batch)
    assert after == before and loss.shape == ()
    assert trained == state and spec.loss == loss


@pytest.mark.slow
def test_figures_of_a_cpu_are_not_saved(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--save"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"), run_name="__main__")
    assert end.value.code == 2
    assert "--save is for all figures of a GPU; this is cpu, small." in capsys.readouterr().err
