"""What processes do that train together, as `helpers_cluster` starts them; most of it one process can do alone, too.

Each gives its own rows of what is the same data. What it finds it writes into a file of its own, or prints.
"""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers_metrics import Largest

import estimator as est
import replicate
from replicate import TowerOptimizer, replicate_model_fn

ROWS, BATCHES = 8, 4
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(BATCHES * ROWS, 3)).astype(np.float32)
IDS = _RNG.integers(-1, 6, size=(BATCHES * ROWS, 2)).astype(np.int32)
Y = np.sin(X.sum(1, keepdims=True))
OPTIONS = {
    "mirrored": {},
    "sharded": {"variable_distribution": "sharded"},
}


def start(**kwargs):
    """Joins the other processes, if there are any."""
    if "TF_CONFIG" in os.environ:
        replicate.initialize_distributed(timeout_secs=30, **kwargs)
        jax.config.update("jax_numpy_dtype_promotion", "strict")


def devices():
    """All of the other processes too, or the first four."""
    return None if jax.process_count() > 1 else jax.devices()[:4]


def own(features, labels=None):
    """The rows of this process of a batch of all."""
    context = est.input_context()
    rows = context.per_process_batch_size(len(jax.tree.leaves(features)[0]))
    return jax.tree.map(lambda x: x[context.index * rows :][:rows], (features, labels))


def batch(i):
    rows = slice(i * ROWS, (i + 1) * ROWS)
    return own({"x": X[rows], "ids": IDS[rows]}, Y[rows])


def batches(n=BATCHES):
    return [batch(i % BATCHES) for i in range(n)]


def net(features):
    w = est.get_variable("w", (3, 8))
    b = est.get_variable("b", (8,), initializer=jax.nn.initializers.zeros)
    return jnp.tanh(features["x"] @ w + b) @ est.get_variable("v", (8, 1))


def rich(reduction="mean", optimizer=None, **tower_options):
    """A model_fn with something of everything that towers do together."""
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02))

    def model_fn(features, labels, mode):
        output = net(features) + est.embedding_lookup("table", features["ids"], (6, 4)).sum((1, 2))[:, None]
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output, "x": features["x"]})
        est.get_variable("mean", (1,), initializer=jax.nn.initializers.zeros, trainable=False)
        est.get_variable("seen", (), jnp.int32, jax.nn.initializers.zeros, trainable=False)
        if mode == est.ModeKeys.TRAIN:
            est.assign("mean", 0.9 * est.read_variable("mean") + 0.1 * output.mean(0))
            est.assign_add("seen", jnp.int32(len(output)))
            output += 0.1 * jax.random.normal(est.make_rng(), output.shape)
        weights = jnp.abs(features["x"][:, :1])
        if reduction == "sum":
            loss = jnp.sum(weights * (labels - output) ** 2)
        else:
            loss = est.losses.mean_squared_error(labels, output, weights)
        est.summary.scalar("mean output", output.mean())
        est.summary.histogram("outputs", output)
        est.record("rows", output[:, 0])
        return est.EstimatorSpec(
            mode,
            predictions={"output": output},
            loss=loss,
            train_op=TowerOptimizer(optimizer, **tower_options).minimize(loss),
            eval_metric_ops={
                "error": est.metrics.mean_absolute_error(labels, output, weights),
                "auc": est.metrics.auc(labels > 0, jax.nn.sigmoid(output)),
                "largest": Largest(jnp.max(output)),
            },
        )

    return model_fn


def replicated(model_fn, reduction=est.Reduction.SUM_BY_NONZERO_WEIGHTS, **options):
    return replicate_model_fn(model_fn, reduction, devices(), **options)


def whole(array):
    """An array on the devices of several processes as all of it, in each."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        array = jax.experimental.multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def write(folder, name, tree):
    """Leaves what this process has found, for the test to read."""
    named = {jax.tree_util.keystr(path): whole(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    np.savez(os.path.join(folder, f"{name}-{jax.process_count()}-{jax.process_index()}.npz"), **named)


def transformed(folder):
    """Functions of `est.transform`: the law, for whatever towers do together."""
    start()
    sgd, adam = optax.sgd(0.05), optax.adam(0.02)
    bad = dict(zip(("features", "labels"), batch(1), strict=True))
    bad["labels"] = np.where(np.arange(len(bad["labels"]))[:, None] == 1, np.float32(np.nan), bad["labels"])
    cases = {
        "mirrored": replicated(rich()),
        "sharded": replicated(rich(), variable_distribution="sharded"),
        "sum, accumulated": replicated(rich("sum", sgd, accumulate_steps=2), est.Reduction.SUM),
        "scaled": replicated(rich(optimizer=adam, loss_scale=est.DynamicLossScale(growth_interval=2)), on_nan="skip"),
    }
    for name, model_fn in cases.items():
        model = est.transform(model_fn)
        state = model.init(jax.random.key(3), *batch(0))
        state, spec = model.train_step(state, *batch(0))
        if name == "scaled":
            state, _ = model.train_step(state, **bad)
        state, specs = model.train_loop(state, batches(3))
        found = {"state": state, "spec": [spec.loss, spec.reported], "losses": specs.loss}
        found["train metrics"] = {name: metric_result(metric) for name, metric in spec.eval_metric_ops.items()}
        if name in ("mirrored", "sharded"):
            spec = model.eval_step(state, *batch(3))
            found["eval"] = [spec.loss, {name: metric_result(metric) for name, metric in spec.eval_metric_ops.items()}]
        write(folder, name, found)


def metric_result(metric):
    metric = jax.device_get(metric)
    return metric.result() if hasattr(metric, "result") else metric.compute()


def say(**found):
    print(json.dumps(found, default=str), flush=True)
