"""Evaluation and prediction in towers: every example counts once, in its place, whatever the batch size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing
from testing.towers import assert_close, cpus, results

import estimator as est
from replicate import TowerOptimizer, num_towers, replicate_model_fn

CASES = [(2, 13), (4, 3), (4, 8)]  # towers, rows: some that are left, fewer than towers, and as many for each
CLASSES = 3
LOSSES = {  # how each is reduced; "mean" is taken by hand
    "mean": est.Reduction.SUM_OVER_BATCH_SIZE,
    "weighted_sum": est.Reduction.SUM,
    "weighted_mean": est.Reduction.MEAN,
    "weighted_over_batch": est.Reduction.SUM_OVER_BATCH_SIZE,
    "weighted_by_nonzero": est.Reduction.SUM_BY_NONZERO_WEIGHTS,
}


def model_fn(features, labels, mode, params):
    logits = features["x"] @ est.get_variable("w", (4, CLASSES))
    classes = logits.argmax(-1).astype(jnp.int32)
    score = jax.nn.softmax(logits)[:, 0]
    predictions = {"logits": logits, "nested": (classes, [score > 0.4, {"id": features["id"]}])}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions)
    weight = features["weight"]
    if params["loss"] == "mean":
        loss = jnp.mean(jax.nn.logsumexp(logits, -1))
    else:
        loss = est.losses.sparse_softmax_cross_entropy(labels, logits, weight, LOSSES[params["loss"]])
    metrics = {
        "accuracy": est.metrics.accuracy(labels, classes),
        "weighted_accuracy": est.metrics.accuracy(labels, classes, weight),
        "mean": est.metrics.mean(score),
        "auc": est.metrics.auc(labels == 0, score),
        "mean_iou": est.metrics.mean_iou(labels, classes, CLASSES),
        "precision": est.metrics.precision(labels == 0, score > 0.4),
    }
    train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
    return est.EstimatorSpec(mode, predictions, loss, train_op, metrics)


def batch(rows):
    rng = np.random.default_rng(rows)
    weight = rng.uniform(0.5, 3, rows).astype(np.float32)
    weight[: rows // 3] = 0
    features = {
        "x": rng.normal(size=(rows, 4)).astype(np.float32),
        "weight": weight,
        "id": np.arange(rows, dtype=np.int32),
    }
    return features, rng.integers(0, CLASSES, rows).astype(np.int32)


@functools.cache
def plain(loss):
    model = est.transform(model_fn, params={"loss": loss})
    return model, model.init(jax.random.key(0), *batch(8))


@functools.cache
def plain_eval(loss, rows):
    model, state = plain(loss)
    return model.eval_step(state, *batch(rows))


@functools.cache
def replicated(loss, towers):
    return est.transform(replicate_model_fn(model_fn, LOSSES[loss], cpus(towers)), params={"loss": loss})


def assert_same_evaluation(loss, towers, rows):
    got = replicated(loss, towers).eval_step(plain(loss)[1], *batch(rows))
    want = plain_eval(loss, rows)
    assert_close(got.loss, want.loss)
    assert_close(got.predictions, want.predictions)
    assert list(got.eval_metric_ops) == list(want.eval_metric_ops)
    assert_close(*(results(jax.device_get(spec.eval_metric_ops)) for spec in (got, want)))


def assert_towers_evaluate_alike(model_fn, towers, *sizes):
    one = est.transform(model_fn)
    several = est.transform(replicate_model_fn(model_fn, devices=cpus(towers)))
    state = one.init(jax.random.key(0), *batch(8))
    for rows in sizes:
        got, want = (model.eval_step(state, *batch(rows)) for model in (several, one))
        assert_close(got.loss, want.loss)


@pytest.mark.slow
@pytest.mark.covers("12 splitting", "1.5 no padding")
@pytest.mark.parametrize("towers, rows", CASES)
def test_evaluation_and_predictions_in_input_order_equal_the_one_device_run(towers, rows):
    loss = "weighted_by_nonzero"
    assert_same_evaluation(loss, towers, rows)
    features, _ = batch(rows)
    model, state = plain(loss)
    got = replicated(loss, towers).predict_step(state, features)
    assert_close(got.predictions, model.predict_step(state, features).predictions)
    np.testing.assert_array_equal(got.predictions["nested"][1][1]["id"], np.arange(rows))
    assert_close(got.export_outputs["serving_default"].outputs, got.predictions)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "weighted_by_nonzero"])
def test_every_kind_of_loss_equals_the_one_device_run(loss):
    assert_same_evaluation(loss, 4, 7)


def test_two_weighted_losses_with_a_remainder_keep_their_own_denominators():
    def two_losses(features, labels):
        output = features["x"] @ est.get_variable("w", (4,))
        first = est.losses.absolute_difference(labels, output, features["weight"])
        return first + 3.0 * est.losses.mean_squared_error(labels, output, features["weight"], est.Reduction.MEAN)

    assert_towers_evaluate_alike(minimizing(two_losses), 4, 3, 7, 13)


WEIGHTS = {
    "none": lambda features, output: 1.0,
    "given": lambda features, output: features["weight"],
    "computed": lambda features, output: jax.nn.sigmoid(output),
}


@pytest.mark.quick
@pytest.mark.parametrize(("weights", "rows"), [("computed", 7), ("given", 4), ("none", 7)])
def test_gradients_may_be_computed_in_evaluation(weights, rows):
    """`compute_gradients` gives values in every mode; the repeated run must not see denominators of the run that was
    left."""

    def norm_fn(features, labels, mode):
        output = features["x"] @ est.get_variable("w", (4,))
        weight = WEIGHTS[weights](features, output)
        loss = est.losses.mean_squared_error(labels, output, weight, est.Reduction.MEAN)
        optimizer = TowerOptimizer(optax.sgd(0.1))
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    assert_towers_evaluate_alike(norm_fn, 2, rows)


def test_no_row_is_seen_twice_or_in_another_tower_than_its_own():
    def towers_fn(features, labels, mode):
        est.get_variable("w", ())
        towers = jnp.full(features.shape, num_towers(), jnp.int32)
        mine = jnp.broadcast_to(features.sum(), features.shape)
        return est.EstimatorSpec(mode, predictions={"towers": towers, "sum": mine})

    model = est.transform(replicate_model_fn(towers_fn, devices=cpus(4)))
    x = np.arange(10, dtype=np.float32)
    got = model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions
    np.testing.assert_array_equal(got["towers"], [4] * 8 + [1] * 2)
    np.testing.assert_array_equal(got["sum"], [1, 1, 5, 5, 9, 9, 13, 13, 17, 17])


@pytest.mark.slow
def test_a_state_trained_on_four_towers_is_evaluated_anywhere():
    features, labels = batch(8)
    four = replicated("weighted_mean", 4)
    state, _ = four.train_step(four.init(jax.random.key(0), features, labels), features, labels)
    host = jax.device_get(state._replace(key=None))._replace(key=jax.random.key(0))
    want = four.eval_step(state, features, labels).loss
    for model in (plain("weighted_mean")[0], replicated("weighted_mean", 2)):
        assert_close(model.eval_step(host, features, labels).loss, want)


@pytest.mark.quick
@pytest.mark.parametrize("where", [slice(0, 4), slice(4, 7), slice(0, 7), slice(1, 2)])
def test_rows_of_weight_zero_anywhere(where):
    features, labels = batch(7)
    features = features | {"weight": np.ones(7, np.float32)}
    features["weight"][where] = 0
    got, want = (
        model.eval_step(plain("weighted_mean")[1], features, labels)
        for model in (replicated("weighted_mean", 4), plain("weighted_mean")[0])
    )
    assert_close(got.loss, want.loss)
    metrics = [spec.eval_metric_ops["weighted_accuracy"].result() for spec in (got, want)]
    np.testing.assert_allclose(*metrics, rtol=1e-6)
