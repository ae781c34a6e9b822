"""Training in towers equals training on one big batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.model_fns import minimizing, ones
from testing.towers import (
    OPTIMIZERS,
    STEPS,
    assert_close,
    assert_same_training,
    one_step,
    reduced,
    regression,
    replicate,
)

import estimator as est
from replicate import TowerOptimizer

# The core law.


@pytest.mark.quick
def test_one_step_of_rate_one_shows_the_gradient_of_the_big_batch():
    (x,), (y,) = regression(8, steps=1)

    def loss_fn(w):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    model_fn = minimizing(lambda x, y: jnp.mean((jnp.tanh(x @ ones("w", (3,))) - y) ** 2), optax.sgd(1.0))
    state, spec = one_step(replicate(model_fn, 4), x, y)
    loss, gradient = jax.value_and_grad(loss_fn)(jnp.ones(3))
    assert_close(spec.loss, loss)
    assert_close(1.0 - state.variables["w"], gradient)


trees = st.recursive(  # whose leaves have the shapes of a row
    st.lists(st.integers(1, 3), max_size=2).map(np.zeros),
    lambda children: (
        st.lists(children, min_size=1, max_size=2)
        | st.tuples(children, children)
        | st.dictionaries(st.sampled_from("ab"), children, min_size=1)
    ),
    max_leaves=3,
)


def over_rows(x):
    return x.reshape(x.shape[0], -1).mean(1)


def tree_model_fn(optimizer, reduction):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", lambda key: jax.tree.map(lambda x: jnp.ones(x.shape[1:]), features))
        v = est.get_variable("v", lambda key: jax.tree.map(lambda x: jnp.ones(x.shape[1:]), labels))
        outputs = jax.tree.map(lambda x, w: jnp.tanh(x * w), features, w)
        score = sum(over_rows(leaf) for leaf in jax.tree.leaves(outputs))

        def error(y, v):
            return over_rows((score.reshape(-1, *(1,) * v.ndim) * v - y) ** 2)

        losses = sum(jax.tree.leaves(jax.tree.map(error, labels, v)))
        loss = reduced(losses, reduction)
        train_op = TowerOptimizer(optimizer).minimize(loss)
        metrics = {"mean_loss": est.metrics.mean(losses)}
        predictions = (outputs, {"score": score})
        return est.EstimatorSpec(mode, predictions, loss, train_op, metrics)

    return model_fn


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    features=trees,
    labels=trees,
    towers=st.sampled_from([1, 2, 3, 4, 8]),
    rows=st.integers(1, 3),
    reduction=st.sampled_from(["sum", "mean"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adagrad"]),
    seed=st.integers(0, 99),
)
def test_any_pytrees_of_features_and_labels(features, labels, towers, rows, reduction, optimizer, seed):
    rng = np.random.default_rng(seed)

    def make(row):
        return rng.normal(size=(2, towers * rows, *row.shape)).astype(np.float32)

    batches = jax.tree.map(make, (features, labels))
    model_fn = tree_model_fn(OPTIMIZERS[optimizer](), reduction)
    assert_same_training(model_fn, replicate(model_fn, towers, reduction), batches, rtol=5e-5, atol=1e-5)


# Weighted losses.

WEIGHTED = [
    est.Reduction.SUM,
    est.Reduction.MEAN,
    est.Reduction.SUM_OVER_BATCH_SIZE,
    est.Reduction.SUM_BY_NONZERO_WEIGHTS,
]


def weighted_model_fn(reduction, steps=1):
    def loss_of(features, labels):
        output = features["x"] @ ones("w", (3,))
        return est.losses.mean_squared_error(labels, output, features["weight"], reduction)

    return minimizing(loss_of, optax.sgd(0.1), accumulate_steps=steps)


def uneven_weights(towers, rows):
    """Over the towers: a tenth, all, none; then a tenth again."""
    weights = np.zeros((STEPS, towers, rows), np.float32)
    weights[:, ::3, 0] = 3.0
    weights[:, 1::3, :] = np.linspace(0.1, 2, rows)
    return weights.reshape(STEPS, -1)


@functools.cache
def weighted_models(reduction):
    model_fn = weighted_model_fn(reduction)
    return est.transform(model_fn), est.transform(replicate(model_fn, 4, reduction))


@settings(max_examples=20, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 7.0]), min_size=8, max_size=8),
    reduction=st.sampled_from(WEIGHTED),
)
def test_any_weights_give_the_global_mean(weights, reduction):
    one, four = weighted_models(reduction)
    (x,), (y,) = regression(8, steps=1)
    features = {"x": x, "weight": np.asarray(weights, np.float32)}
    state = one.init(jax.random.key(0), features, y)
    (plain, want), (towers, got) = (model.train_step(state, features, y) for model in (one, four))
    assert_close(got.loss, want.loss)
    assert_close(towers.variables, plain.variables)


@pytest.mark.quick
def test_gradients_flow_through_the_denominator_of_a_weighted_mean():
    def model_fn(features, labels, mode):
        w = ones("w", (3,))
        weights = jax.nn.sigmoid(features["x"] @ ones("u", (3,))) * features["weight"]
        loss = est.losses.mean_squared_error(labels, features["x"] @ w, weights, est.Reduction.MEAN)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.5)).minimize(loss))

    x, y = regression(40)
    state = assert_same_training(model_fn, replicate(model_fn, 4), ({"x": x, "weight": uneven_weights(4, 10)}, y))
    assert np.abs(state.variables["u"] - 1).max() > 1e-3


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "steps"), [(4, 1), (2, 2)])
def test_weights_that_are_all_zero_leave_the_variables_as_they_are(towers, steps):
    x, y = regression(8, steps=1)
    features, y = {"x": x[0], "weight": np.zeros(8, np.float32)}, y[0]
    state, spec = one_step(replicate(weighted_model_fn("weighted_mean", steps), towers), features, y)
    assert spec.loss == 0
    np.testing.assert_array_equal(state.variables["w"], np.ones(3))
