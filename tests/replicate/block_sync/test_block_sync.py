"""Towers that train on their own for a block of steps equal models trained one by one and averaged by hand."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, ones, zeros
from testing.towers import OPTIMIZERS, assert_close, cpus, mlp_model_fn, regression, replicate

import estimator as est
from replicate import BlockSync, TowerOptimizer, bmuf, num_towers, replicate_model_fn, tower_index

GOLDEN = [
    case
    for name in ("bmuf_caffe2.json", "bmuf_warm_reset_caffe2.json")
    for case in json.loads((pathlib.Path(__file__).resolve().parents[2] / "golden" / name).read_text())["cases"]
]
DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)


def blocks(model_fn, towers, block_sync, reduction="mean", **options):
    return est.transform(replicate(model_fn, towers, reduction, block_sync=block_sync, **options))


def state_of_blocks(state):
    return state.slots["block_sync"]


def trained(model, batches, seed=0):
    return model.train_loop(model.init(jax.random.key(seed), *jax.tree.map(lambda x: x[0], batches)), batches)


# What Caffe2 computed.


def caffe2_model(case, block_sync):
    def model_fn(features, labels, mode):
        w1, b1, w2, b2 = (
            est.get_variable(n, initializer=np.array(case["init"][n], np.float32)) for n in ("w1", "b1", "w2", "b2")
        )
        output = jnp.tanh(features @ w1 + b1) @ w2 + b2
        loss = case["loss_scale"] * jnp.mean(0.5 * (output - labels) ** 2)
        optimizer = optax.sgd(case["learning_rate"], momentum=case["momentum"] or None)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optimizer).minimize(loss))

    return blocks(model_fn, case["towers"], block_sync)


def in_mid_block(state):
    """The state where the next step ends no block."""
    block = state_of_blocks(state)
    return state._replace(slots=state.slots | {"block_sync": block._replace(since=block.since - 100)})


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_caffe2s_numbers(case):
    options = dict(case["options"])
    reset_slots = options.pop("reset_momentum_sgd", False)
    block_sync = BlockSync(case["block_steps"], bmuf(**options), case["warmup_steps"] or 0, reset_slots)
    model = caffe2_model(case, block_sync)
    x, y = (np.array(case[name], np.float32) for name in ("x", "y"))

    def batch(block, step):
        return tuple(a[block, step].reshape(-1, a.shape[-1]) for a in (x, y))

    def assert_all_are(copies, want):
        assert copies.keys() == want[0].keys()
        for name, copy in copies.items():
            np.testing.assert_allclose(copy, [of_tower[name] for of_tower in want], atol=1e-5, rtol=0, err_msg=name)

    state = model.init(jax.random.key(0), *batch(0, 0))
    for step in range(case["warmup_steps"] or 0):
        state, _ = model.train_step(state, *batch(-1, step % case["block_steps"]))
    if case["warmup_steps"]:
        assert_all_are(state_of_blocks(state).copies, [case["after_warmup"]] * case["towers"])
        assert_all_are({n: v[None] for n, v in state.variables.items()}, [case["after_warmup"]])
    for block, want in enumerate(case["result"]):
        for step in range(case["block_steps"]):
            before, (state, _) = state, model.train_step(state, *batch(block, step))
        before, _ = model.train_step(in_mid_block(before), *batch(block, step))
        assert_all_are(state_of_blocks(before).copies, want["local_before_sync"])
        assert_all_are(state_of_blocks(state).copies, want["after_sync"])
        assert_all_are({n: v[None] for n, v in state_of_blocks(state).outer.velocity.items()}, [want["velocity"]])
        assert_all_are({n: v[None] for n, v in state.variables.items()}, want["after_sync"][:1])


# The laws.


def by_hand(model_fn, towers, block_sync, batches, mean=True):
    """One model per tower, each trained on its own rows; averaged and moved between blocks."""
    model = est.transform(model_fn)
    first = model.init(jax.random.key(0), *jax.tree.map(lambda x: x[0], batches))
    states, losses = [first] * towers, []
    init, update = map(jax.jit, block_sync.outer_optimizer)  # in one program each
    whole, outer = jax.device_get(first.variables), init(first.variables)
    for step in range(len(batches[0])):
        rows = [jax.tree.map(lambda x, t=t, step=step: np.split(x[step], towers)[t], batches) for t in range(towers)]
        states, specs = zip(*(model.train_step(s, *own) for s, own in zip(states, rows, strict=True)), strict=True)
        losses.append(np.mean([spec.loss for spec in specs]) if mean else np.sum([spec.loss for spec in specs]))
        done = step + 1 - block_sync.warmup_steps
        if done == 0:
            whole = jax.device_get(states[0].variables)
        elif done > 0 and done % block_sync.block_steps == 0:
            means = jax.tree.map(lambda *x: np.mean(x, 0), *jax.device_get([s.variables for s in states]))
            with jax.numpy_dtype_promotion("standard"):
                updates, outer = update(jax.tree.map(np.subtract, whole, means), outer, whole)
            whole = jax.tree.map(np.add, whole, jax.device_get(updates))
        if done >= 0 and done % block_sync.block_steps == 0:
            states = [state._replace(variables=whole) for state in states]
    variables, slots = (
        jax.tree.map(lambda *x: np.stack(x), *jax.device_get([getattr(s, n) for s in states]))
        for n in ("variables", "slots")
    )
    return whole, variables, slots, outer, np.array(losses, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "optimizer", "block_sync", "steps"),
    [
        (1, "adamw", BlockSync(2, optax.adam(0.1)), 3),
        (2, "momentum", BlockSync(1, DILOCO, warmup_steps=2), 4),
        (3, "clipped_adam", BlockSync(2, DILOCO, warmup_steps=3), 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_blocks_equal_models_trained_one_by_one(towers, optimizer, block_sync, steps):
    model_fn = mlp_model_fn(OPTIMIZERS[optimizer]())
    batches = regression(24, steps=steps)
    state, specs = trained(blocks(model_fn, towers, block_sync), batches)
    whole, copies, slots, outer, losses = by_hand(model_fn, towers, block_sync, batches)
    assert_close(state.variables, whole)
    assert_close(state_of_blocks(state).copies, copies)
    assert_close({"optimizer": state.slots["optimizer"]}, slots)
    assert_close(state_of_blocks(state).outer, outer)
    assert_close(specs.loss, jnp.asarray(losses))
    assert state_of_blocks(state).steps == state.global_step == steps


@pytest.mark.slow
@pytest.mark.parametrize("towers, reduction", [(3, "mean"), (4, "sum")])
def test_a_block_of_one_step_is_synchronous_training(towers, reduction):
    model_fn = mlp_model_fn(optax.sgd(0.01), reduction)
    batches = regression(24)
    got_state, got = trained(blocks(model_fn, towers, BlockSync(1, optax.sgd(1.0)), reduction), batches)
    want_state, want = trained(est.transform(model_fn), batches)
    assert_close(got_state.variables, want_state.variables)
    assert_close(got.loss, want.loss)
    assert_close(got.predictions, want.predictions)
    for name, metric in want.eval_metric_ops.items():
        assert_close(*[jax.vmap(lambda m: m.result())(m) for m in (got.eval_metric_ops[name], metric)])


def local_sgd(batches, towers, ends):
    """In plain jax: each tower has its own w and momentum; at the steps `ends` both are averaged."""
    gradient = jax.jit(jax.vmap(jax.grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2))))
    w = momentum = jnp.zeros((towers, 3))
    for step, (x, y) in enumerate(zip(*batches, strict=True), start=1):
        momentum = 0.9 * momentum + gradient(w, x.reshape(towers, -1, 3), y.reshape(towers, -1))
        w = w - 0.1 * momentum
        if step in ends:
            w, momentum = (jnp.broadcast_to(each.mean(0), each.shape) for each in (w, momentum))
    return w, momentum


@pytest.mark.parametrize(
    ("devices", "options", "block_steps", "ends"),
    [
        (cpus(4), {"sync_slots": "mean"}, 2, (2, 4, 6)),
        (cpus(4), {"sync": ("optimizer/0/trace/w",)}, lambda step: jnp.where(step < 2, 1, 3), (1, 2, 5)),
        (["cpu:0"] * 4, {"sync": ["optimizer"]}, 2, (2, 4, 6)),
    ],
)
def test_averaged_momenta_are_local_sgd_written_out(devices, options, block_steps, ends):
    model_fn = minimizing(lambda x, y: jnp.mean((x @ zeros("w", (3,)) - y) ** 2), optax.sgd(0.1, 0.9))
    batches = regression(24, steps=7)
    block_sync = BlockSync(block_steps, optax.sgd(1.0), **options)
    state, _ = trained(est.transform(replicate_model_fn(model_fn, devices=devices, block_sync=block_sync)), batches)
    w, momentum = local_sgd(batches, 4, ends)
    assert_close(state_of_blocks(state).copies["w"], w)
    assert_close(state.slots["optimizer"][0].trace["w"], momentum)


@pytest.mark.slow
def test_only_floats_are_averaged():
    optimizer = optax.inject_hyperparams(optax.adam)(0.02)
    block_sync = BlockSync(2, optax.sgd(1.0), sync=["optimizer"])
    state, _ = trained(blocks(mlp_model_fn(optimizer), 3, block_sync), regression(12, steps=2))
    slots = state.slots["optimizer"]
    adam = slots.inner_state[0]
    assert all(not np.ptp(leaf, axis=0).any() for leaf in jax.tree.leaves((adam.mu, adam.nu)))
    assert adam.count.tolist() == slots.count.tolist() == [2, 2, 2]


def test_within_a_block_the_global_variables_stay_and_are_those_that_evaluate():
    def model_fn(features, labels, mode):
        return trains(features, np.zeros(len(features), np.float32) if labels is None else labels, mode)

    trains = mlp_model_fn(optax.sgd(0.1))
    model, plain = blocks(model_fn, 4, BlockSync(4, bmuf())), est.transform(model_fn)
    batches = regression(8, steps=3)
    first = model.init(jax.random.key(0), *(x[0] for x in batches))
    state, _ = model.train_loop(first, batches)
    jax.tree.map(np.testing.assert_array_equal, state.variables, first.variables)
    assert np.ptp(state_of_blocks(state).copies["v"], axis=0).max() > 1e-4
    x, y = (x[0, :7] for x in batches)  # 7 rows on 4 towers
    bare = est.State(first.variables, {}, first.global_step, first.key)
    assert_close(model.eval_step(state, x, y).loss, plain.eval_step(bare, x, y).loss)
    assert_close(model.predict_step(state, x).predictions, plain.predict_step(bare, x).predictions)


# What a model_fn writes, and what optimizers can do.


def writing_model_fn(features, labels, mode):
    w, mean, own = ones("w", (1,)), zeros("mean", trainable=False), zeros("own", trainable=False)
    est.get_variable("rows", (), jnp.int32, trainable=False)
    est.get_variable("constant", (), initializer=jax.nn.initializers.ones, trainable=False)
    est.assign("mean", 0.5 * mean + 0.5 * features.mean())
    est.assign("own", own + features.sum())
    est.assign_add("rows", jnp.int32(len(features)))
    loss = jnp.mean((features * w) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


def test_what_a_model_fn_assigns_is_merged_if_asked_for():
    x = np.array([[1.0], [3.0]], np.float32)  # a row for each of two towers
    model = blocks(writing_model_fn, 2, BlockSync(2, optax.sgd(1.0), sync=["mean", "rows"]))
    state = model.init(jax.random.key(0), x)

    def values(state):
        block, whole = state_of_blocks(state), state.variables
        assert block.copies.keys() == {"w", "mean", "rows"}
        assert block.own.keys() == {"own"}
        copies = block.copies | block.own
        return {name: (whole[name].item(), copies[name].tolist()) for name in ("mean", "rows", "own")}

    state, _ = model.train_step(state, x)
    assert values(state) == {"mean": (0, [0.5, 1.5]), "rows": (0, [1, 1]), "own": (0, [1, 3])}
    state, _ = model.train_step(state, x)
    assert values(state) == {"mean": (1.5, [1.5, 1.5]), "rows": (4, [4, 4]), "own": (2, [2, 6])}
    state, _ = model.train_step(state, x)
    assert values(state) == {"mean": (1.5, [1.25, 2.25]), "rows": (4, [5, 5]), "own": (2, [3, 9])}
    state, _ = model.train_step(state, x)
    assert values(state) == {"mean": (1.875, [1.875, 1.875]), "rows": (8, [8, 8]), "own": (4, [4, 12])}


@pytest.mark.slow
def test_a_flax_modules_statistics_are_averaged_with_its_parameters():
    nn = pytest.importorskip("flax.linen")

    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))
            return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))

    def loss_of(features, labels):
        return jnp.mean((est.flax_module(Normalized(), "net")(features, train=True)[:, 0] - labels) ** 2)

    model_fn = minimizing(loss_of, optax.sgd(0.0))

    batches = regression(8, steps=2)
    model = blocks(model_fn, 2, BlockSync(2, optax.sgd(1.0), sync=["net/batch_stats"]))
    state, _ = trained(model, batches)
    synchronous, _ = trained(est.transform(replicate(model_fn, 2)), batches)
    assert_close(state.variables, synchronous.variables)
    copies = state_of_blocks(state).copies
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), copies)
    assert copies.keys() == state.variables.keys() == {"net", "net/batch_stats"}


@pytest.mark.slow
def test_slots_start_again_at_a_synchronisation_and_schedules_continue():
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    block_sync = BlockSync(2, DILOCO, reset_slots=True)
    state, _ = trained(blocks(mlp_model_fn(optimizer), 2, block_sync), regression(8, steps=2))
    slots = state.slots["optimizer"]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slots.inner_state[0]))
    assert slots.count.tolist() == [2, 2]
    np.testing.assert_allclose(slots.hyperparams["learning_rate"], [0.09, 0.09], rtol=1e-6)


def test_learning_rates_of_towers_are_seen_and_set():
    injected = optax.inject_hyperparams(optax.sgd)
    model = blocks(mlp_model_fn(injected(learning_rate=0.5)), 2, BlockSync(2, injected(learning_rate=1.0)))
    batches = regression(8, steps=2)
    state, specs = trained(model, batches)
    assert est.learning_rates(state) == {"block_sync": 1.0, "optimizer": 0.5}
    assert {n: rate.tolist() for n, rate in specs.train_op.learning_rates.items()} == {
        "block_sync": [1.0, 1.0],
        "optimizer": [0.5, 0.5],
    }
    still = est.set_learning_rate(est.set_learning_rate(state, "optimizer", 0.0), "block_sync", 0.5)
    assert est.learning_rates(still) == {"block_sync": 0.5, "optimizer": 0.0}
    after, _ = model.train_loop(still, batches)
    jax.tree.map(np.testing.assert_array_equal, after.variables, state.variables)


def everything_model_fn(features, labels, mode):
    """Micro-batches, a loss scale, an optimizer that asks for the step, a table, random numbers."""
    rows = est.embedding_lookup("table", features["ids"], (6, 3)).sum(1)
    w = est.get_variable("w", (3, 1))
    output = (rows + features["x"] + 0.1 * jax.random.normal(est.make_rng(), rows.shape)) @ w
    loss = est.losses.mean_squared_error(labels, output[:, 0])

    def optimizer():
        return optax.sgd(0.1 / (1 + est.global_step().astype(jnp.float32)))

    wrapped = TowerOptimizer(optimizer, accumulate_steps=2, loss_scale=est.DynamicLossScale(2.0**10, 3))
    return est.EstimatorSpec(mode, loss=loss, train_op=wrapped.minimize(loss))


@pytest.mark.slow
def test_every_optimizer_works_in_a_tower_of_its_own():
    x, y = regression(16, steps=4)
    batches = ({"x": x, "ids": np.random.default_rng(1).integers(0, 6, size=(4, 16, 2))}, y)
    apart, specs = trained(blocks(everything_model_fn, 4, BlockSync(1, optax.sgd(1.0))), batches)
    together, want = trained(est.transform(replicate(everything_model_fn, 4)), batches)
    assert_close(apart.variables, together.variables)
    assert_close(specs.loss, want.loss)
    assert apart.slots["optimizer"].scale.tolist() == [2048] * 4


@pytest.mark.slow
def test_an_optimizer_that_runs_the_model_again_does_so_with_its_towers_rows():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    model_fn = mlp_model_fn(optax.chain(optax.sgd(1.0), search))
    batches = regression(8, steps=1)
    block_sync = BlockSync(3, DILOCO)
    state, _ = trained(blocks(model_fn, 2, block_sync), batches)
    _, copies, *_ = by_hand(model_fn, 2, block_sync, batches)
    assert_close(state_of_blocks(state).copies, copies)


def test_towers_continue_from_a_warm_start_between_blocks():
    model = blocks(mlp_model_fn(optax.sgd(0.0)), 2, BlockSync(2, optax.sgd(1.0)))
    x, y = regression(8, steps=1)
    state = model.init(jax.random.key(0), x[0], y[0])
    other = jax.tree.map(lambda v: v + 1, state.variables)
    state, _ = model.train_step(state._replace(variables=other), x[0], y[0])
    jax.tree.map(lambda c, v: np.testing.assert_array_equal(c, np.stack([v, v])), state_of_blocks(state).copies, other)


def slope_model_fn(features, mode):
    """The gradient does not depend on the variable, so that any way to average gives the same."""
    w = zeros("w")
    if features.shape[0] > 2:
        est.get_variable("n", (), initializer=jax.nn.initializers.zeros, trainable=False)
        est.assign_add("n", jnp.float32(1))
    else:
        est.get_variable("n", (), trainable=False)
    loss = -w * jnp.mean(features)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(1.0)).minimize(loss))


def test_a_state_in_mid_block_loses_nothing_in_a_model_with_other_blocks():
    x = np.ones(4, np.float32)
    before, _ = trained(blocks(slope_model_fn, 2, BlockSync(4, optax.sgd(1.0))), (np.stack([x] * 6), None))
    for block_steps in (2, 5):
        other = blocks(slope_model_fn, 2, BlockSync(block_steps, optax.sgd(1.0)))
        after, _ = other.train_loop(before, (np.stack([x] * 13), None))
        assert state_of_blocks(after).copies["w"].tolist() == [19.0, 19.0]


def test_a_state_of_other_towers_is_refused():
    x = np.ones(4, np.float32)
    state, _ = trained(blocks(slope_model_fn, 4, BlockSync(4)), (x[None], None))
    on_host = jax.tree.map(np.asarray, state._replace(key=None))._replace(key=jax.random.key(0))
    with pytest.raises(ValueError, match="has the copies of 4 towers, but .* was given 2 devices.*warm_start"):
        blocks(slope_model_fn, 2, BlockSync(4)).train_step(on_host, x)


def test_what_is_to_be_merged_must_be_written_in_every_step():
    model = blocks(slope_model_fn, 2, BlockSync(3, sync=["n"]))
    state = model.init(jax.random.key(0), np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"does not assign to \['n'\] in this training step, but did in the one"):
        model.train_step(state, np.ones(2, np.float32))
    with pytest.raises(
        ValueError, match=r"Each tower keeps \['n'\] for itself, but in the state \[\].*another `BlockS"
    ):
        blocks(slope_model_fn, 2, BlockSync(3)).train_step(state, np.ones(4, np.float32))


@pytest.mark.slow
def test_only_slots_start_again_where_they_are_deep_in_a_state():
    nn = pytest.importorskip("flax.linen")

    def model_fn(features, labels, mode):
        output = est.flax_module(nn.Sequential([nn.Dense(2), nn.tanh, nn.Dense(1)]), "net")(features)
        loss = jnp.mean((output[:, 0] - labels) ** 2)

        scheduled = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
        biased = optax.masked(scheduled, lambda v: {"net": {n: n == "layers_0" for n in v["net"]}})
        every = TowerOptimizer(optax.MultiSteps(scheduled, 1), "every")
        both = TowerOptimizer(biased, "masked").minimize(loss), every.minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.group(*both))

    state, _ = trained(blocks(model_fn, 2, BlockSync(3, DILOCO, reset_slots=True)), regression(8, steps=3))
    for adam, schedule in (state.slots["masked"].inner_state, state.slots["every"].inner_opt_state):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(adam))
        assert schedule.count.tolist() == [3, 3]


def test_an_outer_optimizer_keeps_the_dtypes_of_its_state():
    def loss_of(features, labels):
        bias, w = est.get_variable("bias", (3,)), est.get_variable("w", (3,), jnp.bfloat16)
        return jnp.mean((features * w.astype(jnp.float32) + bias) ** 2)

    # It multiplies by its hyperparameters as arrays of the first variable's dtype.
    outer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9)
    state, _ = trained(blocks(minimizing(loss_of), 2, BlockSync(2, outer)), (np.ones((4, 4, 3), np.float32), None))
    (velocity,) = (leaf for leaf in jax.tree.leaves(state_of_blocks(state).outer) if leaf.dtype == jnp.bfloat16)
    assert np.any(velocity)
    assert state.variables["w"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_towers_have_random_numbers_and_an_index_of_their_own():
    def loss_of(features, labels):
        noise = jax.random.normal(est.make_rng(), (3,)) + tower_index().astype(jnp.float32) * num_towers()
        return -jnp.sum(zeros("w", (3,)) * noise) + 0.0 * features.sum()

    model_fn = minimizing(loss_of, optax.sgd(1.0))
    x = np.ones((3, 4, 1), np.float32)
    batches = (x, None)
    apart, _ = trained(blocks(model_fn, 4, BlockSync(3, optax.sgd(1.0))), batches)
    together, _ = trained(est.transform(replicate(model_fn, 4)), batches)
    assert_close(apart.variables, together.variables)  # the gradients do not depend on the variables
