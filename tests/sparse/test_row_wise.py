"""The transformations that are given touched rows only: the rule agrees with what they do to a small table."""

import jax
import jax.numpy as jnp
import optax
import pytest
from testing.row_wise_probe import Probe, Rule

import estimator as est
from estimator.optim._given_rate import with_learning_rate
from estimator.optim._row_wise import RowRule, row_rule
from estimator.optim._sparse_update import takes_rows


def every_second(step):
    return step % 2 == 0


# By our rule and the probe's.
TRANSFORMATIONS = {
    (RowRule.OWN_GRADIENT, Rule.EXACT): {
        "sgd": optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
        "clipped": optax.chain(optax.clip(1.0), optax.zero_nans(), optax.contrib.reduce_on_plateau(), optax.sgd(0.1)),
        "named": optax.named_chain(("mean", optax.centralize()), ("sgd", optax.sgd(0.1))),
        "labelled": optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, {"words": "a", "w": "b"}),
        "by a function": optax.partition(
            {"words": optax.sgd(0.1), "w": optax.adam(0.1)}, lambda params: {name: name for name in params}
        ),
        "masked": optax.chain(optax.masked(optax.scale_by_adam(), {"words": False, "w": True}), optax.sgd(0.1)),
        "frozen": optax.freeze({"words": True, "w": False}),
        "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
        "sometimes": optax.conditionally_mask(optax.adagrad(0.1), every_second),
        "norm": optax.chain(optax.clip_by_global_norm(1e6), est.clip_by_global_norm(1e3), optax.sgd(0.1)),
        "else as it is": optax.conditionally_transform(optax.adagrad(0.1), every_second),
    },
    (RowRule.OWN_GRADIENT, Rule.MOMENTUM): {
        "momentum": optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(0.1), momentum=0.9, nesterov=True),
    },
    (RowRule.ANY_STEP, Rule.MOMENTUM): {
        "schedule_free": optax.contrib.schedule_free_sgd(),
    },
    (RowRule.ANY_STEP, Rule.ROW_WISE): {
        "adam": optax.adam(0.1),
        "decay": optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9)),
        "late": optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(lambda step: jnp.where(step > 500, 0.1, 0.0))),
        "multi_steps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        "adagrad of momentum": optax.chain(optax.trace(0.9), optax.adagrad(0.1)),
        "schedule_free_adamw": optax.contrib.schedule_free_adamw(),
    },
    (RowRule.WHOLE_TABLE, Rule.WHOLE): {
        "norm of momentum": optax.chain(optax.trace(0.9), optax.normalize_by_update_norm()),
        "clipped by a mean": optax.chain(optax.clip_by_block_rms(1e6), optax.sgd(0.1)),
    },
}  # fmt: skip
CASES = [(*rules, name) for rules, named in TRANSFORMATIONS.items() for name in named]
PARAMS = {"words": jnp.zeros((200, 128)), "w": jnp.zeros(2)}


def rule_of(transformation, params=PARAMS):
    return row_rule(transformation, ["words"], transformation.init(params), params)


@pytest.mark.slow
@pytest.mark.parametrize("rule, tried, name", CASES)
def test_the_rule_knows_what_an_optimizer_does_to_a_row(rule, tried, name):
    transformation = TRANSFORMATIONS[rule, tried][name]
    assert rule_of(transformation) is rule
    assert Probe(transformation).rule() is tried


EXCEPTIONS = {
    "dog": "as scale_by_dog",
    "dowg": "as scale_by_dog",
    "momo_adam": "as momo",
    "prodigy": "as momo",
    "scale_by_distance_over_gradients": "as scale_by_dog",
    "add_decayed_weights": "of 0, by default",
    "conditionally_mask": "needs a function",
    "conditionally_transform": "needs a function",
    "flatten": "nothing to see where there are no slots",
    "keep_params_nonnegative": "changes only a row that was negative",
    "measure_with_ema": "needs a function",
    "mechanize": "sums over all variables are too small at first to be seen",
    "scale_by_cocob": "a row without a gradient moves, and its slots stay",
    "scale_by_factored_rms": "small tables are not factored",
    "scale_by_madgrad": "a row without a gradient moves, and its slots stay",
    "scale_by_schedule": "needs a function",
    "schedule_free": "what is evaluated is an average of all steps, in which rows that stay would weigh more",
    "schedule_free_sgd": "as schedule_free",
    "snapshot": "needs a function",
    "split_real_and_imaginary": "needs a transformation",
    "stateless": "needs a function",
    "stateless_with_tree_map": "needs a function",
}


def is_chain(module, name):
    """Whether it is an optimizer made of transformations that are public themselves, as adam is of scale_by_adam."""
    return hasattr(module, f"scale_by_{name}") or getattr(module, name).__module__ == optax.sgd.__module__


