"""The numbers that TensorFlow 1.12's own `replicate_model_fn` computed (tests/golden), through the public API."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
REDUCTIONS = {
    "sum": est.Reduction.SUM,
    "mean": est.Reduction.MEAN,
    "default": est.Reduction.SUM_BY_NONZERO_WEIGHTS,
}


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


@pytest.mark.parametrize("case", GOLDEN["train"], ids=lambda case: case["name"])
def test_training_matches_tensorflow(case):
    model_fn = replicate_model_fn(
        train_model_fn(case),
        REDUCTIONS[case["loss_reduction"]],
        devices=[f"/cpu:{i}" for i in range(case["towers"])],
    )
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
