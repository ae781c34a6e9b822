"""Features of a step under x64 and strict dtype promotion: towers equal one tower, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

RANDOM = np.random.default_rng(0)
BATCHES = (
    {"x": RANDOM.normal(size=(3, 8, 6, 3)), "n": np.tile([6, 2, 0, 4], (3, 2)), "id": np.tile([1, 0, 3, 1], (3, 2))},
    RANDOM.normal(size=(3, 8)),
)


def dense(features):
    return est.layers.dense(features["x"].mean(1), 1)[:, 0]


def recurrent(features):
    return est.layers.gru(features["x"], 2, sequence_length=features["n"])[0].mean((1, 2))


def normalized(features):
    return est.layers.batch_normalization(features["x"].mean(1), fused=True, synchronized=True).sum(1)


def looked_up(features):
    est.get_variable("table", (4, 3), jnp.float64)
    return (est.embedding_lookup("table", features["id"]) * features["x"].mean(1)).sum(1)


def regularized(features):
    return est.layers.dense(features["x"].mean(1), 1, kernel_regularizer=est.regularizers.l2(0.1))[:, 0]


def scheduled():
    rate = est.train.exponential_decay(0.1, est.global_step(), 2, 0.5)
    return est.train.MomentumOptimizer(rate, 0.9)


SGD, ADAM = (lambda: optax.sgd(0.1)), (lambda: est.train.AdamOptimizer(0.1))
FEATURES = {  # network, optimizer, arguments of TowerOptimizer, arguments of replicate_model_fn
    "batch normalization": (normalized, SGD, {}, {}),
    "on_nan raise, loss scale, segments": (
        dense,
        SGD,
        {"loss_scale": est.DynamicLossScale()},
        {"on_nan": "raise", "tower_transform": est.checkpoint_segments},
    ),
    "accumulation, on_nan skip": (dense, ADAM, {"accumulate_steps": 2}, {"on_nan": "skip"}),
    "regularizer, schedule": (regularized, scheduled, {}, {}),
    "gru": (recurrent, SGD, {}, {}),
    "sparse lookup": (looked_up, lambda: est.train.AdagradOptimizer(0.1), {}, {}),
}
WHOLE = {"accumulation, on_nan skip": (dense, ADAM, {}, {})}  # what one tower does instead


def run(feature, towers, batches=BATCHES):
    network, optimizer, options, arguments = (WHOLE if towers == 1 else {}).get(feature, FEATURES[feature])

    def model_fn(features, labels, mode):
        predictions = network(features)
        est.get_variable("rows", initializer=np.int64(0), trainable=False)
        est.assign_add("rows", np.int64(len(labels)))
        est.get_variable("first", (), aggregation=est.VariableAggregation.ONLY_FIRST_TOWER, trainable=False)
        est.assign("first", labels[0].astype(jnp.float32))
        loss = est.losses.mean_squared_error(labels, predictions, labels**2) + est.losses.get_regularization_loss()
        train_op = TowerOptimizer(optimizer(), **options).minimize(loss)
        averages = est.ExponentialMovingAverage(0.9).apply(est.trainable_variables())
        metrics = {"mean": est.metrics.mean(labels), "mse": est.metrics.mean_squared_error(labels, predictions)}
        return est.EstimatorSpec(mode, loss=loss, train_op=est.group(train_op, averages), eval_metric_ops=metrics)

    model = est.transform(replicate_model_fn(model_fn, devices=cpus(towers), **arguments))
    first = jax.tree.map(lambda x: x[0], BATCHES)
    state, spec = model.train_loop(model.init(jax.random.key(0), *first), batches)
    metrics = {name: metric.result() for name, metric in model.eval_step(state, *first).eval_metric_ops.items()}
    return jax.device_get((spec.loss, state.variables, metrics))


@pytest.mark.quick
@pytest.mark.parametrize("feature", FEATURES)
def test_towers_equal_one_tower_in_float64(feature):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        one, two = run(feature, 1), run(feature, 2)
    assert one[0].dtype == np.float64
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), one, two)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_in_float64():
    labels = BATCHES[1].copy()
    labels[1, 2] = np.nan
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        skipped = run("accumulation, on_nan skip", 2, (BATCHES[0], labels))
        two_steps = run("accumulation, on_nan skip", 2, jax.tree.map(lambda x: x[::2], BATCHES))
    jax.tree.map(np.testing.assert_array_equal, skipped[1], two_steps[1])
