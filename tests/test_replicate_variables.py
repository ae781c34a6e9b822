"""Variables in towers: writes and their aggregation, batch norm, copies on devices, dtypes, keys."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_replicate import FOUR, assert_close, assert_same_training, mlp_model_fn, regression, replicate

import estimator as est
from replicate import TOWER_AXIS, TowerOptimizer


def assign_model_fn(write, aggregation=est.VariableAggregation.MEAN, initial=0.0):
    """`write(rows of the tower)` is called with the variable "s" there."""

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        est.get_variable("s", initializer=initial, trainable=False, aggregation=aggregation)
        write(features)
        loss = jnp.mean(w * features)
        seen = jnp.broadcast_to(est.read_variable("s"), features.shape)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, predictions=seen, loss=loss, train_op=train_op)

    return model_fn


def one_step(model_fn, features, towers):
    model = est.transform(replicate(model_fn, towers))
    state = model.init(jax.random.key(0), features)
    return model.train_step(state, features)


@pytest.mark.parametrize("aggregation, want", [("mean", 3.0), ("sum", 12.0), ("only_first_tower", 1.0)])
def test_assign_merges_by_aggregation(aggregation, want):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0]), aggregation)
    state, spec = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == want
    np.testing.assert_array_equal(spec.predictions, FOUR)


def test_assign_add_sums_over_towers_and_is_seen_in_the_run():
    model_fn = assign_model_fn(lambda x: est.assign_add("s", x.sum()), initial=10.0)
    state, spec = one_step(model_fn, FOUR, 2)
    assert state.variables["s"] == 22.0
    np.testing.assert_array_equal(spec.predictions, [13.0, 13.0, 19.0, 19.0])


def test_assign_add_after_assign_adds_to_the_merged_value():
    def write(x):
        est.assign_add("s", 1000.0)  # lost, as the assignment follows
        est.assign("s", x[0])
        est.assign_add("s", 10.0)

    state, _ = one_step(assign_model_fn(write), FOUR, 4)
    assert state.variables["s"] == 3.0 + 40.0


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_an_integer_counter_counts_every_tower(towers):
    model_fn = assign_model_fn(lambda x: est.assign_add("s", 1), initial=np.int32(5))
    state, _ = one_step(model_fn, FOUR, towers)
    assert state.variables["s"] == 5 + towers
    assert state.variables["s"].dtype == jnp.int32


@pytest.mark.parametrize("aggregation, want", [("sum", 12), ("only_first_tower", 1)])
def test_integers_are_assigned_by_sum_or_from_the_first_tower(aggregation, want):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0].astype(jnp.int32)), aggregation, np.int32(0))
    state, _ = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == want


def test_only_the_first_towers_value_counts_even_next_to_nan():
    model_fn = assign_model_fn(lambda x: est.assign("s", jnp.where(x[0] > 1, jnp.nan, x[0])), "only_first_tower")
    state, _ = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == 1.0


def test_a_pytree_of_statistics_is_averaged():
    def write(x):
        old = est.read_variable("s")
        est.assign("s", {"mean": 0.5 * old["mean"] + 0.5 * x.mean(), "max": x.max(keepdims=True)})

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        est.get_variable("s", initializer={"mean": 2.0, "max": jnp.zeros(1)}, trainable=False)
        write(features)
        loss = jnp.mean(w * features)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, _ = one_step(model_fn, FOUR, 2)
    assert_close(state.variables["s"], {"mean": jnp.float32(2.5), "max": jnp.full(1, 4.0)})


@pytest.mark.parametrize("mode", ["eval_step", "predict_step"])
def test_assignments_act_in_training_alone(mode):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0]))
    model = est.transform(replicate(model_fn, 2))
    state = model.init(jax.random.key(0), FOUR)
    spec = getattr(model, mode)(state, FOUR)
    np.testing.assert_array_equal(spec.predictions, np.zeros(4))


def test_the_state_is_the_same_on_every_device():
    model_fn = mlp_model_fn(optax.adam(0.1))
    x, y = regression(8)
    model = est.transform(replicate(model_fn, 4))
    state, _ = model.train_loop(model.init(jax.random.key(0), x[0], y[0]), (x, y))
    for leaf in jax.tree.leaves((state.variables, state.slots, state.global_step)):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert [shard.device for shard in leaf.addressable_shards] == jax.devices("cpu")[:4]
        for copy in copies:
            assert copy.shape == leaf.shape
            np.testing.assert_array_equal(copy, copies[0])


def batch_norm_model_fn(axis_name):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(4)(x)
            x = nn.BatchNorm(not train, momentum=0.9, axis_name=axis_name)(x)
            return nn.Dense(1)(jnp.tanh(x))[:, 0]

    net = Net()

    def model_fn(features, labels, mode):
        variables = est.get_variable("net", lambda key: Net().init(key, features, train=False)["params"])
        stats = est.get_variable(
            "stats",
            lambda key: Net().init(key, features, train=False)["batch_stats"],
            trainable=False,
        )
        output, written = net.apply(
            {"params": variables, "batch_stats": stats},
            features,
            train=mode == est.ModeKeys.TRAIN,
            mutable=["batch_stats"],
        )
        est.assign("stats", written["batch_stats"])
        loss = jnp.mean((output - labels) ** 2)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, output, loss, train_op)

    return model_fn


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_batch_norm_over_the_tower_axis_matches_one_big_batch(towers):
    state = assert_same_training(
        batch_norm_model_fn(None),
        replicate(batch_norm_model_fn(TOWER_AXIS), towers),
        regression(8),
        rtol=1e-4,
        atol=1e-5,
    )
    (stats,) = state.variables["stats"].values()
    assert np.abs(stats["mean"]).max() > 1e-3


@pytest.mark.parametrize("towers", [1, 2])
def test_variables_of_several_dtypes_train_together(towers):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        half = est.get_variable("half", (), jnp.bfloat16, jax.nn.initializers.ones)
        loss = jnp.mean(features * w) + jnp.mean(features.astype(jnp.bfloat16) * half).astype(jnp.float32)
        train_op = TowerOptimizer(optax.sgd(1.0)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, spec = one_step(model_fn, FOUR, towers)
    assert spec.loss == 6.0
    assert state.variables["w"] == -2.0
    assert state.variables["half"] == -2.0
    assert state.variables["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize("towers", [1, 2])
def test_a_flag_is_assigned_from_the_first_tower(towers):
    model_fn = assign_model_fn(lambda x: est.assign("s", x[0] == 1.0), "only_first_tower", np.bool_(False))
    state, _ = one_step(model_fn, FOUR, towers)
    assert state.variables["s"].dtype == jnp.bool_
    assert state.variables["s"]


@pytest.mark.parametrize("towers", [1, 2])
def test_a_wrapper_and_its_towers_draw_different_keys(towers):
    def draw(features, labels, mode):
        noise = jax.random.uniform(est.make_rng(), features.shape)
        return est.EstimatorSpec(mode, predictions={"inner": noise})

    inner = replicate(draw, towers)

    def wrapped(features, labels, mode):
        before = jax.random.uniform(est.make_rng(), features.shape)
        spec = inner(features, labels, mode)
        after = jax.random.uniform(est.make_rng(), features.shape)
        draws = spec.predictions | {"before": before, "after": after}
        return spec._replace(predictions=draws, export_outputs=None)

    model = est.transform(wrapped)
    state = model.init(jax.random.key(0), FOUR, mode="infer")
    draws = model.predict_step(state, FOUR).predictions
    assert len(np.unique(np.concatenate(list(draws.values())))) == 3 * len(FOUR)
