"""What `import estimator, replicate` loads beside jax and optax: nothing that only some runs use."""

import subprocess
import sys

import pytest

LOADED_WHEN_USED = (
    "PIL",
    "equinox",
    "estimator.canned",
    "estimator.feature_column",
    "estimator.integrations",
    "estimator.layers",
    "estimator.trackers",
    "estimator.train",
    "flatbuffers",
    "flax",
    "fsspec",
    "haiku",
    "jax.experimental.multihost_utils",
    "jax.experimental.sparse",
    "jax.extend",
    "matplotlib",
    "mlflow",
    "optuna",
    "orbax",
    "pandas",
    "ray",
    "replicate.ray",
    "safetensors",
    "scipy",
    "tensorboardX",
    "tensorflow",
    "tensorstore",
    "torch",
    "tqdm",
    "wandb",
)

PROGRAM = """
import sys

import pytest
import jax, optax
before = set(sys.modules)
import estimator, replicate
print(*sys.modules.keys() - before)
"""


@pytest.mark.covers("11 no hard dependency")
def test_the_import_loads_nothing_that_only_some_runs_use():
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    modules = process.stdout.split()
    assert "estimator" in modules and "replicate" in modules
    assert [
        m for m in modules if m.startswith(tuple(f"{name}." for name in LOADED_WHEN_USED)) or m in LOADED_WHEN_USED
    ] == []
