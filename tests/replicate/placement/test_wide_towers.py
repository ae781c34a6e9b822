"""Towers of several devices compute what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing.model_fns import minimizing
from testing.towers import assert_close, assert_same_training, started
from testing.wide import batches, program, whole_arrays, wide, wide_mlp

import estimator as est
from replicate import TowerOptimizer, explain, tower_index


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_initial_values_match_one_device_to_the_bit_and_created_in_pieces():
    x, y = (array[0] for array in batches(8))
    key, model_fn = jax.random.key(3), wide_mlp("adam")
    want = est.transform(model_fn).init(key, x, y)
    got = est.transform(wide(2, 4, model_fn)).init(key, x, y)
    for one, other in zip(jax.tree.leaves(got[:3]), jax.tree.leaves(want[:3]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert got.slots["optimizer"][0].mu["w"].addressable_data(0).shape == (24, 26)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition", "optimizer"),
    [((None, "part"), optax.sgd(0.1)), (("part",), optax.adam(0.01, eps=1e-4))],
    ids=["sparse, columns", "dense, rows"],
)
def test_lookups_in_a_table_that_is_cut(partition, optimizer):
    def loss_of(features, labels):
        rows = est.embedding_lookup("table", features, (104, 40), partition=partition)
        return jnp.mean((jnp.tanh(rows).sum((1, 2)) - labels) ** 2)

    model_fn = minimizing(loss_of, optimizer)
    ids = np.random.default_rng(0).integers(-1, 104, (2, 8, 5))
    state = assert_same_training(model_fn, wide(2, 4, model_fn), (ids, np.ones((2, 8), np.float32)))
    assert state.variables["table"].addressable_data(0).size == 104 * 40 // 4


@pytest.mark.slow
def test_a_pytree_is_cut_by_a_function_and_gradients_may_be_changed_on_the_way():
    def model_fn(features, labels, mode):
        net = est.get_variable(
            "net",
            lambda key: {"a": 0.1 * jax.random.normal(key, (24, 104)), "b": [jnp.zeros(104)]},
            partition=lambda x: (None, "part") if x.ndim == 2 else None,
        )
        loss = jnp.mean((jnp.tanh(features @ net["a"] + net["b"][0]).sum(1) - labels) ** 2)
        optimizer = TowerOptimizer(optax.adam(1e-2, eps=1e-3))
        pairs = [(jax.tree.map(lambda g: 2 * g, g), name) for g, name in optimizer.compute_gradients(loss)]
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    state = assert_same_training(model_fn, wide(2, 4, model_fn, tower_transform=est.checkpoint_segments), batches(8))
    pieces = jax.tree.map(lambda x: x.addressable_data(0).shape, (state.variables["net"], state.slots["optimizer"][0]))
    assert pieces[0] == {"a": (24, 26), "b": [(104,)]}
    assert pieces[1].mu["net"] == pieces[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_parameters_of_a_flax_module_are_cut_by_a_function(kind):
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    class Dense(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.output = nnx.Linear(24, 104, rngs=rngs), nnx.Linear(104, 1, rngs=rngs)

        def __call__(self, x):
            return self.output(jnp.tanh(self.hidden(x)))

    module = Dense if kind == "nnx" else nn.Sequential([nn.Dense(104), jnp.tanh, nn.Dense(1)])

    def loss_of(features, labels):
        net = est.flax_module(module, "net", partition=lambda x: (None, "part") if x.shape == (24, 104) else None)
        return jnp.mean((net(features)[:, 0] - labels) ** 2)

    model_fn = minimizing(loss_of)
    state = assert_same_training(model_fn, wide(2, 4, model_fn), batches(8))
    shapes = {x.shape: x.addressable_data(0).shape for x in jax.tree.leaves(state.variables["net"]) if x.ndim == 2}
    assert shapes == {(24, 104): (24, 26), (104, 1): (104, 1)}


@pytest.mark.slow
def test_spread_within_loops_branches_and_traced_functions_and_where_it_does_not_divide():
    def model_fn(features, labels, mode):
        layers = est.get_variable("layers", (3, 24, 24), partition=(None, None, "part"))
        layer = jax.checkpoint(lambda h, w: (est.spread(jnp.tanh(h @ w), 1), None))
        hidden, _ = jax.lax.scan(layer, features, layers)
        hidden = jax.lax.cond(hidden.sum() > 0, lambda h: est.spread(h, 0) * 2, lambda h: h, hidden)
        hidden = jax.jit(lambda h: est.spread(h[:, :7], -1))(hidden)
        hidden = jax.vmap(lambda row: est.spread(row, 0) + 1)(hidden)
        loss = jnp.mean((hidden.sum(1) - labels) ** 2)
        train_op = TowerOptimizer(optax.sgd(1e-3)).minimize(loss)
        return est.EstimatorSpec(mode, predictions=hidden, loss=loss, train_op=train_op)

    assert_same_training(model_fn, wide(1, 8, model_fn), batches(6))


def test_every_tower_has_random_numbers_of_its_own_and_its_devices_the_same():
    def model_fn(features, labels, mode):
        noise = est.spread(jax.random.normal(est.make_rng(), (len(features), 8)), 1)
        return est.EstimatorSpec(mode, predictions={"noise": noise, "tower": tower_index() + 0 * features.astype(int)})

    model, state = started(wide(2, 4, model_fn), x := np.zeros(4, np.float32), mode="infer")
    predictions = model.predict_step(state, x).predictions
    assert predictions["tower"].tolist() == [0, 0, 1, 1]
    assert not np.allclose(predictions["noise"][:2], predictions["noise"][2:])


@pytest.mark.slow
def test_sparse_features():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (24, 104), partition=(None, "part"))
        output = jnp.tanh(est.spread(features @ w, 1)).sum(1)
        loss = jnp.mean((output - labels) ** 2)
        train_op = TowerOptimizer(optax.sgd(0.01)).minimize(loss)
        return est.EstimatorSpec(mode, predictions=output, loss=loss, train_op=train_op)

    x, y = (array[0] for array in batches(8))
    features = BCOO.fromdense(jnp.asarray(x * (x > 1)))
    results = []
    for made in (model_fn, wide(2, 4, model_fn)):
        model = est.transform(made)
        state, spec = model.train_step(model.init(jax.random.key(0), features, y), features, y)
        results.append((state.variables, spec.loss, model.eval_step(state, features[:7], y[:7]).predictions))
    assert_close(results[1], results[0])


# What towers of several devices hold on each of them, in memory, in programs, and in files.


def bytes_on_first_device(tree):
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("clipped_adam", {"accumulate_steps": 3}), (optax.adafactor(0.1, min_dim_size_to_factor=8), {})],
    ids=["clipped_adam, micro_batches", "factored"],
)
def test_no_device_has_a_variable_its_gradient_or_its_slots_whole_at_any_time(optimizer, options):
    """In a loop of steps, which holds all that a step does."""
    steps = x, y = batches(24)

    def found(parts):
        model, state = started(wide(2, parts, wide_mlp(optimizer, **options)), x[0], y[0])
        return whole_arrays(program(model.train_loop, state, steps))

    assert found(4) == []
    if optimizer == "clipped_adam":
        assert len(found(1)) > 10  # the same search finds them where towers are narrow


@pytest.mark.slow
def test_no_device_has_a_variable_whole_while_it_is_initialized_evaluated_or_predicts():
    x, y = (array[0] for array in batches(7, steps=1))
    counts = {}
    for parts in (4, 1):
        model = est.transform(wide(1, parts, wide_mlp("adam")))
        initialize = jax.jit(lambda key, model=model: model.init.__self__._pure.init(key, x, y, {}, "train")[0])
        state = model.init(jax.random.key(0), x, y)
        programs = [
            initialize.lower(jax.random.key(0)).compile(),
            jax.jit(model.eval_step).lower(state, x, y).compile(),
            jax.jit(model.predict_step).lower(state, x).compile(),
        ]
        counts[parts] = [len(whole_arrays(each)) for each in programs]
    assert counts[4] == [0, 0, 0]
    assert all(counts[1])


@pytest.mark.slow
def test_bytes_on_a_device_fall_by_the_devices_of_a_tower():
    x, y = (array[0] for array in batches(8))
    model_fns = {str(parts): wide(2, parts, wide_mlp("adam")) for parts in (1, 4)}
    states = [est.transform(each).init(jax.random.key(0), x, y) for each in model_fns.values()]
    state_bytes = [bytes_on_first_device((state.variables, state.slots)) for state in states]
    report = est.memory_report(model_fns, x, y)
    for parts, mine in zip((1, 4), state_bytes, strict=True):
        assert state_bytes[0] / mine == pytest.approx(parts, rel=0.02)
        use = report[str(parts)]
        assert use.state == mine + 4 == use.donated  # and global_step
        assert report["1"].temporary / use.temporary > 0.95 * parts
        assert report["1"].peak / use.peak > 0.95 * parts


@pytest.mark.slow
def test_a_step_with_a_nan_changes_nothing_and_names_the_tower():
    x, y = (array[0] for array in batches(24))
    model_fn = wide_mlp("adam")
    state = est.transform(model_fn).init(jax.random.key(0), x, y)
    x[20, 0] = np.nan
    skips, raises = (est.transform(wide(2, 4, model_fn, on_nan=policy)) for policy in ("skip", "raise"))
    before = skips.init(jax.random.key(0), x, y)
    after, _ = skips.train_step(before, x, y)
    assert est.skipped_steps(after) == 1
    assert_close(after.variables, state.variables, rtol=0, atol=0)
    with pytest.raises(est.NonFiniteGradientError, match="'b' in tower 1, at step 1"):
        raises.train_step(before, x, y)


@pytest.mark.slow
def test_checkpoints_are_read_by_towers_of_any_width_to_the_bit_and_an_export_has_no_towers(tmp_path):
    x, y = batches(24, steps=4)

    def estimator(towers, parts):
        config = est.RunConfig(check_replicas_every=2)
        return est.Estimator(wide(towers, parts, wide_mlp("adam")), tmp_path, config=config)

    wrote = estimator(2, 4)
    wrote.train(lambda: list(zip(x, y, strict=True)), steps=4)
    values = {name: wrote.get_variable_value(name) for name in wrote.get_variable_names()}
    rows = x[0][:7], y[0][:7]
    want = wrote.evaluate(lambda: [rows])
    for towers, parts in ((1, 1), (4, 2)):
        read = estimator(towers, parts)
        assert read.evaluate(lambda: [rows]) == pytest.approx(want, rel=2e-5)
        for name, value in values.items():
            np.testing.assert_array_equal(read.get_variable_value(name), value)
    predicted = [row["output"] for row in wrote.predict(lambda: [x[0][:3]])]
    exported = est.load_exported(wrote.export_model(tmp_path / "export", x[0]))
    np.testing.assert_allclose(exported(x[0][:3])["output"], predicted, rtol=1e-5)
    other = estimator(4, 2)
    other.train(lambda: [(x[0], y[0])], steps=1)
    read = estimator(2, 4)
    read.train(lambda: [(x[0], y[0])], steps=1)
    assert read.get_variable_value("global_step") == 6
    assert jax.tree.leaves(read.evaluate(lambda: [rows])) != jax.tree.leaves(want)


def test_an_explanation_tells_towers_from_devices():
    x, y = (array[0] for array in batches(24))
    explanation = explain(wide(2, 4, wide_mlp("adam")), x, y)
    assert explanation.placement.startswith("All towers have the variables and slots:")
    assert explanation.towers == ("cpu:0, cpu:1, cpu:2, cpu:3", "cpu:4, cpu:5, cpu:6, cpu:7")
    assert [each.tower_shape for each in explanation.batch] == [(12, 24), (12,)]
    where = {home.name: home.where for home in explanation.variables}
    assert where["w"] == "cut along dimension 1 over 4 devices, in each of 2 towers"
    assert where["o"] == "whole on each of 8 devices"
    assert "12 of the batch's 24 rows, on 4 devices that share the work." in str(explanation)
    assert "20,764 B  of variables and slots" in str(explanation)  # the share of a device
