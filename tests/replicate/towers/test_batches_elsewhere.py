"""Batches that lie on other devices than the towers, or on another mesh; and those that a model_fn takes for whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from testing.towers import started

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

X = np.arange(16, dtype=np.float32).reshape(8, 2)
CPUS = np.array(jax.devices("cpu"))
ROWS = PartitionSpec("x")
PLACES = {
    "one device": SingleDeviceSharding(CPUS[6]),
    "a larger mesh": NamedSharding(Mesh(CPUS, ("x",)), ROWS),
    "an explicit mesh": NamedSharding(
        Mesh(CPUS[:4].reshape(2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2), ROWS
    ),
}


def model_fn(features, mode):
    output = features @ est.get_variable("w", (2, 1))
    loss = (output**2).mean()
    return est.EstimatorSpec(mode, output, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "distribution"),
    [("one device", "mirrored"), ("an explicit mesh", "mirrored"), ("a larger mesh", "shared_round_robin")],
)
def test_a_batch_from_anywhere_is_moved_to_the_towers(place, distribution):
    model, state = started(replicate_model_fn(model_fn, devices=[*CPUS[:4]], variable_distribution=distribution), X)
    x = jax.device_put(X, PLACES[place])
    for step in (
        lambda x: model.train_step(state, x)[1].loss,
        lambda x: model.train_loop(state, [x, x])[1].loss,
        lambda x: model.eval_step(state, x).loss,
        lambda x: model.predict_step(state, x).predictions,
    ):
        np.testing.assert_array_equal(step(x), step(X))


@pytest.mark.quick
@pytest.mark.parametrize(
    "use",
    [
        lambda x: jnp.broadcast_to(x, (8, 2)),
        lambda x: jnp.einsum("bi,bj->bi", x, jnp.ones((8, 1))),
        lambda x: x + jnp.ones((8, 2)),
        lambda x: jnp.concatenate([x, jnp.ones((8, 3))], 1)[:, :2],
    ],
)
def test_an_array_of_the_whole_batch_beside_the_rows_of_a_tower_is_explained(use):
    def whole(features, mode):
        return model_fn(use(features), mode)

    model, state = started(replicate_model_fn(whole, devices=[*CPUS[:4]]), X)
    with pytest.raises((TypeError, ValueError)) as raised:
        model.train_step(state, X)
    assert any("which has 2 of the 8 rows of the batch. Write -1" in note for note in raised.value.__notes__)


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(8, 2), 16])
def test_a_shape_of_the_whole_batch_in_a_tower_is_explained(shape):
    def whole(features, mode):
        return model_fn(features.reshape(shape).reshape(-1, 2), mode)

    model, state = started(replicate_model_fn(whole, devices=[*CPUS[:4]]), X)
    with pytest.raises(TypeError, match="cannot reshape") as raised:
        model.train_step(state, X)
    note = (
        "The model_fn runs in one of 4 towers, which has 2 of the 8 rows of the batch. Write -1, or "
        "`features.shape[0]`, instead of the batch size."
    )
    assert raised.value.__notes__.count(note) == 1
