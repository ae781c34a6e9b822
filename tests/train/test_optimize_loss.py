"""`est.train.optimize_loss`: what it does to gradients, in TensorFlow's order, and its summaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.towers import replicate, started

import estimator as est
from replicate import TowerOptimizer

X = np.arange(8, dtype=np.float32).reshape(4, 2)
ONES = jax.nn.initializers.ones


def model_fn(features, labels, mode, params):
    a = est.get_variable("a", (2,), initializer=ONES)
    b = est.get_variable("b", (), initializer=ONES)
    loss = jnp.mean(features @ a) + 3 * b
    options = {"learning_rate": 0.1, "optimizer": "SGD"} | params
    train_op = est.train.optimize_loss(loss, est.global_step(), **options)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def step(towers=0, **params):
    """The change of the variables in a step, and what it reported."""
    model, state = started(replicate(model_fn, towers), X, params=params)
    after, spec = model.train_step(state, X)
    change = {name: np.asarray(after.variables[name] - state.variables[name]) for name in ("a", "b")}
    return change, {
        name: np.asarray(report.value) for name, report in spec.reported.items() if hasattr(report, "value")
    }


GRADIENTS = {"a": np.array([3.0, 4.0]), "b": np.array(3.0)}  # of norm sqrt(34)


@pytest.mark.quick
@pytest.mark.parametrize(
    "params, factors",
    [
        ({}, (1, 1)),
        ({"optimizer": lambda rate: est.Optimizer(optax.sgd(rate))}, (1, 1)),
        ({"optimizer": est.train.GradientDescentOptimizer}, (1, 1)),
        ({"optimizer": est.train.GradientDescentOptimizer(0.1), "learning_rate": None}, (1, 1)),
        ({"gradient_multipliers": {"b": 2.0}}, (1, 2)),
        ({"clip_gradients": 1.0}, (34**-0.5, 34**-0.5)),
        ({"gradient_multipliers": {"b": 0.0}, "clip_gradients": 1.0}, (1 / 5, 0)),  # clipped after that
        ({"clip_gradients": lambda pairs: [(g / 2, name) for g, name in pairs]}, (0.5, 0.5)),
        ({"variables": ["b"]}, (0, 1)),
        ({"learning_rate_decay_fn": lambda rate, step: rate / (step.astype(float) + 2)}, (0.5, 0.5)),
    ],
)
def test_gradients_are_multiplied_then_clipped(params, factors):
    change, _ = step(**params)
    for (name, gradient), factor in zip(GRADIENTS.items(), factors, strict=True):
        np.testing.assert_allclose(change[name], -0.1 * factor * gradient, rtol=1e-5, atol=1e-7)


def test_summaries_have_the_names_of_tensorflow():
    decay = functools.partial(est.train.exponential_decay, decay_steps=10, decay_rate=0.5)
    _, reported = step(clip_gradients=1.0, learning_rate_decay_fn=decay, summaries=est.train._optimize_loss.SUMMARIES)
    expected = {"learning_rate": 0.1, "loss": 10, "gradient_norm/a": 5 * 34**-0.5, "gradient_norm/b": 3 * 34**-0.5}
    expected |= {"global_norm/gradient_norm": 34**0.5, "global_norm/clipped_gradient_norm": 1}
    assert reported == pytest.approx({f"OptimizeLoss/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert step(summaries=[], name="d")[1] == {}
    assert {*step(name="d")[1]} == {"d/loss", "d/global_norm/gradient_norm"}


def test_noise_is_scaled_differs_by_step_and_is_cut_at_2():
    change, _ = step(gradient_noise_scale=0.5)
    noise = np.concatenate([(change[name] / -0.1 - GRADIENTS[name]).ravel() for name in GRADIENTS])
    assert (np.abs(noise) <= 1 + 1e-4).all() and np.unique(noise).size == 3


def table_fn(features, labels, mode, params):
    rows = est.embedding_lookup("table", jnp.array([1, 1, 3]), shape=(4, 2), initializer=ONES)
    options = {"clip_gradients": 1.0, "optimizer": "SGD"} | params
    train_op = est.train.optimize_loss(rows.sum(), est.global_step(), 1.0, **options)
    return est.EstimatorSpec(mode, loss=rows.sum(), train_op=train_op)


@pytest.mark.quick
@pytest.mark.parametrize("noise, changed", [(None, [False, True, False, True]), (0.1, [True] * 4)])
def test_rows_of_a_table_are_clipped_by_the_norm_of_their_sums(noise, changed):
    model, state = started(table_fn, X, params={"gradient_noise_scale": noise})
    change = model.train_step(state, X)[0].variables["table"] - state.variables["table"]
    assert (change != 0).any(1).tolist() == changed
    assert jnp.linalg.norm(change) == pytest.approx(1, rel=1e-5)
    if noise is None:
        np.testing.assert_allclose(change[1], 2 * change[3], rtol=1e-5)


def test_towers_train_as_one_where_nothing_is_cut():
    def optimizer(rate):
        return TowerOptimizer(est.train.GradientDescentOptimizer(rate))

    one, _ = step(optimizer=optimizer)
    two, reported = step(2, optimizer=optimizer, clip_gradients=100.0)
    for name, change in one.items():
        np.testing.assert_allclose(two[name], change, rtol=1e-5)
    assert reported["OptimizeLoss/loss"] == pytest.approx(10)


REFUSED = {
    ValueError: [
        ({"learning_rate": -1.0}, "a learning rate of at least 0; got -1.0"),
        ({"optimizer": "Adamm"}, r"an optimizer out of \['Adagrad', 'Adam'.*; got 'Adamm'"),
        ({"learning_rate": None}, "needs a learning rate, .*; got 'SGD' and the learning rate None"),
        ({"summaries": ["losses"]}, r"summaries out of .*; got \['losses'\]"),
        ({"update_ops": [1]}, r"needs no `update_ops`.* Leave it out; got \[1\]"),
        ({"gradient_multipliers": {"c": 1.0}}, r"for \['c'\]; the variables are \['a', 'b'\]"),
    ],
    TypeError: [({"optimizer": optax.sgd}, "needs an optimizer of `est.train`, .* write `lambda rate: est.Optimizer")],
}


@pytest.mark.parametrize("error, params, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(params, error, message):
    with pytest.raises(error, match=message):
        started(model_fn, X, params=params)


def test_in_towers_a_name_counts_as_a_wrapped_optimizer():
    want, _ = step(1, optimizer="Adam")
    for name, change in step(2, optimizer="Adam")[0].items():
        np.testing.assert_allclose(change, want[name], rtol=1e-6)
