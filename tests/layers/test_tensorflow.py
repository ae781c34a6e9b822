"""The numbers and names that TensorFlow 1.12's own layers gave (tests/golden), through `est.layers`."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import started

import estimator as est

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "layers_tf112.json"
CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text())["cases"]}
RECURRENT = ("lstm", "gru")


def array(values):
    return np.array(values, np.float32)


def apply(layers, x):
    for name, arguments in layers:
        if name.startswith("scope:"):
            with est.variable_scope(name.removeprefix("scope:")):
                x = apply(arguments, x)
        else:
            x = getattr(est.layers, name)(x, **arguments)
    return x


def model_fn(features, labels, mode, params):
    case = params["case"]
    output = apply(case["layers"], features)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=output)
    loss = jnp.mean(output * array(case["loss_weights"]))
    train_op = est.Optimizer(optax.sgd(case["learning_rate"])).minimize(loss)
    return est.EstimatorSpec(mode, predictions=output, loss=loss, train_op=train_op)


def assert_close(got, want, what):
    np.testing.assert_allclose(got, array(want), rtol=1e-5, atol=1e-5, err_msg=what)


def model_of(case):
    """A model, and its state with the case's values."""
    model = est.transform(model_fn, params={"case": case})
    like = model.abstract_init(array(case["inputs"][0]))
    variables = {name: array(value) for name, value in case["variables"].items()}
    assert {name: value.shape for name, value in like.variables.items()} == {
        name: value.shape for name, value in variables.items()
    }
    assert not jax.tree.leaves(like.slots)
    return model, est.State(variables, like.slots, np.int32(0), jax.random.key(0))


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in CASES if name not in RECURRENT])
def test_names_training_and_evaluation_match_tensorflow(name):
    case = CASES[name]
    model, state = model_of(case)
    assert sorted(model.info(array(case["inputs"][0])).trainable) == sorted(case["trainable"])
    for step, (x, loss) in enumerate(zip(case["inputs"], case["losses"], strict=True)):
        state, spec = model.train_step(state, array(x))
        assert_close(spec.loss, loss, f"loss of step {step}")
        if step == 0:
            assert_close(spec.predictions, case["output_train"], "output")
    for variable, value in case["variables_after"].items():
        assert_close(state.variables[variable], value, variable)
    evaluated, wanted = model.eval_step(state, array(case["inputs"][0])), array(case["output_eval_after"])
    assert_close(evaluated.loss, np.mean(wanted * array(case["loss_weights"])), "evaluation")
    assert_close(model.predict_step(state, array(case["inputs"][0])).predictions, wanted, "prediction")


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in CASES if name not in RECURRENT])
def test_gradients_match_tensorflow(name):
    case = CASES[name]
    _, state = model_of(case)
    kinds = {name: name in case["trainable"] for name in case["variables"]}

    def fn(features, labels, mode):
        """Its variables are trained by the input's name too, so that the gradient of the input is one of those."""
        x = est.get_variable("x", initializer=array(case["inputs"][0]))
        loss = jnp.mean(apply(case["layers"], x) * array(case["loss_weights"]))
        gradients = est.Optimizer(optax.sgd(1.0)).compute_gradients(loss)
        return est.EstimatorSpec(mode, {name: g for g, name in gradients}, loss, est.TrainOp())

    model = est.transform(fn)
    start = state._replace(variables={"x": array(case["inputs"][0]), **state.variables}, slots={})
    got = model.train_step(start, np.ones(1, np.float32))[1].predictions
    assert_close(got.pop("x"), case["gradient_of_input"], "input")
    assert got.keys() == {name for name, trainable in kinds.items() if trainable}
    for variable, value in got.items():
        assert_close(value, case["gradients"][variable], variable)


@pytest.mark.quick
@pytest.mark.parametrize("name", RECURRENT)
def test_sequences_match_tensorflow(name):
    case = CASES[name]
    (layer, arguments), x = case["layers"][0], array(case["inputs"][0])

    def fn(features, labels, mode):
        outputs, state = getattr(est.layers, layer)(features, sequence_length=case["sequence_length"], **arguments)
        return est.EstimatorSpec(mode, predictions={"outputs": outputs, "state": jax.tree.leaves(state)})

    model, state = started(fn, x, mode="infer")
    assert {name: value.shape for name, value in state.variables.items()} == {
        name: array(value).shape for name, value in case["variables"].items()
    }
    state = state._replace(variables={name: jnp.array(array(v)) for name, v in case["variables"].items()})
    predictions = model.predict_step(state, x).predictions
    assert_close(predictions["outputs"], case["output_train"], "outputs")
    assert_close(np.stack(predictions["state"]), case["state"], "state")
