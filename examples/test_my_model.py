"""Tests of a model_fn of one's own: it learns, and towers compute what one device does. To be run by pytest:

    pytest examples/test_my_model.py

No GPU is needed: `simulate_devices` makes several devices of one CPU. The model has what easily goes wrong in towers, a
batch norm, whose statistics must be taken over the whole batch. The last test prints the error where they are not.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import estimator as est
from estimator.testing import assert_towers_match_one_batch, simulate_devices
from replicate import TowerOptimizer, VariableDistribution, cross_tower_mean, replicate_model_fn

simulate_devices(4)  # before anything else uses jax; with several files of tests, in conftest.py


def batch_norm(x, mode, mean_over_batch):
    mean = est.get_variable("mean", x.shape[1:], initializer=jax.nn.initializers.zeros, trainable=False)
    square = est.get_variable("square", x.shape[1:], initializer=jax.nn.initializers.ones, trainable=False)
    if mode == est.ModeKeys.TRAIN:
        batch_mean, batch_square = mean_over_batch(x), mean_over_batch(x**2)
        est.assign("mean", 0.9 * mean + 0.1 * batch_mean)
        est.assign("square", 0.9 * square + 0.1 * batch_square)
        mean, square = batch_mean, batch_square
    return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3)


def model_fn(features, labels, mode, params):
    kernel = est.get_variable("kernel", (2, 16))
    hidden = jax.nn.relu(batch_norm(features @ kernel, mode, params["mean_over_batch"]))
    output = (hidden @ est.get_variable("weights", (16, 1)))[:, 0]
    output += est.get_variable("bias", (), initializer=jax.nn.initializers.zeros)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"positive": output > 0, "output": output})
    loss = est.losses.mean_squared_error(labels, output)
    metrics = {"accuracy": est.metrics.accuracy(labels > 0, output > 0)}
    train_op = TowerOptimizer(optax.sgd(params["learning_rate"])).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


FEATURES = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
LABELS = np.sign(FEATURES[:, 0] * FEATURES[:, 1])  # the quadrants that lie across from each other are alike
GOOD = {"learning_rate": 0.1, "mean_over_batch": lambda x: cross_tower_mean(x.mean(0))}
BAD = GOOD | {"mean_over_batch": lambda x: x.mean(0)}


def test_it_learns(tmp_path):
    classifier = est.Estimator(replicate_model_fn(model_fn), tmp_path, params=GOOD)
    classifier.train(est.inputs.numpy_input_fn(FEATURES, LABELS, 64, num_epochs=None, shuffle=False), steps=200)
    metrics = classifier.evaluate(est.inputs.numpy_input_fn(FEATURES, LABELS, shuffle=False))
    assert metrics["accuracy"] > 0.9


@pytest.mark.parametrize("distribution", [VariableDistribution.MIRRORED, VariableDistribution.SHARDED])
def test_towers_are_one_device(distribution):
    replicate = functools.partial(replicate_model_fn, variable_distribution=distribution)
    assert_towers_match_one_batch(model_fn, FEATURES, LABELS, replicate=replicate, params=GOOD)


def test_statistics_of_a_tower_s_own_rows_are_noticed():
    with pytest.raises(AssertionError, match="2 towers differ from one in training step 1") as caught:
        assert_towers_match_one_batch(model_fn, FEATURES, LABELS, replicate=replicate_model_fn, params=BAD)
    print(f"\n{caught.value}")
