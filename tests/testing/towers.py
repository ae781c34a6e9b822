"""Models and batches to train in towers on CPU devices, and the comparison with one big batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

STEPS = 3
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.02),
    "adamw": lambda: optax.adamw(0.02),
    "adagrad": lambda: optax.adagrad(0.1),
    "clipped_adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02)),
}
REDUCTIONS = {"sum": est.Reduction.SUM, "mean": est.Reduction.SUM_OVER_BATCH_SIZE}
FOUR = np.array([1.0, 2.0, 3.0, 6.0], np.float32)


def cpus(towers):
    return [f"/cpu:{i}" for i in range(towers)]


def replicate(model_fn, towers, reduction="mean", **options):
    """Of no towers, the model_fn as it is."""
    if not towers:
        return model_fn
    return replicate_model_fn(model_fn, REDUCTIONS.get(reduction, reduction), cpus(towers), **options)


def assert_close(got, want, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype, path
        if one.dtype.kind == "U":
            np.testing.assert_array_equal(one, other, err_msg=str(path))
        else:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=str(path))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def started(model_fn, *batch, mode="train", params=None):
    """The model of a model_fn, and its state at the start."""
    model = est.transform(model_fn, params)
    return model, model.init(jax.random.key(0), *batch, mode=mode)


def start_as(state, model, *batch):
    """The start of another model with the variables and slots of this one, without its init: that is only traced.
    Where it has others, its own start."""
    like = model.abstract_init(*batch)
    if jax.tree.structure(like) != jax.tree.structure(state):
        return model.init(jax.random.key(0), *batch)
    return jax.tree.map(lambda x, wanted: jax.device_put(x, wanted.sharding), state, like)


def one_step(model_fn, features, labels=None):
    model, state = started(model_fn, features, labels)
    return model.train_step(state, features, labels)


def predict(model_fn, features):
    """The spec of a prediction with the initial values."""
    model, state = started(model_fn, features, mode="infer")
    return model.predict_step(state, features)


@jax.jit  # one program; for `jax.device_get` metrics it is the same for all towers
def results(metrics):
    return {name: metric.result() for name, metric in metrics.items()}


@jax.jit
def results_of_steps(metrics):
    return {name: jax.vmap(lambda m: m.result())(metric) for name, metric in metrics.items()}


def trained(model_fn, batches, state=None):
    """The state after training on batches of shape `[steps, rows, ...]`, and what all steps gave."""
    model = est.transform(model_fn)
    if state is None:
        state = model.init(jax.random.key(0), *jax.tree.map(lambda x: x[0], batches))
    state, spec = model.train_loop(state, batches)
    return state, (spec.loss, spec.predictions, results_of_steps(jax.device_get(spec.eval_metric_ops)))


def assert_same_training(model_fn, replicated, batches, **tolerance):
    """Both are trained from the same state; all that comes out is compared."""
    start = est.transform(model_fn).init(jax.random.key(0), *jax.tree.map(lambda x: x[0], batches))
    (want_state, want), (state, got) = (trained(each, batches, start) for each in (model_fn, replicated))
    assert_close(got, want, **tolerance)
    assert_close(state[:2], want_state[:2], **tolerance)
    return state


def reduced(losses, reduction):
    return jnp.sum(losses) if reduction == "sum" else jnp.mean(losses)


def uniform(*shape):
    """Initial values that take XLA no time to compile, as random ones do."""
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def mlp_model_fn(optimizer, reduction="mean"):
    def model_fn(features, labels, mode):
        with est.variable_scope("hidden"):
            w = est.get_variable("w", initializer=uniform(3, 4))
            b = est.get_variable("b", (4,), initializer=jax.nn.initializers.zeros)
        v = est.get_variable("v", initializer=uniform(4, 1))
        output = (jnp.tanh(features @ w + b) @ v)[:, 0]
        losses = (output - labels) ** 2
        loss = reduced(losses, reduction)
        return est.EstimatorSpec(
            mode,
            predictions={"output": output, "positive": output > 0},
            loss=loss,
            train_op=TowerOptimizer(optimizer).minimize(loss),
            eval_metric_ops={
                "mean_loss": est.metrics.mean(losses),
                "accuracy": est.metrics.accuracy(labels > 0, output > 0),
            },
        )

    return model_fn


def regression(rows, seed=0, steps=STEPS):
    x = np.random.default_rng(seed).normal(size=(steps, rows, 3)).astype(np.float32)
    return x, np.sin(x.sum(-1)).astype(np.float32)
