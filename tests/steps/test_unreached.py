"""A variable that the loss does not depend on has no gradient, so that no optimizer moves it."""

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing
from testing.towers import bits, cpus, started

import estimator as est
from replicate import BlockSync, TowerOptimizer, VariableDistribution, replicate_model_fn

ones = jax.nn.initializers.ones
IDS = np.array([[0, 1], [2, 1], [0, 0], [1, 2]])
X = np.array([1.0, 2.0, 3.0, 6.0], np.float32)
BATCH = {"x": X, "ids": IDS}


def variable(name):
    return est.get_variable(name, (2,), initializer=ones)


def rows(name, features):
    return est.embedding_lookup(name, features["ids"], (4, 2), initializer=ones)


@jax.jit
def both(one, other):
    return one * 2, other * 2


def by_scan(w):
    """Of two values that a loop carries side by side, the one that `w` has no part in."""
    step = lambda carry, x: ((carry[0] * x, carry[1] + w * x), None)  # noqa: E731
    return jax.lax.scan(step, (jnp.float32(1), jnp.zeros(2)), jnp.ones(3))[0]


def by_while(w):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, jax.lax.stop_gradient(w))


UNREACHED = {
    "stop_gradient": jax.lax.stop_gradient,
    "argmax": lambda w: jnp.argmax(w).astype(jnp.float32),
    "integers": lambda w: w.astype(int).astype(jnp.float32),
    "comparison": lambda w: jnp.where(w > 0, 1.0, 2.0),
    "unused": lambda w: 1.0,
    "jit": lambda w: both(1.0, w)[0],
    "scan": lambda w: by_scan(w)[0],
    "while": by_while,
    "cond": lambda w: jax.lax.cond(w[0] > 0, lambda x, w: x, lambda x, w: x * 2, 1.0, w),
    "checkpoint": lambda w: jax.checkpoint(both)(1.0, w)[0],
    "custom_jvp": lambda w: jax.nn.relu(jnp.floor(w)),
}
REACHED = {
    "jit": lambda w: both(w, 1.0)[0],
    "scan": lambda w: by_scan(w)[1],
    "cond": lambda w: jax.lax.cond(w[0] > 0, lambda w: w, jax.lax.stop_gradient, w),
    "checkpoint": lambda w: jax.checkpoint(both)(w, 1.0)[0],
    "a zero": lambda w: 0 * w,
    "relu below zero": lambda w: jax.nn.relu(-w),
}


def model_fn_of(make_optimizer, call="minimize", reached=MappingProxyType({}), unreached=MappingProxyType({})):
    """Variables that the loss depends on, and does not: a body, a part of a pytree, tables, those of a second task."""

    def model_fn(features, mode):
        more = sum((jnp.sum(make(variable(f"reached/{name}"))) for name, make in reached.items()), 0.0)
        less = sum((jnp.sum(make(variable(f"unreached/{name}"))) for name, make in unreached.items()), 0.0)
        pair = est.get_variable("reached/pair", lambda key: {"used": jnp.ones(2), "unused": jnp.ones(2)})
        table = rows("reached/table", features).sum((1, 2))
        table = table + jax.lax.stop_gradient(rows("unreached/table", features).sum((1, 2)))
        again = jax.lax.stop_gradient(est.embedding_lookup("reached/table", jnp.full_like(features["ids"], 3)))
        body = jax.lax.stop_gradient(features["x"] * variable("unreached/body").sum())
        loss = jnp.mean((body * pair["used"].sum() + features["x"] * more - less + table + again[:, 0, 0]) ** 2)
        other = jnp.mean(features["x"] * variable("unreached/second_task").sum())
        optimizer = TowerOptimizer(make_optimizer())
        if call == "minimize":
            train_op = optimizer.minimize(loss)
        else:
            train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))
        return est.EstimatorSpec(mode, loss=loss + 0 * other, train_op=train_op)

    return model_fn


OPTIMIZERS = {
    "adamw": lambda: est.train.AdamWOptimizer(0.5, 0.1),
    "ftrl": lambda: est.train.FtrlOptimizer(0.1, l1_regularization_strength=1.0),
    "optax.adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "lazy": lambda: est.lazy(optax.adamw(0.1, weight_decay=0.1)),
}


def assert_only_reached_move(model_fn, steps=2):
    model, start = started(model_fn, BATCH)
    state = start
    for _ in range(steps):
        state, _ = model.train_step(state, BATCH)
    after = dict(jax.tree.leaves_with_path(state))
    for path, before in jax.tree.leaves_with_path(start):
        name = jax.tree_util.keystr(path)
        if "unreached/" in name:
            assert bits(before) == bits(after[path]), name
        elif "variables" in name and "unused" not in name and "zero" not in name:
            assert bits(before) != bits(after[path]), name
    return state


@pytest.mark.quick
@pytest.mark.parametrize("call", ["minimize", "compute_gradients"])
def test_dependence_is_read_through_whatever_jax_has(call):
    assert_only_reached_move(model_fn_of(OPTIMIZERS["adamw"], call, REACHED, UNREACHED))


