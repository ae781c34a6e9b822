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

# What has gradients is tried alone, all else together.
GROUPS = [[each] for each in "bfloat16 float16 float32 float8_e4m3fn float8_e5m2 complex64".split()]
GROUPS.append("int8 int16 int32 uint8 uint16 uint32 bool".split())
X64_GROUPS = [["float64"], ["complex128"], ["int64", "uint64"]]


def model_fn_of(dtypes):
    """Whose variables, losses, gradients, metrics and predictions are of the dtypes, as far as they have gradients."""
    trained_in = dtypes[0] if jnp.issubdtype(dtypes[0], jnp.inexact) else jnp.float32

    def model_fn(features, labels, mode):
        zeros = {"initializer": jax.nn.initializers.zeros, "trainable": False}
        rows, overall = {}, {}
        for dtype in dtypes:
            flags = dtype == "bool"
            rows[dtype] = x = features.astype(dtype)
            total = x.any(0) if flags else x.sum(0, dtype=dtype)
            est.get_variable(f"added_{dtype}", (4,), dtype, **zeros)
            est.get_variable(f"written_{dtype}", (4,), dtype, **zeros, aggregation=est.VariableAggregation.SUM)
            if mode == est.ModeKeys.TRAIN:
                est.assign_add(f"added_{dtype}", total)
                est.assign(f"written_{dtype}", total)
            whole = cross_tower_sum(total.astype(jnp.int8) if flags else total)
            overall[dtype] = jnp.broadcast_to(whole, (len(x), 4))
        half = jax.nn.initializers.constant(0.5)
        w = est.get_variable("w", (4, 8), trained_in, half, partition=(None, "part"))
        values = (est.spread(x.astype(w.dtype) @ w, 1).real ** 2).mean(1)
        loss = values.mean()
        train_op = TowerOptimizer(optax.sgd(0.125)).minimize(loss)
        predictions = {"x": rows, "values": values, "overall": overall}
        return est.EstimatorSpec(mode, predictions, loss, train_op, {"mean": est.metrics.mean(values)})

    return model_fn


def check(dtypes, towers=2, parts=2):
    """One device and several towers agree, to the precision of the dtypes."""
    model_fn, has_gradients = model_fn_of(dtypes), jnp.issubdtype(dtypes[0], jnp.inexact)
    x = np.random.default_rng(0).integers(0, 2, (8, 4)).astype(np.float32)
    x[towers:] = 0
    states = []
    for model in (est.transform(model_fn), est.transform(wide(towers, parts, model_fn))):
        state, spec = model.train_step(model.init(jax.random.key(0), x), x)
        results = [state.variables, spec.loss, spec.predictions]
        if has_gradients:  # the loss of others is of float32
            evaluated = model.eval_step(state, x[:7])  # a remainder
            del evaluated.predictions["overall"]  # of its own towers
            results += [evaluated.loss, evaluated.predictions, evaluated.eval_metric_ops["mean"].result()]
        states.append(results)
    want, got = map(jax.tree_util.tree_leaves_with_path, states)
    precision = jnp.finfo(dtypes[0]).eps if has_gradients else 1e-6
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
    assert ended.stdout.split() == sum(GROUPS + X64_GROUPS, [])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    compiled.use_folder()
    for each in GROUPS + X64_GROUPS:
        print(*each, flush=True)
        with jax.enable_x64(each in X64_GROUPS):
            check(each)
