"""Slots of optimizers that begin with TensorFlow's own checkpoint."""

import json
import pathlib

import jax
import numpy as np
import pytest

import estimator as est

TENSORFLOW = pathlib.Path(__file__).parents[1] / "golden" / "tf_checkpoint"
VALUES = {
    name: np.asarray(v["values"], v["dtype"]).reshape(v["shape"])
    for name, v in json.loads((TENSORFLOW / "values.json").read_text()).items()
}


def estimator_with(optimizer, settings, model_dir, scope=""):
    def model_fn(features, labels, mode):
        logits = est.layers.dense(features, 5, name=f"{scope}dense")
        loss = est.losses.mean_squared_error(labels, logits)
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer().minimize(loss))

    return est.Estimator(model_fn, str(model_dir), warm_start_from=settings)


class Seen(est.Hook):
    def after_create_state(self, context):
        self.state = jax.device_get(context.state)  # which the step donates


def started(tmp_path, scope="", optimizer=est.train.AdamOptimizer, **settings):
    settings = est.WarmStartSettings(str(TENSORFLOW), **settings)
    hook = Seen()
    batch = np.ones((4, 80), np.float32), np.zeros((4, 5), np.float32)
    estimator_with(optimizer, settings, tmp_path, scope).train(lambda: [batch], [hook])
    return hook.state


@pytest.mark.quick
@pytest.mark.parametrize("scope", ["", "new_"])
def test_adam_continues_with_the_slots_of_tensorflow(tmp_path, scope):
    renames = {f"{scope}dense/{part}": f"dense/{part}" for part in ("kernel", "bias")} if scope else None
    state = started(tmp_path, scope, vars_to_warm_start=[".*"], var_name_to_prev_var_name=renames)
    adam = state.slots["Adam"].inner
    for part in ("kernel", "bias"):
        np.testing.assert_array_equal(state.variables[f"{scope}dense/{part}"], VALUES[f"dense/{part}"])
        np.testing.assert_array_equal(adam.m[f"{scope}dense/{part}"], VALUES[f"dense/{part}/Adam"])
        np.testing.assert_array_equal(adam.v[f"{scope}dense/{part}"], VALUES[f"dense/{part}/Adam_1"])
    assert (adam.beta1_power, adam.beta2_power) == (VALUES["beta1_power"], VALUES["beta2_power"])


def test_without_a_list_variables_alone_are_taken(tmp_path):
    adam = started(tmp_path).slots["Adam"].inner
    assert not adam.m["dense/kernel"].any() and adam.beta1_power == np.float32(0.9)


def test_another_optimizer_has_no_slots_there(tmp_path):
    state = started(tmp_path, optimizer=lambda: est.train.MomentumOptimizer(0.1, 0.9), vars_to_warm_start=[".*"])
    np.testing.assert_array_equal(state.variables["dense/bias"], VALUES["dense/bias"])
    assert not state.slots["Momentum"].inner.momentum["dense/kernel"].any()
