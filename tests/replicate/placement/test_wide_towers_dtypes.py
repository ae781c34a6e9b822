"""Towers of several devices sum and put together arrays of every dtype."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from testing import compiled
from testing.wide import wide

import estimator as est
from replicate import TowerOptimizer, cross_tower_sum

DTYPES = [
    *("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "complex64"),
    *("int8", "int16", "int32", "uint8", "uint16", "uint32", "bool"),
]
X64_DTYPES = ["float64", "complex128", "int64", "uint64"]


def model_fn_of(dtype):
    """Whose variables, losses, gradients, metrics and predictions are of the dtype, as far as it has gradients."""
    trains, flags = jnp.issubdtype(dtype, jnp.inexact), dtype == jnp.bool_

    def model_fn(features, labels, mode):
        x = features.astype(dtype)
        total = x.any(0) if flags else x.sum(0, dtype=dtype)
        zeros = {"initializer": jax.nn.initializers.zeros, "trainable": False}
        est.get_variable("added", (4,), dtype, **zeros)
        est.get_variable("written", (4,), dtype, **zeros, aggregation=est.VariableAggregation.SUM)
        if mode == est.ModeKeys.TRAIN:
            est.assign_add("added", total)
            est.assign("written", total)
        half = jax.nn.initializers.constant(0.5)
        w = est.get_variable("w", (4, 8), dtype if trains else jnp.float32, half, partition=(None, "part"))
        values = (est.spread(x.astype(w.dtype) @ w, 1).real ** 2).mean(1)
        loss = values.mean()
        overall = jnp.broadcast_to(cross_tower_sum(total.astype(jnp.int8) if flags else total), (len(x), 4))
        train_op = TowerOptimizer(optax.sgd(0.125)).minimize(loss)
        predictions = {"x": x, "values": values, "overall": overall}
        return est.EstimatorSpec(mode, predictions, loss, train_op, {"mean": est.metrics.mean(values)})

    return model_fn


def check(dtype, towers=2, parts=2):
    """One device and several towers agree, to the precision of the dtype."""
    model_fn = model_fn_of(jnp.dtype(dtype))
    x = np.random.default_rng(0).integers(0, 2, (8, 4)).astype(np.float32)
    x[towers:] = 0
    states = []
    for model in (est.transform(model_fn), est.transform(wide(towers, parts, model_fn))):
        state, spec = model.train_step(model.init(jax.random.key(0), x), x)
        results = [state.variables, spec.loss, spec.predictions]
        if jnp.issubdtype(dtype, jnp.inexact):  # the loss of others is of float32
            evaluated = model.eval_step(state, x[:7])  # a remainder
            del evaluated.predictions["overall"]  # of its own towers
            results += [evaluated.loss, evaluated.predictions, evaluated.eval_metric_ops["mean"].result()]
        states.append(results)
    want, got = map(jax.tree_util.tree_leaves_with_path, states)
    precision = jnp.finfo(dtype).eps if jnp.issubdtype(dtype, jnp.inexact) else 1e-6
    for (path, one), (_, other) in zip(got, want, strict=True):
        assert one.dtype == other.dtype, path
        one, other = (np.asarray(each).astype(complex) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=4 * float(precision), err_msg=str(path))


def test_every_dtype():
    """In a process of its own, which XLA ends where it cannot sum a dtype."""
    root = pathlib.Path(__file__).resolve().parents[3]
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    ended = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.split() == DTYPES + X64_DTYPES


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    compiled.use_folder()
    for each in DTYPES + X64_DTYPES:
        print(each, flush=True)
        with jax.enable_x64(each in X64_DTYPES):
            check(each)
