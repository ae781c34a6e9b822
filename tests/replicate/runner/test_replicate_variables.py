"""Variables in towers: writes and their aggregation, batch norm, copies on devices, dtypes, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import assigning, minimizing, ones, predicting
from testing.towers import FOUR, STEPS, assert_close, assert_same_training, reduced, regression, replicate, started

import estimator as est
from replicate import TOWER_AXIS, TowerOptimizer, cross_tower_mean, cross_tower_sum, num_towers


def one_step(model_fn, features, towers):
    model, state = started(replicate(model_fn, towers), features)
    return model.train_step(state, features)


@pytest.mark.quick
@pytest.mark.parametrize(
    "aggregation, want, towers, steps",
    [("mean", 3.0, 4, 1), ("sum", 12.0, 2, 2), ("only_first_tower", 1.0, 4, 1), ("only_first_tower", 1.0, 1, 4)],
)
def test_assign_add_after_assign_adds_to_the_merged_value(aggregation, want, towers, steps):
    """Of towers and micro-batches alike; only the value of the first counts where it is to, even next to NaN."""

    def own(x):
        return jnp.where((aggregation == "only_first_tower") & (x > 1), jnp.nan, x)

    def write(x):
        est.assign_add("s", 1000.0)  # lost, as the assignment follows
        est.assign("s", own(x[0]))
        est.assign_add("s", 10.0)

    state, spec = one_step(assigning(write, aggregation, steps=steps), FOUR, towers)
    assert state.variables["s"] == want + 40.0
    np.testing.assert_array_equal(spec.predictions, own(FOUR) + 10.0)


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "steps"), [(4, 1), (2, 2)])
def test_an_integer_counter_counts_every_tower(towers, steps):
    model_fn = assigning(lambda x: est.assign_add("s", 1), initial=np.int32(5), steps=steps)
    state, _ = one_step(model_fn, FOUR, towers)
    assert state.variables["s"] == 5 + towers * steps
    assert state.variables["s"].dtype == jnp.int32


def test_assignments_act_in_training_alone():
    model_fn = assigning(lambda x: est.assign("s", x[0]))
    model, state = started(replicate(model_fn, 2), FOUR)
    for step in (model.eval_step, model.predict_step):
        np.testing.assert_array_equal(step(state, FOUR).predictions, np.zeros(4))


def statistics_model_fn(features, labels, mode):
    """Keeps statistics of the batch by every way to write a variable, and learns next to them."""

    def variable(name, initial, aggregation="mean"):
        return est.get_variable(name, initializer=initial, trainable=False, aggregation=aggregation)

    old = variable("average", {"mean": jnp.zeros(3), "square": jnp.ones(3)})
    total = variable("total", jnp.zeros(3), "sum")
    variable("rows", np.int32(0), "sum")
    variable("first", jnp.zeros(3), "only_first_tower")
    variable("first_label_is_positive", np.bool_(False), "only_first_tower")
    variable("seen", np.int32(7))
    variable("label", 0.5)
    new = {"mean": features.mean(0), "square": (features**2).mean(0)}
    est.assign("average", jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new))
    est.assign("total", total / num_towers() + features.sum(0))
    est.assign("rows", features.shape[0])
    est.assign("first", features[0])
    est.assign("first_label_is_positive", labels[0] > 0)
    est.assign_add("seen", features.shape[0])
    est.assign_add("label", labels.sum())
    output = features @ est.get_variable("w", (3,))
    loss = jnp.mean((output - labels) ** 2)
    return est.EstimatorSpec(mode, output, loss, TowerOptimizer(optax.adam(0.02)).minimize(loss))


@pytest.mark.slow
def test_written_variables_match_one_big_batch_after_several_steps():
    x, y = regression(24)
    state = assert_same_training(statistics_model_fn, replicate(statistics_model_fn, 3), (x, y))
    assert (state.variables["rows"], state.variables["seen"]) == (24, 7 + STEPS * 24)
    np.testing.assert_array_equal(state.variables["first"], x[-1, 0])
    np.testing.assert_allclose(state.variables["total"], x.sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_every_copy_of_every_variable_is_the_same_to_the_bit_after_a_loop():
    x, y = regression(24)
    model = est.transform(replicate(statistics_model_fn, 4))
    state, _ = model.train_loop(model.init(jax.random.key(0), x[0], y[0]), (x, y))
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.variables, state.slots, state.global_step)):
        assert [shard.device for shard in leaf.addressable_shards] == jax.devices("cpu")[:4]
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(copy.shape == leaf.shape for copy in copies)
        assert len({copy.tobytes() for copy in copies}) == 1, path


MEANS = {
    "cross_tower_mean": cross_tower_mean,
    "cross_tower_sum": lambda x: cross_tower_sum(x) / num_towers(),
    "pmean": lambda x: jax.lax.pmean(x, TOWER_AXIS),
    "psum": lambda x: jax.lax.psum(x, TOWER_AXIS) / num_towers(),
    "all_gather": lambda x: jax.lax.all_gather(x, TOWER_AXIS).mean(0),
}


def centered_losses(w, features, labels, mean=lambda x: x):
    """Each example's loss depends on all examples, by a mean over the batch."""
    hidden = jnp.tanh(features * w)
    center = mean(hidden.mean(0))
    return (((hidden - center) ** 2).sum(-1) + hidden[:, 0] * center[1] - labels) ** 2


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "reduction"), [(2, "sum"), (3, "mean")])
def test_gradients_through_every_collective_match_one_big_batch(towers, reduction):
    """One optimizer and one variable for each, so that one program has them all."""
    (x,), (y,) = regression(24, steps=1)
    start = jnp.array([0.3, -0.2, 0.5])

    def model_fn(features, labels, mode):
        variables = {name: est.get_variable(name, initializer=start) for name in (*MEANS, "computed")}
        losses = {
            name: reduced(centered_losses(variables[name], features, labels, mean), reduction)
            for name, mean in (MEANS | {"computed": cross_tower_mean}).items()
        }
        optimizer = TowerOptimizer(optax.sgd(1.0))
        computed = optimizer.compute_gradients(losses["computed"], ["computed"])
        train_op = est.group(optimizer.minimize(sum(losses.values()), list(MEANS)), optimizer.apply_gradients(computed))
        return est.EstimatorSpec(mode, loss=losses["computed"], train_op=train_op)

    model = est.transform(replicate(model_fn, towers, reduction))
    state, _ = model.train_step(model.init(jax.random.key(0), x, y), x, y)
    want = start - jax.grad(lambda w: reduced(centered_losses(w, x, y), reduction))(start)
    assert_close(state.variables, dict.fromkeys(state.variables, want), rtol=1e-4)


