"""Blocks of steps in an Estimator, in compiled programs and over several processes; and what is refused."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import minimizing
from testing.summaries import scalars
from testing.towers import assert_close, cpus, mlp_model_fn, regression, replicate, started

import estimator as est
from replicate import BlockSync, TowerOptimizer, bmuf, replicate_model_fn

DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)
X, Y = regression(8, steps=12)


def estimator(folder, towers=4, block_sync=None, **config):
    block_sync = block_sync or BlockSync(4, DILOCO)
    replicated = replicate_model_fn(mlp_model_fn(optax.adam(0.02)), devices=cpus(towers), block_sync=block_sync)
    return est.Estimator(replicated, str(folder), est.RunConfig(seed=1, **config))


def batches(start=0):
    return lambda: [(X[i], Y[i]) for i in range(start, 12)]


def saved(trained):
    return {name: trained.get_variable_value(name) for name in trained.get_variable_names()}


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_run_that_stopped_within_a_block_resumes_bit_by_bit(tmp_path):
    whole = estimator(tmp_path / "whole", steps_per_loop=4)
    whole.train(batches(), steps=10)
    for start, steps in ((0, 6), (6, 4)):
        halves = estimator(tmp_path / "halves", steps_per_loop=4)
        halves.train(batches(start), steps=steps)
        assert halves.get_variable_value("block_sync/steps") == start + steps
    want, got = saved(whole), saved(halves)
    assert want.keys() == got.keys()
    assert want["block_sync/copies/v"].shape == (4, 4, 1)
    assert np.ptp(want["block_sync/copies/v"], axis=0).max() > 0  # the copies of a block that has begun
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.quick
def test_training_that_ends_within_a_block_says_so_in_a_line(tmp_path, messages):
    trained = estimator(tmp_path, towers=2)
    for steps in (4, 1, 5):  # to the end of a block, and to 1 and 2 steps after one
        trained.train(batches(), steps=steps)
    one, two = (message for message in messages() if "averaged yet" in message)
    rest = "of the current block {} not averaged yet: evaluation, prediction and export use"
    assert one.startswith("1 step " + rest.format("is")) and two.startswith("2 steps " + rest.format("are"))


@pytest.mark.slow
def test_an_estimator_logs_and_evaluates_what_its_model_does(tmp_path):
    trained = estimator(tmp_path, steps_per_loop=4, save_summary_steps=4)
    trained.train(batches(), steps=12)
    model = est.transform(trained.model_fn)
    state = model.init(jax.random.key(1), X[0], Y[0])
    state, specs = model.train_loop(state, (X, Y))
    assert_close({n: trained.get_variable_value(n) for n in state.variables}, jax.tree.map(np.asarray, state.variables))
    evaluated = trained.evaluate(lambda: [(X[0, :7], Y[0, :7])])
    np.testing.assert_allclose(evaluated["loss"], model.eval_step(state, X[0, :7], Y[0, :7]).loss, rtol=1e-5)
    steps, losses = zip(*scalars(tmp_path)["loss"], strict=True)
    assert len(steps) == 3
    np.testing.assert_allclose(losses, specs.loss[np.array(steps) - 1], rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_other_towers_is_refused_and_its_variables_can_be_taken(tmp_path):
    estimator(tmp_path / "four").train(batches(), steps=6)
    with pytest.raises(ValueError, match="block_sync/copies/hidden/b.*(4, 4).*(2, 4)") as error:
        estimator(tmp_path / "four", towers=2).train(batches(), steps=1)
    assert "warm_start_from" in str(error.value)
    two = replicate_model_fn(mlp_model_fn(optax.adam(0.02)), devices=cpus(2), block_sync=BlockSync(4, DILOCO))
    warm = est.Estimator(two, str(tmp_path / "two"), warm_start_from=str(tmp_path / "four"))
    warm.train(batches(), steps=1)
    source = estimator(tmp_path / "four")
    for name in ("hidden/w", "v"):
        np.testing.assert_array_equal(warm.get_variable_value(name), source.get_variable_value(name))
        copies = warm.get_variable_value(f"block_sync/copies/{name}")
        assert np.abs(copies - warm.get_variable_value(name)).max() < 0.03  # one step of adam away
    evaluated = estimator(tmp_path / "four", towers=2).evaluate(lambda: [(X[0], Y[0])])
    assert evaluated["loss"] == pytest.approx(source.evaluate(lambda: [(X[0], Y[0])])["loss"], rel=1e-5)


# Compiled programs.


def counting_model_fn(features, labels, mode):
    w = est.get_variable("w", (3, 4))
    v = est.get_variable("v", (4,))
    est.get_variable("rows", (), jnp.int32, trainable=False)
    est.assign_add("rows", jnp.int32(len(features)))
    output = jnp.tanh(features @ w) @ v
    loss = jnp.mean((output - labels) ** 2)
    est.summary.scalar("output", output.mean())
    metrics = {"error": est.metrics.mean_absolute_error(labels, output)}
    train_op = TowerOptimizer(optax.adam(0.1)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def collectives(text):
    """By computation of a compiled program, the kinds of its collectives, with their dtypes."""
    by_computation = collections.defaultdict(list)
    for line in text.splitlines():
        if line and not line.startswith(" "):
            computation = "ENTRY" if line.startswith("ENTRY") else line.split()[0]
        match = re.search(r"= (\w+)\[.* (all-reduce|all-gather|collective-permute|reduce-scatter|all-to-all)\(", line)
        if match:
            by_computation[computation].append((match[2], match[1]))
    return by_computation


@pytest.mark.slow
def test_a_block_has_one_all_reduce_per_dtype_and_its_steps_none():
    def compiled(**options):
        model, state = started(replicate(counting_model_fn, 4, **options), X[0], Y[0])
        loop = jax.jit(lambda state, *batches: model.train_loop(state, batches))
        return loop.lower(state, X[:8], Y[:8]).compile().as_text()

    text = compiled(block_sync=BlockSync(2, bmuf(), sync=["rows"]))
    by_computation = collectives(text)
    # What is reported is put together once, after the last step.
    assert set(by_computation.pop("ENTRY")) == {("all-gather", "f32")}
    ((name, at_the_end_of_a_block),) = by_computation.items()
    assert sorted(at_the_end_of_a_block) == [("all-reduce", "f32"), ("all-reduce", "s32")]
    assert name in ", ".join(re.findall(r" conditional\(.*branch_computations={(.*?)}", text)).split(", ")
    assert collectives(compiled()).keys() - {"ENTRY"}  # of every step


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_step_within_a_block_copies_no_variable_and_no_slot():
    x, y = np.zeros((8, 8, 61), np.float32), np.zeros((8, 8, 61), np.float32)

    def loss_of(features, labels):
        w, v = est.get_variable("w", (61, 61)), est.get_variable("v", (61, 61))
        return jnp.mean((jnp.tanh(features @ w) @ v - labels) ** 2)

    model_fn = minimizing(loss_of, optax.sgd(0.1, momentum=0.9))
    model = est.transform(replicate(model_fn, 2, block_sync=BlockSync(8)))
    state = model.abstract_init(x[0], y[0])
    text = jax.jit(model.train_loop, donate_argnums=0).lower(state, (x, y)).compile().as_text()
    [step] = [part for part in text.split("\n\n") if " conditional(" in part and "ENTRY" not in part]
    assert len(re.findall(r"f32\[61,61\]\S* (?:dot|fusion)\(", step)) >= 2  # the gradients
    assert not re.findall(r"61,61\]\S* copy\(", step)


@pytest.mark.slow
def test_programs_are_traced_once_and_changes_of_the_spec_are_kept(tmp_path):
    traces = []
    inner = mlp_model_fn(optax.sgd(0.1))

    def model_fn(features, labels, mode):
        traces.append(mode)
        return inner(features, labels, mode)

    replicated = replicate_model_fn(model_fn, devices=cpus(2), block_sync=BlockSync(2, DILOCO))

    def doubled(features, labels, mode):
        spec = replicated(features, labels, mode)
        return spec._replace(loss=2 * spec.loss)

    plain, model = est.transform(replicated), est.transform(doubled)
    state = plain.init(jax.random.key(0), X[0], Y[0])
    _, want = plain.train_loop(state, (X[:4], Y[:4]))
    _, got = model.train_loop(state, (X[:4], Y[:4]))
    assert_close(got.loss, 2 * want.loss)
    traces.clear()
    model.train_loop(state, (X[:4], Y[:4]))
    assert not traces


def test_state_and_memory_are_one_tower_on_each_device():
    model, state = started(replicate(mlp_model_fn(optax.adam(0.1)), 4, block_sync=BlockSync(2, bmuf())), X[0], Y[0])
    state, _ = model.train_step(state, X[0], Y[0])
    for array in jax.tree.leaves((state.slots["block_sync"].copies, state.slots["optimizer"])):
        places = [(shard.device.id, shard.data.shape[0]) for shard in array.addressable_shards]
        assert places == [(i, 1) for i in range(4)]
    for array in jax.tree.leaves((state.variables, state.slots["block_sync"].outer)):
        assert array.is_fully_replicated


# What is refused.


BAD = {
    ValueError: [
        (lambda: BlockSync(0), "needs block_steps to be an integer of at least 1; got 0"),
        (lambda: BlockSync(2.0), "needs block_steps to be an integer of at least 1; got 2.0"),
        (lambda: BlockSync(2, warmup_steps=-1), "needs warmup_steps to be an integer of at least 0; got -1"),
        (lambda: BlockSync(2, sync_slots="sum"), 'takes None or "mean" as sync_slots.*sync_slots=.sum. and'),
        (lambda: BlockSync(2, sync_slots="mean", reset_slots=True), "with reset_slots only None.*=True"),
        (lambda: bmuf(0.0), "needs a finite block_learning_rate > 0; got 0.0"),
        (lambda: bmuf(block_momentum=1.0), "needs 0 <= block_momentum < 1, or None, .* got 1.0"),
    ],
    TypeError: [
        (lambda: BlockSync(2, 0.9), "takes an optax transformation as outer_optimizer, such as .* got 0.9"),
        (lambda: BlockSync(2, sync="mean"), "takes a list of names of variables as sync; got 'mean'"),
    ],
}


@pytest.mark.parametrize("error, make, message", refused.rows(BAD))
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_sync": 4}, TypeError, r"block_sync must be a `BlockSync`, such as .*; got 4"),
        ({"variable_distribution": "sharded"}, ValueError, "block_sync was given with variable_distribution='sharded'"),
        ({"on_nan": "skip"}, ValueError, "block_sync was given with on_nan='skip'.*apply_if_finite"),
        ({"devices_per_tower": 2}, ValueError, "block_sync was given with devices_per_tower=2"),
    ],
)
def test_arguments_that_do_not_go_together(options, error, message):
    with pytest.raises(error, match=message):
        replicate_model_fn(counting_model_fn, **({"devices": cpus(2), "block_sync": BlockSync(2)} | options))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"sync": ["seen", "w"]}, r"sync=\['seen', 'w'\]\)` names \['w'\], but what .* training is \['seen'\]"),
        (
            "sgd",
            {"sync": ["sgd/0/trace/v"]},
            r"names \['sgd/0/trace/v'\].* no floats in the slots of \['sgd'\] have such",
        ),
        ("sgd", {"sync": ["sgd/1/count"]}, r"names \['sgd/1/count'\], but .* no floats in the slots"),
        (
            "sgd",
            {"sync": ["sgd/0"], "reset_slots": True},
            r"averages the slots \['sgd/0'\], and initializes them again",
        ),
        ("block_sync", {}, "An optimizer is named 'block_sync', as is what `BlockSync` keeps in the slots. Rename it."),
    ],
)
def test_names_that_are_not_there_or_taken(name, options, message):
    def loss_of(features, labels):
        est.get_variable("seen", (), jnp.int32, trainable=False)
        est.assign_add("seen", jnp.int32(1))
        return jnp.mean(est.get_variable("w", (1,)) * features)

    model_fn = minimizing(loss_of, optax.sgd(optax.constant_schedule(0.1), momentum=0.9), name=name)
    with pytest.raises(ValueError, match=message):
        started(replicate(model_fn, 2, block_sync=BlockSync(2, **options)), X[0])


@pytest.mark.parametrize("length", [lambda step: 2.0, lambda step: jnp.arange(2)])
def test_a_length_of_a_block_that_is_no_integer(length):
    model, state = started(replicate(mlp_model_fn(optax.sgd(0.1)), 2, block_sync=BlockSync(length)), X[0], Y[0])
    with pytest.raises(TypeError, match="got as block_steps must return an integer, .* begins at the given step; got"):
        model.train_step(state, X[0], Y[0])