def public():
    """What optax offers, but for chains of it, from a few arguments that fit; its wrappers are around sgd."""
    sgd, transformations = optax.sgd(0.1), {}
    for module in (optax, optax.contrib):
        for name in filter(lambda name: callable(getattr(module, name)) and not is_chain(module, name), dir(module)):
            for args in ((), (0.1,), (0.1, 0.1), (sgd,), (sgd, 3)):
                try:
                    transformation = getattr(module, name)(*args)
                    jax.eval_shape(transformation.init, PARAMS)
                except Exception:
                    continue
                transformations[name] = transformation
                break
    return {name: t for name, t in transformations.items() if name not in EXCEPTIONS}


PUBLIC = public()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_the_rule_is_right_about_all_that_optax_has(name):
    try:
        rule = rule_of(PUBLIC[name])
    except (TypeError, ValueError):
        return  # its update needs other arguments than the ones that it was made of here
    try:
        tried = Probe(PUBLIC[name]).rule()
    except (TypeError, ValueError):  # what does not take a part of the rows is not row-wise
        tried = Rule.WHOLE
    assert (rule is RowRule.OWN_GRADIENT) == (tried in (Rule.EXACT, Rule.MOMENTUM))
    assert (rule is RowRule.WHOLE_TABLE) == (tried is Rule.WHOLE)


@pytest.mark.parametrize("transformation", [optax.scale_by_factored_rms(), optax.flatten(optax.trace(0.9))])
def test_slots_that_cannot_be_cut_by_rows(transformation):
    assert rule_of(transformation) is RowRule.WHOLE_TABLE


def by_hand(update):
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (update(updates), state))


def divide_by_rows(updates):
    return jax.tree.map(lambda x: x / x.shape[0], updates)


def add_noise(updates):
    return jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), updates)


def sum_below(updates):
    return jax.tree.map(lambda x: jnp.cumsum(x, axis=0), updates)


def center_columns(updates):
    return {**updates, "words": updates["words"] - updates["words"].max(0)}


def scale_columns(updates):
    return {**updates, "words": updates["words"] * jnp.arange(128.0)}


def scale_by_largest_of_each_row(updates):
    return {**updates, "words": updates["words"] / (1 + jnp.abs(updates["words"]).max(1, keepdims=True))}


OWN = {
    scale_columns: RowRule.OWN_GRADIENT,
    scale_by_largest_of_each_row: RowRule.OWN_GRADIENT,
    lambda updates: updates: RowRule.OWN_GRADIENT,
    lambda updates: jax.tree.map(lambda x: x + 1e-3, updates): RowRule.ANY_STEP,
    divide_by_rows: RowRule.WHOLE_TABLE,
    add_noise: RowRule.WHOLE_TABLE,
    sum_below: RowRule.WHOLE_TABLE,
    center_columns: RowRule.WHOLE_TABLE,
}


@pytest.mark.parametrize("update", OWN)
def test_a_transformation_of_ones_own_is_known_by_what_it_computes(update):
    for transformation in (by_hand(update), optax.chain(optax.stateless(lambda u, p: update(u)), optax.sgd(0.1))):
        assert rule_of(transformation) is OWN[update]


@pytest.mark.parametrize("make, rule", [(optax.sgd, RowRule.OWN_GRADIENT), (optax.adamw, RowRule.ANY_STEP)])
def test_a_rate_that_is_given_apart_is_any_number(make, rule):
    decay = optax.add_decayed_weights(1e-4)
    assert rule_of(with_learning_rate("", make, 0.0)) is rule  # not the one that it happens to be
    assert rule_of(with_learning_rate("", lambda rate: optax.chain(decay, make(rate)), 0.0)) is RowRule.ANY_STEP


def test_another_variable_may_not_depend_on_the_rows():
    def mix(updates):
        return {**updates, "w": updates["w"] * updates["words"].mean()}

    assert rule_of(by_hand(mix)) is RowRule.WHOLE_TABLE


def test_two_tables_of_one_shape_are_not_one():
    params = {"words": jnp.zeros((4, 2)), "tags": jnp.zeros((4, 2))}
    swap = by_hand(lambda updates: {"words": updates["tags"], "tags": updates["words"]})
    assert row_rule(optax.sgd(0.1), ["words", "tags"], optax.sgd(0.1).init(params), params) is RowRule.OWN_GRADIENT
    assert row_rule(swap, ["words", "tags"], (), params) is RowRule.WHOLE_TABLE


def test_lazy_takes_a_transformation_of_ones_own_where_it_is_row_wise():
    for part in (by_hand(scale_columns), optax.stateless(lambda u, p: u), est.clip_by_global_norm(1.0)):
        optimizer = est.lazy(optax.chain(part, optax.adam(0.1)))
        assert takes_rows(optimizer, "mine", ["words"], optimizer.init(PARAMS), PARAMS)
    optimizer = est.lazy(optax.chain(by_hand(center_columns), optax.adam(0.1)))
    with pytest.raises(ValueError, match="`est.lazy` needs a row-wise transformation"):
        takes_rows(optimizer, "mine", ["words"], optimizer.init(PARAMS), PARAMS)