def test_each_tower_normalizes_by_its_own_rows_and_the_moving_averages_are_averaged():
    def model_fn(features, labels, mode):
        x = est.layers.batch_normalization(features, momentum=0.5)
        loss = jnp.mean((x @ ones("w", (3,)) - labels) ** 2)
        return est.EstimatorSpec(mode, x, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    x, y = regression(24)
    model, state = started(replicate(model_fn, 4), x[0], y[0])
    state, spec = model.train_step(state, x[0], y[0])
    rows = x[0].reshape(4, 6, 3)
    mean, variance = rows.mean(1, keepdims=True), rows.var(1, keepdims=True)
    assert_close(spec.predictions, ((rows - mean) / np.sqrt(variance + 1e-3)).reshape(24, 3), rtol=1e-4, atol=1e-5)
    assert_close(state.variables["batch_normalization/moving_mean"], 0.5 * mean.mean((0, 1)))
    assert_close(state.variables["batch_normalization/moving_variance"], 0.5 + 0.5 * variance.mean((0, 1)))


def test_variables_of_several_dtypes_train_together():
    def loss_of(features, labels):
        half = jnp.mean(features.astype(jnp.bfloat16) * ones("half", dtype=jnp.bfloat16))
        return jnp.mean(features * ones("w")) + half.astype(jnp.float32)

    state, spec = one_step(minimizing(loss_of, optax.sgd(1.0)), FOUR, 2)
    assert spec.loss == 6.0
    assert state.variables["w"] == -2.0
    assert state.variables["half"] == -2.0
    assert state.variables["half"].dtype == jnp.bfloat16


@pytest.mark.quick
def test_a_flag_is_assigned_from_the_first_micro_batch_of_the_first_tower():
    model_fn = assigning(lambda x: est.assign("s", x[0] == 1.0), "only_first_tower", np.bool_(False), steps=2)
    state, _ = one_step(model_fn, FOUR, 2)
    assert state.variables["s"].dtype == jnp.bool_
    assert state.variables["s"]


@pytest.mark.quick
@pytest.mark.parametrize("towers", [1, 2])
def test_a_wrapper_and_its_towers_draw_different_keys(towers):
    draw = predicting(lambda x: {"inner": jax.random.uniform(est.make_rng(), x.shape)})
    inner = replicate(draw, towers)

    def wrapped(features, labels, mode):
        before = jax.random.uniform(est.make_rng(), features.shape)
        spec = inner(features, labels, mode)
        after = jax.random.uniform(est.make_rng(), features.shape)
        draws = spec.predictions | {"before": before, "after": after}
        return spec._replace(predictions=draws, export_outputs=None)

    model, state = started(wrapped, FOUR, mode="infer")
    draws = model.predict_step(state, FOUR).predictions
    assert len(np.unique(np.concatenate(list(draws.values())))) == 3 * len(FOUR)
