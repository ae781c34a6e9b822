"""The names of what is reported in scopes: TensorFlow's, of whose openings no two have the same name."""

import jax
import jax.numpy as jnp
import optax
import pytest
from testing.towers import cpus

import estimator as est
from estimator.core._record import Scalar, report_in_training
from replicate import BlockSync, TowerOptimizer, bmuf, replicate_model_fn

X, Y = jnp.arange(8.0).reshape(8, 1) + 1, jnp.ones((8, 1))
VARIABLES = ["d/dense/bias", "d/dense/kernel"]


def twice(x):
    """A discriminator in a scope that is entered twice."""
    for _ in range(2):
        with est.variable_scope("d", reuse=est.AUTO_REUSE):
            h = est.layers.dense(x, 1)
            est.summary.scalar("h", h.mean())
            est.record("h", h.mean())
            with est.variable_scope("inner"):
                est.record("h", h.mean())


TWICE = ["d/h", "d/h_1", "d/inner/h", "d_1/h", "d_1/h_1", "d_1/inner/h"]


def by_its_object(x):
    with est.variable_scope("outer"):
        with est.variable_scope("d") as scope:
            est.layers.dense(x, 1)
            est.record("h", x.mean())
        with est.variable_scope(scope, reuse=True):
            est.record("h", x.mean())
    with est.variable_scope(scope, reuse=True):
        est.record("h", x.mean())
        with est.variable_scope(scope):
            est.record("h", x.mean())


def by_default_names(x):
    for _ in range(2):
        with est.variable_scope(None, "d"):
            est.get_variable("w", ())
            est.record("h", x.mean())
    for _ in range(2):
        with est.variable_scope("again", reuse=est.AUTO_REUSE), est.variable_scope(None, "d"):
            est.get_variable("w", ())
            est.record("h", x.mean())


def at_the_top(x):
    with est.variable_scope(est.get_variable_scope(), reuse=est.AUTO_REUSE):
        est.record("h", x.mean())
    with est.variable_scope("d"), est.variable_scope(est.get_variable_scope()):
        est.record("h", x.mean())


def like_another(x):
    for name in ("d", "d", "d_1", "d"):
        with est.variable_scope(name):
            est.record("h", x.mean())


def beside_layers(x):
    for _ in range(2):
        est.layers.dense(x, 1)
        est.record("h", x.mean())
    with est.variable_scope("dense", reuse=True):
        est.get_variable("kernel", (1, 1))
        est.record("h", x.mean())
    est.record("dense", x.mean())  # a scope does not take the name of a value


LAYERS = ["dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel"]
RULES = {
    "by name": (twice, TWICE, VARIABLES),
    "by its object": (
        by_its_object,
        ["d/d/h", "d/h", "outer/d/h", "outer/d_1/h"],
        ["outer/d/dense/bias", "outer/d/dense/kernel"],
    ),
    "by default names": (by_default_names, ["again/d/h", "again_1/d/h", "d/h", "d_1/h"], ["again/d/w", "d/w", "d_1/w"]),
    "at the top": (at_the_top, ["d/d/h", "h"], []),
    "like another": (like_another, ["d/h", "d_1/h", "d_1_1/h", "d_2/h"], []),
    "beside layers": (beside_layers, ["dense", "dense_2/h", "h", "h_1"], LAYERS),
}
RUNS = {
    "four": {"devices": 4},
    "accumulating": {"devices": 2, "accumulate_steps": 2},
    "in blocks": {"devices": 4, "block_sync": BlockSync(2, bmuf())},
}


def model_of(body, *, devices=0, accumulate_steps=1, computes_gradients=False, **arguments):
    """A model_fn with that body; `computes_gradients`: it is run twice in a trace."""

    def model_fn(features, labels, mode):
        body(features)
        output = features * est.get_variable("weight", ())
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=output)
        loss = est.losses.mean_squared_error(labels, output)
        optimizer = TowerOptimizer(optax.sgd(0.01), accumulate_steps=accumulate_steps)
        if computes_gradients:
            train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss, ["weight"]))
            body(features)
        else:
            train_op = optimizer.minimize(loss, var_list=["weight"])
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return est.transform(replicate_model_fn(model_fn, devices=cpus(devices), **arguments) if devices else model_fn)


def names_in_each_mode(model):
    """The names of two training steps, and of an evaluation and a prediction, each traced for itself; the state."""
    state = model.abstract_init(X, Y, mode="train")
    steps = [lambda state: model.train_step(state, X, Y)[1] for _ in range(2)]
    steps += [lambda state, n=rows: model.eval_step(state, X[:n], Y[:n]) for rows in (8, 7)]  # 7: in two parts
    steps.append(lambda state: model.predict_step(state, X))
    names = [sorted(jax.eval_shape(step, state).reported) for step in steps]
    return names, sorted(set(state.variables) - {"weight"})


@pytest.mark.quick
@pytest.mark.parametrize("rule", RULES)
def test_a_scope_entered_again_has_a_prefix_of_its_own_and_the_same_variables(rule):
    body, names, variables = RULES[rule]
    assert names_in_each_mode(model_of(body)) == ([names] * 5, variables)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_towers_have_the_names_of_a_run_alone(run):
    assert names_in_each_mode(model_of(twice, **RUNS[run])) == ([TWICE] * 5, VARIABLES)


@pytest.mark.slow
def test_names_count_from_the_beginning_where_a_model_fn_runs_again_for_gradients():
    again = sorted([*TWICE, *(name.replace("d", "d_2").replace("d_2_1", "d_3") for name in TWICE)])
    names, variables = names_in_each_mode(model_of(twice, devices=4, computes_gradients=True))
    assert names == [again] * 4 + [TWICE]
    assert variables == VARIABLES


def test_a_value_is_the_one_of_its_own_entry():
    def body(x):
        for factor in (1, 10):
            with est.variable_scope("d"):
                est.record("h", factor * x.sum())

    _, spec = (model := model_of(body)).train_step(model.init(jax.random.key(0), X, Y, mode="train"), X, Y)
    assert {name: float(report.value) for name, report in spec.reported.items()} == {"d/h": 36.0, "d_1/h": 360.0}


def test_no_part_of_a_model_reports_under_the_name_of_the_loss():
    def report(x):
        report_in_training("loss", lambda: Scalar(x.mean(), summary=True))

    def report_in_a_scope(x):
        with est.variable_scope("part"):
            report(x)

    model = model_of(report_in_a_scope)
    _, spec = model.train_step(model.init(jax.random.key(0), X, Y), X, Y)
    assert set(spec.reported) == {"part/loss"}
    message = r'`report_in_training\("loss", \.\.\.\)` was called outside of a name scope, where "loss" is the loss of'
    with pytest.raises(ValueError, match=message):
        model_of(report).init(jax.random.key(0), X, Y)
