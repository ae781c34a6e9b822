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
@pytest.mark.parametrize("aggregation, want", [("mean", 3.0), ("sum", 12.0), ("only_first_tower", 1.0)])
def test_assign_merges_by_aggregation(aggregation, want):
    model_fn = assigning(lambda x: est.assign("s", x[0]), aggregation)
    state, spec = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == want
    np.testing.assert_array_equal(spec.predictions, FOUR)


def test_assign_add_sums_over_towers_and_is_seen_in_the_run():
    model_fn = assigning(lambda x: est.assign_add("s", x.sum()), initial=10.0)
    state, spec = one_step(model_fn, FOUR, 2)
    assert state.variables["s"] == 22.0
    np.testing.assert_array_equal(spec.predictions, [13.0, 13.0, 19.0, 19.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregation, want, towers, steps",
    [("mean", 3.0, 4, 1), ("sum", 12.0, 2, 2)] + [("only_first_tower", 1.0, n, 4 // n) for n in (4, 2, 1)],
)
def test_assign_add_after_assign_adds_to_the_merged_value(aggregation, want, towers, steps):
    """Of towers and micro-batches alike; only the value of the first counts where it is to, even next to NaN."""

    def write(x):
        est.assign_add("s", 1000.0)  # lost, as the assignment follows
        est.assign("s", jnp.where((aggregation == "only_first_tower") & (x[0] > 1), jnp.nan, x[0]))
        est.assign_add("s", 10.0)

    state, _ = one_step(assigning(write, aggregation, steps=steps), FOUR, towers)
    assert state.variables["s"] == want + 40.0


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "steps"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_an_integer_counter_counts_every_tower(towers, steps):
    model_fn = assigning(lambda x: est.assign_add("s", 1), initial=np.int32(5), steps=steps)
    state, _ = one_step(model_fn, FOUR, towers)
    assert state.variables["s"] == 5 + towers * steps
    assert state.variables["s"].dtype == jnp.int32


@pytest.mark.parametrize("aggregation, want", [("sum", 12), ("only_first_tower", 1)])
def test_integers_are_assigned_by_sum_or_from_the_first_tower(aggregation, want):
    model_fn = assigning(lambda x: est.assign("s", x[0].astype(jnp.int32)), aggregation, np.int32(0))
    state, _ = one_step(model_fn, FOUR, 4)
    assert state.variables["s"] == want


def test_a_pytree_of_statistics_is_averaged():
    def write(x):
        old = est.read_variable("s")
        est.assign("s", {"mean": 0.5 * old["mean"] + 0.5 * x.mean(), "max": x.max(keepdims=True)})

    def loss_of(features, labels):
        est.get_variable("s", initializer={"mean": 2.0, "max": jnp.zeros(1)}, trainable=False)
        write(features)
        return jnp.mean(ones("w") * features)

    state, _ = one_step(minimizing(loss_of), FOUR, 2)
    assert_close(state.variables["s"], {"mean": jnp.float32(2.5), "max": jnp.full(1, 4.0)})


@pytest.mark.parametrize("mode", ["eval_step", "predict_step"])
def test_assignments_act_in_training_alone(mode):
    model_fn = assigning(lambda x: est.assign("s", x[0]))
    model, state = started(replicate(model_fn, 2), FOUR)
    np.testing.assert_array_equal(getattr(model, mode)(state, FOUR).predictions, np.zeros(4))


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
@pytest.mark.parametrize("towers", [1, 3])
def test_written_variables_match_one_big_batch_after_several_steps(towers):
    x, y = regression(24)
    state = assert_same_training(statistics_model_fn, replicate(statistics_model_fn, towers), (x, y))
    assert (state.variables["rows"], state.variables["seen"]) == (24, 7 + STEPS * 24)
    np.testing.assert_array_equal(state.variables["first"], x[-1, 0])
    np.testing.assert_allclose(state.variables["total"], x.sum((0, 1)), rtol=1e-5, atol=1e-5)


def assert_copies_are_identical(state, towers):
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.variables, state.slots, state.global_step)):
        assert [shard.device for shard in leaf.addressable_shards] == jax.devices("cpu")[:towers]
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(copy.shape == leaf.shape for copy in copies)
        assert len({copy.tobytes() for copy in copies}) == 1, path


def test_every_copy_of_every_variable_is_the_same_to_the_bit_after_a_loop():
    x, y = regression(24)
    model = est.transform(replicate(statistics_model_fn, 4))
    state, _ = model.train_loop(model.init(jax.random.key(0), x[0], y[0]), (x, y))
    assert_copies_are_identical(state, 4)


@pytest.mark.quick
@pytest.mark.parametrize("mean", [None, "pmean"])
def test_every_copy_of_batch_norms_statistics_is_the_same_to_the_bit_after_each_step(mean):
    x, y = regression(24)
    model, state = started(replicate(batch_norm_model_fn(mean), 4), x[0], y[0])
    assert_copies_are_identical(state, 4)
    for batch in zip(x, y, strict=True):
        state, _ = model.train_step(state, *batch)
        assert_copies_are_identical(state, 4)


RATES = {"mean": 0.1, "sum": 0.1 / 24}


def batch_norm_model_fn(mean, reduction="mean"):
    """Batch norm by the rows of a tower or, with a function of `MEANS`, by those of all."""
    mean = MEANS.get(mean, lambda x: x)

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (3, 4))
        scale = est.get_variable("scale", (4,), initializer=jax.nn.initializers.ones)
        running = est.get_variable("stats", initializer={"mean": jnp.zeros(4), "var": jnp.ones(4)}, trainable=False)
        x = features @ w
        stats = running
        if mode == est.ModeKeys.TRAIN:
            center = mean(x.mean(0))
            stats = {"mean": center, "var": mean(((x - center) ** 2).mean(0))}
            est.assign("stats", jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, running, stats))
        x = scale * (x - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-3)
        output = jnp.tanh(x).sum(-1)
        loss = reduced((output - labels) ** 2, reduction)
        train_op = TowerOptimizer(optax.sgd(RATES[reduction])).minimize(loss)
        return est.EstimatorSpec(mode, output, loss, train_op)

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "towers", "reduction"),
    [
        *(("pmean", 1, "mean"), ("pmean", 2, "sum")),
        *(("cross_tower_mean", 3, "mean"), ("cross_tower_mean", 8, "sum")),
    ],
)
def test_batch_norm_over_all_towers_matches_one_big_batch(mean, towers, reduction):
    """Forward, gradients and running statistics in training, and what those give in evaluation."""
    plain, replicated = batch_norm_model_fn(None, reduction), batch_norm_model_fn(mean, reduction)
    replicated = replicate(replicated, towers, reduction)
    x, y = regression(24)
    state = assert_same_training(plain, replicated, (x, y), rtol=1e-4, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(state.variables["stats"]))
    want, got = (est.transform(fn).eval_step(state, x[0], y[0]) for fn in (plain, replicated))
    assert_close((got.loss, got.predictions), (want.loss, want.predictions), rtol=1e-4, atol=1e-5)


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
@pytest.mark.parametrize(("towers", "reduction"), [(1, "mean"), (2, "sum"), (3, "mean")])
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


