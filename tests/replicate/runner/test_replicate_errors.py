"""What replicate_model_fn does not take, and what it says then."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus, one_step

import estimator as est
from replicate import BlockSync, TowerOptimizer, replicate_model_fn

ROWS = np.arange(8, dtype=np.float32)


def model_fn(features, labels, mode, optimizer=TowerOptimizer):
    w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=w * features)
    loss = jnp.mean((w * features) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=optimizer(optax.sgd(0.1)).minimize(loss))


def plain_fn(features, labels, mode):
    return model_fn(features, labels, mode, est.Optimizer)


def mixed_fn(features, labels, mode):
    spec = model_fn(features, labels, mode)
    second = est.Optimizer(optax.sgd(0.1), name="second").minimize(spec.loss)
    return spec._replace(train_op=est.group(spec.train_op, second))


def counting_fn(features, labels, mode):
    est.get_variable("count", initializer=np.int32(0), trainable=False)
    est.assign("count", est.read_variable("count") + 1)
    return model_fn(features, labels, mode)


def shuffling_fn(aggregation):
    def model_fn_of_keys(features, labels, mode):
        key = est.get_variable("key", lambda key: key, trainable=False, aggregation=aggregation)
        est.assign("key", jax.random.split(key)[0])
        return model_fn(features, labels, mode)

    return model_fn_of_keys


def total_fn(features, labels, mode):
    return model_fn(features, labels, mode)._replace(predictions={"total": features.sum()})


def started(fn=model_fn, towers=2, *batch, mode="train", **params):
    model = est.transform(replicate_model_fn(fn, devices=cpus(towers)), **params)
    return model, model.init(jax.random.key(0), *(batch or (ROWS,)), mode=mode)


def train(fn, towers=2):
    model, state = started(fn, towers)
    return model.train_step(state, ROWS)[0]


NOT_REDUCED = "Tower losses need to be reduced in some way, yet NONE reduction is specified."
TWICE = "was given a model_fn that is replicated already. Wrap it once."
KEYS = (
    "The towers assign to the variable 'key', which holds a PRNG key. Keys cannot be put together: "
    "take one by `est.make_rng()` in each step, or keep `jax.random.key_data(key)`."
)
REFUSED = {
    ValueError: [
        *((lambda n=n: replicate_model_fn(model_fn, n, cpus(2)), NOT_REDUCED) for n in (est.Reduction.NONE, "none")),
        (
            lambda: replicate_model_fn(model_fn, "average", cpus(2)),
            "Unknown loss reduction 'average'; the known ones are Reduction.NONE",
        ),
        (lambda: started(mixed_fn), "Got the plain optimizer 'second'; write `TowerOptimizer(optimizer)"),
        *(
            (lambda i=i, o=o: started(replicate_model_fn(model_fn, devices=cpus(i)), o), TWICE)
            for o, i in ((1, 1), (2, 2))
        ),
        (
            lambda: train(counting_fn),
            "The towers assign to the variable 'count', whose int32 values cannot be averaged. Create it with "
            "`aggregation=est.VariableAggregation.SUM` or `ONLY_FIRST_TOWER`, or use `est.assign_add`.",
        ),
        *((lambda how=how: train(shuffling_fn(how)), KEYS) for how in est.VariableAggregation),
        (
            lambda: train(total_fn),
            "predictions['total'] must have the batch as its first dimension to be put together from several towers; "
            "it has shape () in a tower of 4 examples.",
        ),
        (lambda: started(params={"rate": 1.0}), "model_fn (model_fn) does not include params argument, but params"),
        (
            lambda: replicate_model_fn(model_fn, devices=cpus(2), variable_distribution="nowhere"),
            "'nowhere' is not a valid VariableDistribution",
        ),
    ],
    RuntimeError: [
        (
            lambda: replicate_model_fn(model_fn, devices=cpus(2))(ROWS, None, "train"),
            "`a model_fn made by replicate_model_fn` must be called inside a model_fn that an Estimator",
        )
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *case) for error, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused_is_said(error, call, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.covers("12 gradients")
@pytest.mark.parametrize("options", [{}, {"block_sync": BlockSync(2)}], ids=["", "block_sync"])
def test_a_plain_optimizer_with_several_devices(options, tmp_path):
    towers = replicate_model_fn(plain_fn, devices=cpus(2), **options)
    for use in (lambda: one_step(towers, ROWS), lambda: est.Estimator(towers, tmp_path).train(lambda: ROWS)):
        with pytest.raises(ValueError, match="Please wrap optimizers with TowerOptimizer in order to use replicate_m"):
            use()


@pytest.mark.covers("12 splitting")
def test_a_training_batch_that_does_not_divide_by_the_towers():
    model, state = started(model_fn, 4)
    few = ROWS[:7]
    for step, args in (
        (model.init, (jax.random.key(0), few)),
        (model.train_step, (state, few)),
        (model.train_loop, (state, (few[None], None))),
    ):
        message = "Batch size 7 needs to be divisible by the number of towers, which is 4."
        with pytest.raises(ValueError, match=re.escape(message)):
            step(*args)


def test_any_batch_will_do_for_one_tower():
    model, state = started(model_fn, 1, ROWS[:7])
    assert model.train_step(state, ROWS[:5])[0].global_step == 1


def test_a_plain_optimizer_on_one_device_or_where_nothing_is_trained_is_fine():
    assert train(plain_fn, 1).variables["w"] != 1
    model, state = started(plain_fn, mode="eval")
    assert model.eval_step(state, ROWS).loss == np.mean(ROWS**2)


def test_integers_may_be_assigned_on_one_device():
    assert train(counting_fn, 1).variables["count"] == 1


def test_an_error_of_the_model_fn_comes_out_as_it_is_and_leaves_nothing_behind():
    fail = True

    def failing_fn(features, labels, mode):
        if fail and mode == est.ModeKeys.TRAIN:
            raise ZeroDivisionError("in a tower")
        return model_fn(features, labels, mode)

    replicated = replicate_model_fn(failing_fn, devices=cpus(2))
    with pytest.raises(ZeroDivisionError, match="in a tower"):
        est.transform(replicated).init(jax.random.key(0), ROWS)
    fail = False
    assert one_step(replicated, ROWS)[0].global_step == 1
    with pytest.raises(RuntimeError, match="must be called inside a model_fn"):
        est.get_variable("w", ())
