"""A model whose towers are cut into segments is exported for batches of any size."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn


def model_fn(features, labels, mode):
    w = est.get_variable("w", (3, 4))
    outputs = jnp.tanh(jnp.tanh(features @ w) @ w.T)[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"y": outputs})
    loss = jnp.mean((outputs - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


@pytest.mark.quick
def test_a_model_in_segments_is_exported_for_any_number_of_rows(tmp_path):
    replicated = replicate_model_fn(model_fn, devices=cpus(2), tower_transform=est.checkpoint_segments)
    estimator = est.Estimator(replicated, tmp_path / "model")
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    estimator.train(lambda: [(x[:4], x[:4, 0])] * 2)
    exported = est.load_exported(estimator.export_model(tmp_path / "export", x[:2]))
    expected = [row["y"] for row in estimator.predict(lambda: [x])]
    for rows in (1, 2, 5):
        np.testing.assert_allclose(exported(x[:rows])["y"], expected[:rows], rtol=1e-5)
