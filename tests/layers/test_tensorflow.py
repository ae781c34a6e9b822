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
    """Of a case. It has a variable of zeros beside the case's, whose gradient is that of the input."""
    case = params["case"]
    x = features + est.get_variable("x", initializer=np.zeros_like(array(case["inputs"][0])))
    output = apply(case["layers"], x)
    loss = jnp.mean(output * array(case["loss_weights"]))
    if mode != est.ModeKeys.TRAIN:
        return est.EstimatorSpec(mode, output, loss)
    optimizer = est.Optimizer(optax.sgd(case["learning_rate"]))
    gradients = optimizer.compute_gradients(loss)
    train_op = optimizer.apply_gradients([(gradient, name) for gradient, name in gradients if name != "x"])
    return est.EstimatorSpec(mode, (output, {name: gradient for gradient, name in gradients}), loss, train_op)


def assert_close(got, want, what):
    np.testing.assert_allclose(got, array(want), rtol=1e-5, atol=1e-5, err_msg=what)


def model_of(case):
    """A model, and its state with the case's values."""
    x = array(case["inputs"][0])
    model = est.transform(model_fn, params={"case": case})
    like = model.abstract_init(x)
    variables = {"x": np.zeros_like(x)} | {name: array(value) for name, value in case["variables"].items()}
    assert {name: value.shape for name, value in like.variables.items()} == {
        name: value.shape for name, value in variables.items()
    }
    assert not jax.tree.leaves(like.slots)
    return model, est.State(variables, like.slots, np.int32(0), jax.random.key(0))


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in CASES if name not in RECURRENT])
def test_names_gradients_training_and_evaluation_match_tensorflow(name):
    case = CASES[name]
    model, state = model_of(case)
    assert sorted(model.info(array(case["inputs"][0])).trainable) == sorted([*case["trainable"], "x"])
    for step, (x, loss) in enumerate(zip(case["inputs"], case["losses"], strict=True)):
        state, spec = model.train_step(state, array(x))
        assert_close(spec.loss, loss, f"loss of step {step}")
        if step == 0:
            output, gradients = spec.predictions
            assert_close(output, case["output_train"], "output")
            assert_close(gradients.pop("x"), case["gradient_of_input"], "gradient of the input")
            assert gradients.keys() == {*case["trainable"]}
            for variable, gradient in gradients.items():
                assert_close(gradient, case["gradients"][variable], f"gradient of {variable}")
    for variable, value in case["variables_after"].items():
        assert_close(state.variables[variable], value, variable)
    evaluated, wanted = model.eval_step(state, array(case["inputs"][0])), array(case["output_eval_after"])
    assert_close(evaluated.loss, np.mean(wanted * array(case["loss_weights"])), "evaluation")
    assert_close(model.predict_step(state, array(case["inputs"][0])).predictions, wanted, "prediction")


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
