"""Bidirectional layers on top of each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.towers import started

import estimator as est

X = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
LENGTHS = np.array([5, 2, 3])


def model_fn(features, mode, params):
    """Predicts the outputs of the stack, the same by the layer below, and the states of both directions."""
    outputs, forwards, backwards = est.layers.stack_bidirectional_rnn(features, [4, 3], LENGTHS, **params)
    layer, x = getattr(est.layers, f"bidirectional_{params.get('cell', 'lstm')}"), features
    with est.variable_scope("stack_bidirectional_rnn", reuse=True):
        for number, units in enumerate([4, 3]):
            with est.variable_scope(f"cell_{number}"):
                x = jnp.concatenate(layer(x, units, LENGTHS, name="bidirectional_rnn")[0], -1)
    predictions = outputs, x, forwards, backwards
    return est.EstimatorSpec(mode, predictions, loss=jnp.abs(outputs - x).max(), train_op=est.group())


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_each_layer_gets_both_directions_of_the_one_below(cell):
    model, state = started(model_fn, X, params={"cell": cell}, mode="infer")
    outputs, same, forwards, backwards = model.predict_step(state, X).predictions
    assert outputs.shape == (3, 5, 6) and not outputs[1, 2:].any()
    np.testing.assert_array_equal(outputs, same)
    last = [jax.tree.leaves(states[-1])[-1] for states in (forwards, backwards)]
    np.testing.assert_allclose(last[0], outputs[np.arange(3), LENGTHS - 1, :3], rtol=1e-6)
    np.testing.assert_allclose(last[1], outputs[:, 0, 3:], rtol=1e-6)
    assert {name.rsplit("/", 3 if cell == "gru" else 2)[0] for name in state.variables} == {
        f"stack_bidirectional_rnn/cell_{n}/bidirectional_rnn/{way}" for n in (0, 1) for way in ("fw", "bw")
    }


@pytest.mark.slow
def test_dropout_between_layers_acts_in_training_alone():
    model, state = started(model_fn, X, params={"dropout_rate": 0.5})
    trained, evaluated = model.train_step(state, X)[1], model.eval_step(state, X)
    assert trained.loss > 1e-3 and evaluated.loss == 0
    for ways in (2, 3):  # the states forwards, and backwards; the first layer has no dropout
        for x, y in zip(*(jax.tree.leaves(each.predictions[ways][0]) for each in (trained, evaluated)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("options", [{"units": 4}, {"units": []}, {"units": [4], "cell": "rnn"}])
def test_wrong_layers_are_errors(options):
    with pytest.raises(ValueError, match="needs the units of each layer, such as .*; got"):
        est.layers.stack_bidirectional_rnn(X, **options)
