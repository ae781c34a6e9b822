"""Batches of numpy's own dtypes, int64 and float64, are taken as int32 and float32, without a warning."""

import jax
import numpy as np
from testing.model_fns import regressing, zeros

import estimator as est
from replicate import explain

FEATURES, LABELS = {"x": np.arange(4)}, np.arange(4.0)
assert (FEATURES["x"].dtype, LABELS.dtype) == (np.int64, np.float64)


model_fn = regressing(lambda features: features["x"].astype(np.float32) * zeros("w"))


def test_an_estimator_trains_and_exports(tmp_path):
    estimator = est.Estimator(model_fn, tmp_path)
    estimator.train(lambda: [(FEATURES, LABELS)] * 30, steps=30)
    assert abs(estimator.get_variable_value("w") - 1) < 1e-3
    assert estimator.evaluate(lambda: [(FEATURES, LABELS)])["loss"] < 1e-3
    served = est.load_exported(estimator.export_model(tmp_path / "export", FEATURES))(FEATURES)["output"]
    np.testing.assert_allclose(served, list(estimator.predict(lambda: [FEATURES])), rtol=1e-6)


def test_a_loop_of_steps_and_reports():
    model = est.transform(model_fn)
    state = model.init(jax.random.key(0), FEATURES, LABELS)
    batches = {"x": np.stack([FEATURES["x"]] * 3)}, np.stack([LABELS] * 3)
    assert model.train_loop(state, batches)[1].loss[0] == 3.5
    batch = jax.tree.map(lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)), (FEATURES, LABELS))
    assert est.memory_report(model_fn, FEATURES, LABELS) == est.memory_report(model_fn, *batch)
    one, other = (explain(model_fn, *each, devices=["cpu:0"]) for each in ((FEATURES, LABELS), batch))
    assert str(one) == str(other)
