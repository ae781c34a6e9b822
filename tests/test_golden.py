"""The numbers that TensorFlow 1.12's own `replicate_model_fn` computed (tests/golden), through the public API."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.metrics import all_metrics
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "replicate_model_fn_tf112.json").read_text())
TOLERANCE = 5e-5
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05, eps=1e-12),
    "adagrad": lambda: optax.adagrad(0.1, initial_accumulator_value=0.1),
}
REDUCTIONS = {"sum": est.Reduction.SUM, "mean": est.Reduction.MEAN, "default": est.Reduction.SUM_BY_NONZERO_WEIGHTS}


def variables(case):
    return {
        name: est.get_variable(name, initializer=np.asarray(value, np.float32)) for name, value in case["init"].items()
    }


def train_model_fn(case):
    reduce = jnp.sum if case["loss_reduction"] == "sum" else jnp.mean
    optimizer = OPTIMIZERS[case["optimizer"]]

    def model_fn(features, labels, mode):
        v = variables(case)
        output = jnp.tanh(features @ v["w1"] + v["b1"]) @ v["w2"]
        loss = reduce((output - labels) ** 2)
        names = ["w1", "b1", "w2"]
        if case["kind"] == "fn":
            train_op = TowerOptimizer(optimizer).minimize(loss)
        elif case["kind"] == "clip":
            tower_optimizer = TowerOptimizer(optimizer())
            gradients = tower_optimizer.compute_gradients(loss, names)
            train_op = tower_optimizer.apply_gradients([(jnp.clip(g, -0.02, 0.02), name) for g, name in gradients])
        elif case["kind"] == "split":
            other = reduce((features @ v["d"] - labels) ** 2)
            train_op = est.group(
                TowerOptimizer(optimizer()).minimize(loss, var_list=names),
                TowerOptimizer(optax.sgd(0.05)).minimize(other, var_list=["d"]),
            )
            loss = loss + other
        else:
            train_op = TowerOptimizer(optimizer()).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def marked(case):
    is_quick = re.fullmatch(r"(train-momentum-mean|clip)-\d", case["name"])
    return pytest.param(case, id=case["name"], marks=pytest.mark.quick if is_quick else ())


@pytest.mark.slow
@pytest.mark.covers("12 gradients", "12 equality")
@pytest.mark.parametrize("case", [marked(case) for case in GOLDEN["train"]])
def test_training_matches_tensorflow(case):
    reduction, devices = REDUCTIONS[case["loss_reduction"]], cpus(case["towers"])
    model_fn = replicate_model_fn(train_model_fn(case), reduction, devices=devices)
    x, y = np.asarray(case["x"], np.float32), np.asarray(case["y"], np.float32)
    model = est.transform(model_fn)
    state = model.init(jax.random.key(0), x[0], y[0])
    losses = []
    for batch in zip(x, y, strict=True):
        state, spec = model.train_step(state, *batch)
        losses.append(spec.loss)
    np.testing.assert_allclose(losses, case["losses"], rtol=TOLERANCE)
    for name, value in case["final"].items():
        np.testing.assert_allclose(state.variables[name], value, atol=TOLERANCE, rtol=0)


def eval_model_fn(case):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", initializer=np.asarray(case["w"], np.float32))
        wb = est.get_variable("wb", initializer=np.asarray(case["wb"], np.float32))
        logits, p = features["x"] @ w, jax.nn.sigmoid(features["x"] @ wb)
        chosen = logits.argmax(-1)
        predictions = {"class": chosen, "p": p, "logits": logits}
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=predictions)
        y, yb, weight = labels["y"], labels["yb"], labels["weight"]
        losses = est.losses.sparse_softmax_cross_entropy(y, logits, reduction=est.Reduction.NONE)
        loss = losses.sum() if case["loss_reduction"] == "sum" else losses.mean()
        metrics = all_metrics(y, chosen, logits, yb, p)
        metrics["weighted_accuracy"] = est.metrics.accuracy(y, chosen, weights=weight)
        return est.EstimatorSpec(mode, loss=loss, predictions=predictions, eval_metric_ops=metrics)

    return model_fn


@pytest.mark.quick
@pytest.mark.covers("12 loss")
@pytest.mark.parametrize("case", GOLDEN["eval"], ids=lambda case: case["name"])
def test_evaluation_and_prediction_match_tensorflow(case, tmp_path):
    def input_fn():
        for x, y, yb, weight in zip(case["x"], case["y"], case["yb"], case["weight"], strict=True):
            labels = {"yb": np.asarray(yb, np.float32), "weight": np.asarray(weight, np.float32)}
            yield {"x": np.asarray(x, np.float32)}, labels | {"y": np.asarray(y, np.int32)}

    reduction, devices = REDUCTIONS[case["loss_reduction"]], cpus(case["towers"])
    model_fn = replicate_model_fn(eval_model_fn(case), reduction, devices=devices)
    estimator = est.Estimator(model_fn, tmp_path)
    results = estimator.evaluate(input_fn)
    expected = {name: value for name, value in case["results"].items() if name != "global_step"}
    assert set(results) == {*expected, "global_step"}
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    predictions = list(estimator.predict(input_fn))
    for name, values in case["predictions"].items():
        got = np.stack([row[name] for row in predictions])
        np.testing.assert_allclose(got, np.reshape(values, got.shape), atol=TOLERANCE, err_msg=name)
