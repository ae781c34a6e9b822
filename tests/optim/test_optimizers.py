"""All that optax wraps around an optimizer, and several optimizers in one model, train in towers as on one device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, ones, zeros
from testing.towers import FOUR, assert_same_training, mlp_model_fn, regression, replicate, started

import estimator as est
from replicate import TowerOptimizer

LABELS = {"hidden/w": "adam", "hidden/b": "sgd", "v": "adam"}
RATES = [0.5, 0.25, 0.125]


def schedule(count):
    return jnp.asarray(RATES, jnp.float32)[count]


class AverageState(NamedTuple):
    average: optax.Params
    count: jax.Array


def pull_to_average(decay=0.5, every=2):
    """As lookahead: keeps an average of the values, and moves halfway back to it now and then."""

    def init(params):
        return AverageState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        average = optax.incremental_update(params, state.average, 1 - decay)
        back = state.count % every == every - 1
        updates = jax.tree.map(lambda u, a, p: jnp.where(back, (a - p) / 2, u), updates, average, params)
        return updates, AverageState(average, state.count + 1)

    return optax.GradientTransformation(init, update)


WRAPPED = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=schedule, b1=0.8),
    "schedule": lambda: optax.sgd(schedule, momentum=0.9),
    "masked": lambda: optax.masked(optax.adam(0.02), {"hidden/w": True, "hidden/b": False, "v": True}),
    "multi_transform": lambda: optax.multi_transform(
        {"adam": optax.adam(0.02), "sgd": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.02), every_k_schedule=2),
    "average": lambda: optax.chain(optax.sgd(0.1), pull_to_average()),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.02),
    "clip_to_params": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(0.02)),
    "one of everything": lambda: optax.MultiSteps(optax.multi_transform(EVERYTHING, LABELS), 2),
}
EVERYTHING = {
    "adam": optax.chain(optax.clip_by_global_norm(0.1), optax.inject_hyperparams(optax.adam)(schedule)),
    "sgd": optax.chain(optax.sgd(0.1), pull_to_average()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, towers, reduction",
    [
        ("one of everything", 4, "mean"),
        ("masked", 2, "sum"),
        ("schedule_free", 2, "mean"),
        ("clip_to_params", 4, "sum"),
    ],
)
def test_what_optax_wraps_trains_as_on_one_device(optimizer, towers, reduction):
    model_fn = mlp_model_fn(WRAPPED[optimizer](), reduction)
    assert_same_training(model_fn, replicate(model_fn, towers, reduction), regression(8, steps=4))


# What is counted is steps.


def slope_model_fn(make_optimizer):
    """The gradient of w is 3, in every step."""

    def model_fn(features, labels, mode):
        loss = jnp.mean(zeros("w") * features)
        return est.EstimatorSpec(mode, loss=loss, train_op=make_optimizer().minimize(loss))

    return model_fn


def steps_taken(model_fn, towers):
    """The first three steps of w, each by a call of `train_step`; and the last state."""
    model, state = started(replicate(model_fn, towers), FOUR)
    values = [state.variables["w"]]
    for _ in range(3):
        state, _ = model.train_step(state, FOUR)
        values.append(state.variables["w"])
    return np.diff(np.stack(values)), state


def test_a_schedule_counts_steps():
    taken, state = steps_taken(slope_model_fn(lambda: TowerOptimizer(optax.sgd(schedule))), towers=4)
    np.testing.assert_allclose(taken, -3 * np.array(RATES))
    assert state.slots["optimizer"][1].count == 3


@pytest.mark.parametrize("towers", [None, 4])
def test_a_function_may_make_the_optimizer_from_the_step(towers):
    """As a learning rate made by `tf.train.exponential_decay(..., global_step)`."""
    model_fn = slope_model_fn(lambda: TowerOptimizer(lambda: optax.sgd(schedule(est.global_step()))))
    taken, _ = steps_taken(model_fn, towers)
    np.testing.assert_allclose(taken, -3 * np.array(RATES))


def test_a_function_may_make_the_optimizer_from_a_variable():
    """Its value is the one that the step began with."""

    def by_variable():
        return optax.sgd(est.read_variable("rate"))

    def model_fn(features, labels, mode):
        rate = est.get_variable("rate", (), initializer=jax.nn.initializers.ones, trainable=False)
        spec = slope_model_fn(lambda: TowerOptimizer(by_variable))(features, labels, mode)
        est.assign("rate", rate / 2)
        return spec

    taken, _ = steps_taken(model_fn, towers=2)
    np.testing.assert_allclose(taken, [-3, -1.5, -0.75])


@pytest.mark.parametrize("late", [False, True])
def test_an_optimizer_that_holds_a_value_of_the_towers(late):
    def make():
        rate = schedule(est.global_step())
        return TowerOptimizer((lambda: optax.sgd(rate)) if late else optax.sgd(rate))

    with pytest.raises(
        ValueError, match=r"holds a value that the model_fn computed.*Give it apart.*or give a function"
    ):
        steps_taken(slope_model_fn(make), towers=2)


def test_optax_may_mix_dtypes_although_the_user_may_not():
    """A schedule gives float32 rates to variables of bfloat16."""

    def loss_of(features, labels):
        return jnp.mean(zeros("w", dtype=jnp.bfloat16).astype(jnp.float32) * features)

    taken, _ = steps_taken(minimizing(loss_of, optax.inject_hyperparams(optax.sgd)(schedule)), towers=2)
    np.testing.assert_allclose(taken.astype(np.float32), -3 * np.array(RATES))


# Several optimizers.


def gan_model_fn(reverse=False):
    """Learns the features' distribution; the labels are the generator's noise."""

    def discriminate(x):
        with est.variable_scope("discriminator", reuse=est.AUTO_REUSE):
            w, v = est.get_variable("w", (3, 4)), est.get_variable("v", (4,))
            return jnp.tanh(x @ w) @ v

    def model_fn(features, labels, mode):
        with est.variable_scope("generator"):
            fake = labels[:, None] * est.get_variable("w", (1, 3)) + est.get_variable("b", (3,))
        on_real, on_fake = discriminate(features), discriminate(fake)
        discriminator_loss = jnp.sum(jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake))
        generator_loss = jnp.sum(jax.nn.softplus(-on_fake))
        train_ops = [
            TowerOptimizer(optax.adam(0.05, b1=0.5), name="discriminator").minimize(
                discriminator_loss, est.trainable_variables("discriminator")
            ),
            TowerOptimizer(lambda: optax.sgd(0.02, momentum=0.9), name="generator").minimize(
                generator_loss, est.trainable_variables("generator")
            ),
        ]
        train_op = est.group(*reversed(train_ops) if reverse else train_ops)
        return est.EstimatorSpec(mode, {"fake": fake}, generator_loss + discriminator_loss, train_op)

    return model_fn


@pytest.mark.slow
def test_a_gan():
    """The order of its two updates does not matter, since all gradients are taken at the values of the start."""
    towers = replicate(gan_model_fn(reverse=True), 2, "sum")
    state = assert_same_training(gan_model_fn(), towers, regression(8, steps=4))
    assert set(state.slots) == {"discriminator", "generator"}
    assert set(state.slots["generator"][0].trace) == {"generator/w", "generator/b"}


def test_optimizers_of_one_name():
    """Also one object that minimizes two losses: each call has its own entry."""

    def model_fn(features, labels, mode):
        losses = {name: jnp.mean((features @ ones(name, (3,)) - labels) ** 2) for name in "abc"}
        one = TowerOptimizer(optax.adam(0.1), name="mine")
        other = TowerOptimizer(optax.sgd(0.1, momentum=0.9), name="mine")
        train_op = est.group(
            *(optimizer.minimize(losses[name], [name]) for optimizer, name in [(one, "a"), (other, "b"), (one, "c")])
        )
        assert [one.get_slot(name, "mu") is not None for name in "abc"] == [True, False, True]
        return est.EstimatorSpec(mode, {}, sum(losses.values()), train_op)

    state = assert_same_training(model_fn, replicate(model_fn, 4), regression(8))
    for name, entry, of in (("mine", 1, "a"), ("mine_1", 0, "b"), ("mine_2", 1, "c")):
        assert set(state.slots[name][0][entry]) == {of}


# Slots.

EVERY = ["hidden/b", "hidden/w", "v"]
NO_BIAS = ["hidden/w", "v"]
SLOTS = {
    "inject_hyperparams": {"mu": EVERY, "nu": EVERY},
    "schedule": {"trace": EVERY},
    "masked": {"mu": NO_BIAS, "nu": NO_BIAS},
    "multi_transform": {"mu": NO_BIAS, "nu": NO_BIAS, "trace": ["hidden/b"]},
    "multi_steps": {"acc_grads": EVERY, "mu": EVERY, "nu": EVERY},
    "average": {"average": EVERY},
    "by_name": {"mu": ["hidden/w"], "nu": ["hidden/w"]},
    "whole_tree": {"mu": EVERY, "nu": EVERY},
}
MORE = {
    "by_name": lambda: optax.multi_transform(
        {"hidden/w": optax.adam(0.1), "hidden/b": optax.sgd(0.1), "v": optax.set_to_zero()},
        lambda params: {name: name for name in params},
    ),
    "whole_tree": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
}


@pytest.mark.parametrize("optimizer", SLOTS)
def test_slots_are_what_the_state_holds_per_variable(optimizer):
    """Hyperparameters, labels of groups and counters are none; what `optax.masked` left out has none."""
    slots_by_run = []

    def model_fn(features, labels, mode):
        with est.variable_scope("hidden"):
            w, b = est.get_variable("w", (3, 4)), est.get_variable("b", lambda key: {"bias": jnp.zeros(4)})
        v = est.get_variable("v", (4, 1))
        est.get_variable("learning_rate", (), trainable=False)  # also the name of a hyperparameter
        loss = jnp.mean((jnp.tanh(features @ w + b["bias"]) @ v - labels[:, None]) ** 2)
        inner = TowerOptimizer((WRAPPED | MORE)[optimizer]())
        train_op = inner.minimize(loss)
        slots = {
            slot: {name: inner.get_slot(name, slot) for name in EVERY if inner.get_slot(name, slot) is not None}
            for slot in inner.get_slot_names()
        }
        slots_by_run.append({slot: sorted(by_variable) for slot, by_variable in slots.items()})
        for by_variable in slots.values():
            for name, value in by_variable.items():
                variable = {"hidden/w": w, "hidden/b": b, "v": v}[name]
                assert jax.tree.map(jnp.shape, value) == jax.tree.map(jnp.shape, variable)
        assert inner.get_slot("learning_rate", "hyperparams") is None
        assert inner.get_slot("v", "no such slot") is None
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    (x,), (y,) = regression(4, steps=1)
    state = est.transform(replicate(model_fn, 2)).abstract_init(x, y)
    assert slots_by_run == [SLOTS[optimizer]]
    assert set(state.slots) == {"optimizer"}