@pytest.mark.parametrize(
    ("optimizer", "call"),
    [*((each, "minimize") for each in ("ftrl", "optax.adamw", "lazy")), ("lazy", "compute_gradients")],
)
def test_no_optimizer_moves_what_the_loss_does_not_depend_on(optimizer, call):
    state = assert_only_reached_move(model_fn_of(OPTIMIZERS[optimizer], call))
    if optimizer == "lazy":  # of this table, rows that are looked up under `stop_gradient` too
        np.testing.assert_array_equal(state.variables["reached/table"][3], 1)


RUNNERS = {
    "sharded": {"variable_distribution": VariableDistribution.SHARDED},
    "round robin": {"variable_distribution": VariableDistribution.SHARED_ROUND_ROBIN},
    "server": {"variable_distribution": VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER},
    "wide": {"devices": cpus(4), "devices_per_tower": 2},
    "blocks": {"block_sync": BlockSync(block_steps=2, outer_optimizer=optax.adamw(0.1, weight_decay=0.1))},
    "skip": {"on_nan": "skip"},
    "segments": {"tower_transform": est.checkpoint_segments},
    "micro-batches": {},
}


@pytest.mark.quick
@pytest.mark.parametrize(
    "runner, call",
    [(runner, "minimize") for runner in ("micro-batches", "sharded", "round robin", "skip")]
    + [(runner, "compute_gradients") for runner in ("server", "wide", "blocks", "segments", "micro-batches")],
)
def test_towers_find_the_same(runner, call):
    accumulate = {"accumulate_steps": 2} if runner == "micro-batches" else {}
    make = lambda: TowerOptimizer(OPTIMIZERS["adamw"](), **accumulate)  # noqa: E731
    assert_only_reached_move(replicate_model_fn(model_fn_of(make, call), **{"devices": cpus(2)} | RUNNERS[runner]))


def two_tasks(optimizers):
    """Losses that one function computes, and an optimizer for each."""

    def model_fn(features, mode):
        first, second = variable("first"), variable("second")
        losses = [jnp.sum(x**2) for x in jax.checkpoint(both)(first, second)]
        updates = [TowerOptimizer(make(), str(i)).minimize(losses[i]) for i, make in enumerate(optimizers)]
        return est.EstimatorSpec(mode, loss=sum(losses), train_op=est.group(*updates))

    return model_fn


@pytest.mark.parametrize("transform", [None, est.checkpoint_segments])
def test_each_loss_moves_its_own_variables(transform):
    decay = lambda: optax.add_decayed_weights(-0.5)  # noqa: E731
    zero = lambda: optax.chain(optax.scale(0.0), decay())  # noqa: E731
    model_fn = replicate_model_fn(two_tasks([zero, decay]), devices=cpus(1), tower_transform=transform)
    model, state = started(model_fn, BATCH)
    state, _ = model.train_step(state, BATCH)
    np.testing.assert_array_equal(state.variables["first"], 0.5)
    np.testing.assert_array_equal(state.variables["second"], 0.5 + 8)


TRANSFORMATIONS = {
    "multi": lambda: optax.multi_transform({"a": optax.adamw(0.1)}, {"used": "a", "unused": "a"}),
    "lbfgs": lambda: optax.lbfgs(),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=2, opaque_mode=True),
    "multi steps": lambda: optax.MultiSteps(optax.adamw(0.1, weight_decay=0.1), 2),
    "factored": lambda: optax.adafactor(0.1, weight_decay_rate=0.1),
    "loss scale": lambda: est.Optimizer(optax.adamw(0.1, weight_decay=0.1), loss_scale=est.DynamicLossScale()),
}


@pytest.mark.quick
@pytest.mark.parametrize("given", TRANSFORMATIONS)
def test_transformations_of_transformations(given):
    def loss_of(features, labels):
        variable("unused")
        return jnp.mean((features["x"] * variable("used").sum()) ** 2)

    model, start = started(minimizing(loss_of, TRANSFORMATIONS[given]()), BATCH)
    state = start
    for _ in range(2):
        state, _ = model.train_step(state, BATCH)
    np.testing.assert_array_equal(state.variables["unused"], 1)
    assert not np.array_equal(state.variables["used"], start.variables["used"])
    assert jax.tree.structure(state) == jax.tree.structure(start)


@pytest.mark.quick
def test_the_log_names_them_once_and_a_summary_leaves_them_out(tmp_path, caplog):
    def model_fn(features, labels, mode):
        used = variable("used")
        variable("idle"), variable("alone")
        loss, optimizer = jnp.mean((features["x"] * used.sum()) ** 2), TowerOptimizer(optax.sgd(0.001))
        gradients = optimizer.compute_gradients(loss)
        for gradient, name in gradients:
            if gradient is not None:
                est.summary.scalar(f"norm/{name}", jnp.linalg.norm(gradient))
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(gradients))

    config = est.RunConfig(save_summary_steps=1)
    trainer = est.Estimator(replicate_model_fn(model_fn, devices=cpus(2)), tmp_path, config)
    trainer.train(lambda: [(BATCH, None)] * 3)
    lines = [record.getMessage() for record in caplog.records if "No loss depends on" in record.getMessage()]
    assert lines == [
        "No loss depends on the trainable variables ['idle', 'alone']: they have no gradient, and stay as they are."
    ]