def test_batch_norm_of_each_tower_alone_is_another_model():
    """Each tower normalizes by its own rows; the running statistics are averaged."""
    x, y = regression(24)
    model_fn = batch_norm_model_fn(None)
    plain, towers = est.transform(model_fn), est.transform(replicate(model_fn, 4))
    state = plain.init(jax.random.key(0), x[0], y[0])
    (one, spec), (four, spec_of_four) = plain.train_step(state, x[0], y[0]), towers.train_step(state, x[0], y[0])
    assert np.abs(spec.predictions - spec_of_four.predictions).max() > 1e-2
    stats, stats_of_four = one.variables["stats"], four.variables["stats"]
    assert_close(stats_of_four["mean"], stats["mean"])
    assert (stats_of_four["var"] < stats["var"]).all()


@pytest.mark.parametrize("towers", [1, 2])
def test_variables_of_several_dtypes_train_together(towers):
    def loss_of(features, labels):
        half = jnp.mean(features.astype(jnp.bfloat16) * ones("half", dtype=jnp.bfloat16))
        return jnp.mean(features * ones("w")) + half.astype(jnp.float32)

    state, spec = one_step(minimizing(loss_of, optax.sgd(1.0)), FOUR, towers)
    assert spec.loss == 6.0
    assert state.variables["w"] == -2.0
    assert state.variables["half"] == -2.0
    assert state.variables["half"].dtype == jnp.bfloat16


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "steps"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_flag_is_assigned_from_the_first_tower(towers, steps):
    model_fn = assigning(lambda x: est.assign("s", x[0] == 1.0), "only_first_tower", np.bool_(False), steps)
    state, _ = one_step(model_fn, FOUR, towers)
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
