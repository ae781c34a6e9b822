"""What replicate_model_fn does not take, and what it says then."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

ROWS = np.arange(8, dtype=np.float32)


def model_fn(features, labels, mode, optimizer=TowerOptimizer):
    w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=w * features)
    loss = jnp.mean((w * features) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=optimizer(optax.sgd(0.1)).minimize(loss))


def raises(kind, message):
    return pytest.raises(kind, match=re.escape(message))


@pytest.mark.parametrize("reduction", [est.Reduction.NONE, "none"])
def test_a_loss_that_is_not_reduced(reduction):
    message = "Tower losses need to be reduced in some way, yet NONE reduction is specified."
    with raises(ValueError, message):
        replicate_model_fn(model_fn, reduction, cpus(2))


def test_an_unknown_reduction():
    with raises(ValueError, "Unknown loss reduction 'average'; the known ones are Reduction.NONE"):
        replicate_model_fn(model_fn, "average", cpus(2))


@pytest.mark.covers("12 splitting")
@pytest.mark.parametrize("rows, towers", [(7, 4), (3, 2), (1, 8)])
def test_a_training_batch_that_does_not_divide_by_the_towers(rows, towers):
    message = f"Batch size {rows} needs to be divisible by the number of towers, which is {towers}."
    model = est.transform(replicate_model_fn(model_fn, devices=cpus(towers)))
    with raises(ValueError, message):
        model.init(jax.random.key(0), ROWS[:rows])
    state = model.init(jax.random.key(0), ROWS)
    with raises(ValueError, message):
        model.train_step(state, ROWS[:rows])
    with raises(ValueError, message):
        model.train_loop(state, (ROWS[None, :rows], None))


def test_any_batch_will_do_for_one_tower():
    model = est.transform(replicate_model_fn(model_fn, devices=cpus(1)))
    state = model.init(jax.random.key(0), ROWS[:7])
    assert model.train_step(state, ROWS[:5])[0].global_step == 1


@pytest.mark.covers("12 gradients")
@pytest.mark.parametrize("towers", [2, 4])
def test_a_plain_optimizer_with_several_devices(towers):
    def plain_fn(features, labels, mode):
        return model_fn(features, labels, mode, est.Optimizer)

    model = est.transform(replicate_model_fn(plain_fn, devices=cpus(towers)))
    message = "Please wrap optimizers with TowerOptimizer in order to use replicate_model_fn with multiple `devices`."
    with raises(ValueError, message):
        model.init(jax.random.key(0), ROWS)


def test_one_plain_optimizer_among_others():
    def mixed_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        loss = jnp.mean((w * features) ** 2)
        train_op = est.group(
            TowerOptimizer(optax.sgd(0.1)).minimize(loss),
            est.Optimizer(optax.sgd(0.1), name="second").minimize(loss),
        )
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    model = est.transform(replicate_model_fn(mixed_fn, devices=cpus(2)))
    with raises(ValueError, "Got the plain optimizer 'second'; write `TowerOptimizer(optimizer)"):
        model.init(jax.random.key(0), ROWS)


def test_a_plain_optimizer_on_one_device_is_fine():
    def plain_fn(features, labels, mode):
        return model_fn(features, labels, mode, est.Optimizer)

    model = est.transform(replicate_model_fn(plain_fn, devices=cpus(1)))
    state, _ = model.train_step(model.init(jax.random.key(0), ROWS), ROWS)
    assert state.variables["w"] != 1


def test_a_plain_optimizer_is_fine_where_nothing_is_trained():
    def plain_fn(features, labels, mode):
        return model_fn(features, labels, mode, est.Optimizer)

    model = est.transform(replicate_model_fn(plain_fn, devices=cpus(2)))
    state = model.init(jax.random.key(0), ROWS, mode="eval")
    assert model.eval_step(state, ROWS).loss == np.mean(ROWS**2)


@pytest.mark.parametrize("outer, inner", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_replicating_twice(outer, inner):
    once = replicate_model_fn(model_fn, devices=cpus(inner))
    model = est.transform(replicate_model_fn(once, devices=cpus(outer)))
    message = "was given a model_fn that is replicated already. Wrap it once."
    with raises(ValueError, message):
        model.init(jax.random.key(0), ROWS)


def test_calling_a_replicated_model_fn_outside_of_a_run():
    message = "`a model_fn made by replicate_model_fn` must be called inside a model_fn that an Estimator"
    with raises(RuntimeError, message):
        replicate_model_fn(model_fn, devices=cpus(2))(ROWS, None, "train")


def test_integers_cannot_be_averaged():
    def counting_fn(features, labels, mode):
        est.get_variable("count", initializer=np.int32(0), trainable=False)
        est.assign("count", est.read_variable("count") + 1)
        return model_fn(features, labels, mode)

    model = est.transform(replicate_model_fn(counting_fn, devices=cpus(2)))
    state = model.init(jax.random.key(0), ROWS)
    message = (
        "The towers assign to the variable 'count', whose int32 values cannot be averaged. "
        "Create it with `aggregation=est.VariableAggregation.SUM` or `ONLY_FIRST_TOWER`, or use "
        "`est.assign_add`."
    )
    with raises(ValueError, message):
        model.train_step(state, ROWS)


@pytest.mark.parametrize("aggregation", list(est.VariableAggregation))
def test_keys_cannot_be_put_together(aggregation):
    def shuffling_fn(features, labels, mode):
        key = est.get_variable("key", lambda key: key, trainable=False, aggregation=aggregation)
        est.assign("key", jax.random.split(key)[0])
        return model_fn(features, labels, mode)

    model = est.transform(replicate_model_fn(shuffling_fn, devices=cpus(2)))
    state = model.init(jax.random.key(0), ROWS)
    message = (
        "The towers assign to the variable 'key', which holds a PRNG key. Keys cannot be put together: "
        "take one by `est.make_rng()` in each step, or keep `jax.random.key_data(key)`."
    )
    with raises(ValueError, message):
        model.train_step(state, ROWS)


def test_integers_may_be_assigned_on_one_device():
    def counting_fn(features, labels, mode):
        est.get_variable("count", initializer=np.int32(0), trainable=False)
        est.assign("count", est.read_variable("count") + 1)
        return model_fn(features, labels, mode)

    model = est.transform(replicate_model_fn(counting_fn, devices=cpus(1)))
    state, _ = model.train_step(model.init(jax.random.key(0), ROWS), ROWS)
    assert state.variables["count"] == 1


def test_predictions_of_the_whole_batch():
    def total_fn(features, labels, mode):
        est.get_variable("w", ())
        return est.EstimatorSpec(mode, predictions={"total": features.sum()})

    model = est.transform(replicate_model_fn(total_fn, devices=cpus(2)))
    state = model.init(jax.random.key(0), ROWS, mode="infer")
    message = (
        "predictions['total'] must have the batch as its first dimension to be put together from "
        "several towers; it has shape () in a tower of 4 examples."
    )
    with raises(ValueError, message):
        model.predict_step(state, ROWS)


def test_features_and_labels_of_different_batch_sizes():
    model = est.transform(replicate_model_fn(model_fn, devices=cpus(2)))
    message = "All arrays of a batch must have the same batch size (first dimension); got features: 8, labels: 4."
    with raises(ValueError, message):
        model.init(jax.random.key(0), ROWS, ROWS[:4])


def test_features_without_a_batch_dimension():
    model = est.transform(replicate_model_fn(model_fn, devices=cpus(2)))
    with raises(ValueError, "needs a batch dimension; features['rate'] is a scalar."):
        model.init(jax.random.key(0), {"x": ROWS, "rate": np.float32(1)})


def test_an_error_of_the_model_fn_comes_out_as_it_is_and_leaves_nothing_behind():
    fail = True

    def failing_fn(features, labels, mode):
        if fail and mode == est.ModeKeys.TRAIN:
            raise ZeroDivisionError("in a tower")
        return model_fn(features, labels, mode)

    replicated = replicate_model_fn(failing_fn, devices=cpus(2))
    with raises(ZeroDivisionError, "in a tower"):
        est.transform(replicated).init(jax.random.key(0), ROWS)
    fail = False
    model = est.transform(replicated)
    state, _ = model.train_step(model.init(jax.random.key(0), ROWS), ROWS)
    assert state.global_step == 1
    with raises(RuntimeError, "must be called inside a model_fn"):
        est.get_variable("w", ())


def test_params_are_checked_as_for_a_plain_model_fn():
    model = est.transform(replicate_model_fn(model_fn, devices=cpus(2)), params={"rate": 1.0})
    with raises(ValueError, "model_fn (model_fn) does not include params argument, but params"):
        model.init(jax.random.key(0), ROWS)


def test_an_unknown_variable_distribution():
    with raises(ValueError, "'nowhere' is not a valid VariableDistribution"):
        replicate_model_fn(model_fn, devices=cpus(2), variable_distribution="nowhere")
