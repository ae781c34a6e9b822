"""Towers of several devices compute what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing.towers import assert_close, assert_same_training
from testing.wide import batches, wide, wide_mlp

import estimator as est
from replicate import TowerOptimizer, tower_index


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


def test_variables_that_a_model_fn_writes_are_cut_as_well():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (24, 104), partition=(None, "part"))
        zeros = {"initializer": jax.nn.initializers.zeros, "trainable": False}
        average = est.get_variable("average", (24, 104), partition=(None, "part"), **zeros)
        est.get_variable("seen", (104,), partition=["part"], **zeros)
        output = jnp.tanh(features @ w)
        est.assign("average", 0.9 * average + w * features.mean())
        est.assign_add("seen", output.sum(0))
        loss = jnp.mean((output.sum(1) - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(1e-3)).minimize(loss))

    state = assert_same_training(model_fn, wide(2, 4, model_fn), batches(24))
    shapes = {name: value.addressable_data(0).shape for name, value in state.variables.items()}
    assert shapes == {"w": (24, 26), "average": (24, 26), "seen": (26,)}


@pytest.mark.slow
@pytest.mark.parametrize("partition", [("part",), (None, "part")])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.01, eps=1e-4)], ids=["sparse", "dense"])
def test_lookups_in_a_table_that_is_cut(partition, optimizer):
    def model_fn(features, labels, mode):
        rows = est.embedding_lookup("table", features, (104, 40), partition=partition)
        loss = jnp.mean((jnp.tanh(rows).sum((1, 2)) - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optimizer).minimize(loss))

    ids = np.random.default_rng(0).integers(-1, 104, (2, 8, 5))
    state = assert_same_training(model_fn, wide(2, 4, model_fn), (ids, np.ones((2, 8), np.float32)))
    assert state.variables["table"].addressable_data(0).size == 104 * 40 // 4


def test_a_pytree_is_cut_by_a_function_and_gradients_may_be_changed_on_the_way():
    def model_fn(features, labels, mode):
        net = est.get_variable(
            "net",
            lambda key: {"a": 0.1 * jax.random.normal(key, (24, 104)), "b": [jnp.zeros(104)]},
            partition=lambda x: (None, "part") if x.ndim == 2 else None,
        )
        output = jnp.tanh(features @ net["a"] + net["b"][0]).sum(1)
        loss = jnp.mean((output - labels) ** 2)
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

    def model_fn(features, labels, mode):
        net = est.flax_module(module, "net", partition=lambda x: (None, "part") if x.shape == (24, 104) else None)
        loss = jnp.mean((net(features)[:, 0] - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))

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

    model = est.transform(wide(2, 4, model_fn))
    state = model.init(jax.random.key(0), x := np.zeros(4, np.float32), mode="infer")
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
