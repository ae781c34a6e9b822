"""What `import estimator, replicate` loads beside jax and optax: nothing that only some runs use."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import estimator

PACKAGES = ("heads", "hooks", "inputs", "metrics")

LOADED_WHEN_USED = """
    PIL equinox estimator._early_stopping estimator._summarize estimator._train_and_evaluate estimator.canned
    estimator.checkpoint._readers estimator.checkpoint._warm_start estimator.experimental estimator.export
    estimator.extenders estimator.feature_column estimator.heads estimator.inputs._csv estimator.integrations
    estimator.interop estimator.layers estimator.metrics._means estimator.nn estimator.optim._row_wise
    estimator.porting._tensorflow_names estimator.testing estimator.tf_checkpoint estimator.trackers estimator.train
    flatbuffers flax fsspec haiku jax.experimental.multihost_utils jax.experimental.sparse jax.extend matplotlib
    mlflow optuna orbax pandas ray replicate.ray safetensors scipy tensorboardX tensorflow tensorstore torch tqdm
    wandb
""".split()

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
    assert [name for name in modules if f"{name}.".startswith(tuple(f"{each}." for each in LOADED_WHEN_USED))] == []


@pytest.mark.parametrize("package", [estimator, *map(estimator.__getattr__, PACKAGES)], ids=lambda each: each.__name__)
def test_names_that_are_loaded_later_are_listed_and_are_the_ones_that_type_checkers_see(package):
    tree = ast.parse(pathlib.Path(package.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("estimator")
        for alias in node.names
    }
    assert set(package.__all__) <= {*dir(package)} and len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        if name in seen:  # others are defined in the module itself
            module = importlib.import_module(seen[name])
            assert getattr(package, name) is getattr(module, name), name


FIRST_STEPS = """
import sys, tempfile

import jax, numpy as np, optax
import estimator as est


def model_fn(features, labels, mode):
    w = est.get_variable("w", (1000,), initializer=jax.nn.initializers.ones)
    loss = ((w - features) ** 2).mean()
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(1.0)).minimize(loss))


class Look(est.Hook):
    def next_step(self, step):
        return step + 1 if step < 2 else None

    def after_run(self, context, values):
        print(context.global_step, "orbax.checkpoint" in sys.modules, float(values.loss))
        if FAIL and context.global_step == 1:
            raise RuntimeError("stop")


FAIL, estimator = len(sys.argv) > 1, est.Estimator(model_fn, tempfile.mkdtemp())
try:
    estimator.train(lambda: [np.zeros((1,), np.float32)] * 4, hooks=[Look()])
except RuntimeError as error:
    print(error)
first = est.checkpoints(estimator.model_dir)[0]
print(first.step, set(est.load_variable(first.path, "w")) == {1.0})
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_step_does_not_wait_for_orbax_and_is_after_the_checkpoint_of_step_0(fails):
    command = [sys.executable, "-c", FIRST_STEPS, *["fail"] * fails]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = process.stdout.splitlines()
    assert shown[0] == "1 False 1.0"
    assert shown[1].startswith("stop" if fails else "2 True 0.99")
    assert shown[-1] == "0 True"
