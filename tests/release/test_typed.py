"""Types of the packages, as mypy sees them in a program of a user, outside of this checkout and of its settings."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
from collections.abc import Iterator
from typing import Any, assert_type

import jax
import numpy as np
import optax  # type: ignore[import-untyped]

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn


def model_fn(features: jax.Array, labels: jax.Array, mode: est.ModeKeys) -> est.EstimatorSpec:
    hidden = assert_type(est.layers.dense(features, 3), jax.Array)
    loss = est.losses.mean_squared_error(labels, hidden.sum(-1))
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


def input_fn() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield np.ones((4, 2), np.float32), np.ones(4, np.float32)


estimator = est.Estimator(replicate_model_fn(model_fn), "model", est.RunConfig(seed=1))
assert_type(estimator.train(input_fn, steps=1), est.Estimator)
assert_type(estimator.evaluate(input_fn), dict[str, Any])
"""
MISTAKES = """estimator.train(input_fn, steps="10")
est.RunConfig(sed=1)
"""


@pytest.mark.slow
def test_mypy_checks_a_program_of_a_user(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM + MISTAKES)
    # The packages are found on the path of this Python, as installed ones: mypy reads those that have a py.typed only.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    cache = ROOT / ".pytest_cache" / "mypy"  # for the next runs: it reads all of jax
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    first = PROGRAM.count("\n") + 1
    assert done.stdout.splitlines() == [
        f'program.py:{first}: error: Argument "steps" to "train" of "Estimator" has incompatible type "str"; '
        'expected "int | None"  [arg-type]',
        f'program.py:{first + 1}: error: Unexpected keyword argument "sed" for "RunConfig"; did you mean "seed"?  '
        "[call-arg]",
        "Found 2 errors in 1 file (checked 1 source file)",
    ], done.stdout + done.stderr
