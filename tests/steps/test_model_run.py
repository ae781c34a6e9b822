"""Another package that maps a model_fn: slices of the batch by `jax.vmap`, on the names of `estimator.replication`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from estimator.replication import ModelRun, concatenate_specs
from estimator.testing import assert_towers_match_one_batch


def in_slices(model_fn, devices):
    """Runs the model_fn on as many equal slices of the batch as there are devices, and on what is left over."""

    def mapped(features, labels, mode, params=None, config=None):
        run = ModelRun.begin("in_slices", model_fn, features, labels, mode, params, config)
        if run.frame.initializing:
            return run.call(run.batch)
        even = run.rows - run.rows % len(devices)
        sizes = [size for size in (even, run.rows - even) if size]
        parts = [jax.tree.map(lambda x: x[:even], run.batch), jax.tree.map(lambda x: x[even:], run.batch)]
        specs = [merged(run, parts[0], len(devices)), *(merged(run, part, 1) for part in parts[1 : len(sizes)])]
        return concatenate_specs(specs, sizes, mean_loss=True)

    return mapped


def merged(run, batch, slices):
    def one(index, rows):
        trains = run.frame.mode == "train"
        result = run.on(rows, run.frame.fresh(), differentiate=trains, loss_scale=1 / slices)
        result.check_rows(len(rows[0]))
        summed, per_part = result.scale(1 / slices).split()
        return (summed, result.gradients.by_slots, result.addends(index, slices)), per_part

    stacked = jax.tree.map(lambda x: x.reshape(slices, len(x) // slices, *x.shape[1:]), batch)
    to_sum, per_part = jax.vmap(one)(jnp.arange(slices), stacked)
    summed, gradients, writes = jax.tree.map(lambda x: x.sum(0), to_sum)
    run.leave(writes.applied_to(run.frame.variables), gradients)
    return per_part.merge(slices).join(summed)


def model_fn(features, labels, mode):
    w = est.get_variable("w", (3,), initializer=jax.nn.initializers.ones)
    mean = est.get_variable("mean", (3,), initializer=jax.nn.initializers.zeros, trainable=False)
    est.get_variable("rows", (), jnp.int32, aggregation=est.VariableAggregation.SUM, trainable=False)
    est.assign("mean", 0.9 * mean + 0.1 * features.mean(0))
    est.assign_add("rows", len(features))
    est.record("largest", features.mean())
    output = features @ w
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=output)
    error = (output - labels) ** 2
    train_op = est.Optimizer(optax.sgd(0.1)).minimize(error.mean())
    return est.EstimatorSpec(mode, output, error.mean(), train_op, {"error": est.metrics.mean(error)})


@pytest.mark.slow
def test_slices_of_another_package_are_one_batch():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(8, 3)).astype(np.float32), random.normal(size=8).astype(np.float32)
    assert_towers_match_one_batch(model_fn, features, labels, replicate=in_slices, towers=[2], steps=1)


def test_gradients_that_are_not_left_to_the_run_around_are_an_error():
    def forgetful(model_fn):
        def mapped(features, labels, mode, params=None, config=None):
            run = ModelRun.begin("forgetful", model_fn, features, labels, mode, params, config)
            if run.frame.initializing:
                return run.call(run.batch)
            return run.on(run.batch, run.frame.fresh(), differentiate=True).spec

        return mapped

    def by_hand(features, labels, mode):
        loss = jnp.mean((est.get_variable("w", ()) * features) ** 2)
        optimizer = est.Optimizer(optax.sgd(0.1))
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(optimizer.compute_gradients(loss)))

    model, x = est.transform(forgetful(by_hand)), jnp.arange(4.0)
    state = model.init(jax.random.key(0), x)
    with pytest.raises(RuntimeError, match=r"`apply_gradients` of \['optimizer'\] .* hands them on: `ModelRun.leave\("):
        model.train_step(state, x)


def test_a_mapped_model_fn_runs_in_a_model():
    with pytest.raises(RuntimeError, match="`in_slices` must be called inside a model_fn that an Estimator"):
        in_slices(model_fn, ["one"])(np.ones((2, 3)), None, "infer")
