"""Which of optax's transformations are given touched rows only: the registry agrees with what they do to a table."""

import jax
import jax.numpy as jnp
import optax
import pytest
from testing.row_wise_probe import Probe, Rule

import estimator as est
from estimator.optim._parts import maker, parts
from estimator.optim._row_wise import _OWN_GRADIENT, _WHOLE_TABLE, _WRAPPERS, RowRule, has_unknown_parts, row_rule
from estimator.optim._sparse_update import takes_rows


def every_second(step):
    return step % 2 == 0


# By the registry's rule and the probe's.
TRANSFORMATIONS = {
    (RowRule.OWN_GRADIENT, Rule.EXACT): {
        "sgd": optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
        "adagrad": optax.inject_hyperparams(optax.adagrad)(0.1),
        "sign_sgd": optax.sign_sgd(0.1),
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
        "else as it is": optax.conditionally_transform(optax.adagrad(0.1), every_second),
    },
    (RowRule.OWN_GRADIENT, Rule.MOMENTUM): {
        "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
        "momentum of adagrad": optax.chain(optax.scale_by_rss(), optax.sgd(0.1, momentum=0.9)),
        "injected": optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(0.1), momentum=0.9),
    },
    (RowRule.ANY_STEP, Rule.MOMENTUM): {
        "schedule_free": optax.contrib.schedule_free_sgd(),
    },
    (RowRule.ANY_STEP, Rule.ROW_WISE): {
        "adam": optax.adam(0.1),
        "rmsprop": optax.rmsprop(0.1),
        "decay": optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9)),
        "late": optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(lambda step: jnp.where(step > 500, 0.1, 0.0))),
        "multi_steps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        "adagrad of momentum": optax.chain(optax.trace(0.9), optax.adagrad(0.1)),
        "schedule_free_adamw": optax.contrib.schedule_free_adamw(),
    },
    (RowRule.WHOLE_TABLE, Rule.WHOLE): {
        "clipped": optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)),
        "clipped in steps": optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)), 2),
    },
}  # fmt: skip
CASES = [(*rules, name) for rules, named in TRANSFORMATIONS.items() for name in named]
PARAMS = {"words": jnp.zeros((200, 128)), "w": jnp.zeros(2)}


def registered(transformation, params=PARAMS):
    return row_rule(transformation, ["words"], transformation.init(params), params)


@pytest.mark.slow
@pytest.mark.parametrize("rule, tried, name", CASES)
def test_the_registry_knows_what_an_optimizer_does_to_a_row(rule, tried, name):
    transformation = TRANSFORMATIONS[rule, tried][name]
    assert registered(transformation) is rule
    assert Probe(transformation).rule() is tried


EXCEPTIONS = {
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


def public():
    """What optax offers, but for chains of it, from a few arguments that fit; its wrappers are around sgd."""
    sgd, transformations = optax.sgd(0.1), {}
    for module in (optax, optax.contrib):
        for name in dir(module):
            for args in ((), (0.1,), (0.1, 0.1), (sgd,), (sgd, 3)):
                try:
                    transformation = getattr(module, name)(*args)
                    jax.eval_shape(transformation.init, PARAMS)
                except Exception:
                    continue
                transformations[name] = transformation
                break
    return {name: t for name, t in transformations.items() if maker(t) != "chain" and name not in EXCEPTIONS}


PUBLIC = public()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_the_registry_is_right_about_all_that_optax_has(name):
    try:
        tried = Probe(PUBLIC[name]).rule()
    except (AttributeError, TypeError, ValueError):  # what does not take a part of the rows is not row-wise
        tried = Rule.WHOLE
    rule = registered(PUBLIC[name])
    assert (rule is RowRule.OWN_GRADIENT) == (tried in (Rule.EXACT, Rule.MOMENTUM))
    assert (rule is RowRule.WHOLE_TABLE) == (tried is Rule.WHOLE)


def test_every_name_in_the_registry_is_one_of_optax():
    public = {*dir(optax), *dir(optax.contrib)}
    inner = {"scale_by_dog", "scale_by_dowg"}  # of functions that are public
    assert public | inner >= _OWN_GRADIENT | _WRAPPERS | _WHOLE_TABLE


@pytest.mark.parametrize("transformation", [optax.scale_by_factored_rms(), optax.flatten(optax.trace(0.9))])
def test_slots_that_cannot_be_cut_by_rows(transformation):
    assert registered(transformation) is RowRule.WHOLE_TABLE


def test_a_transformation_of_ones_own_is_not_known():
    own = optax.stateless(lambda gradients, params: gradients)
    by_hand = optax.GradientTransformation(lambda params: (), lambda gradients, state, params=None: (gradients, state))
    for transformation in (own, by_hand, optax.chain(optax.sgd(0.1), by_hand)):
        assert registered(transformation) is RowRule.ANY_STEP
    assert maker(by_hand) == "" and parts(by_hand) == []


def test_a_chain_that_cannot_be_looked_into_is_not_known():
    chain = optax.chain(optax.sgd(0.1), optax.clip_by_global_norm(1.0))

    def update_fn(updates, state, params=None):
        return chain.update(updates, state, params)

    update_fn.__module__, update_fn.__qualname__ = "optax.other", "chain.<locals>.update_fn"
    other = optax.GradientTransformation(chain.init, update_fn)
    assert registered(other) is RowRule.ANY_STEP
    assert has_unknown_parts(other, ["words"], PARAMS)


BY_HAND = optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    "part, warns", [(BY_HAND, True), (optax.stateless(lambda u, p: u), True), (optax.scale(2), False)]
)
def test_lazy_warns_of_a_part_that_is_not_of_optax(part, warns, caplog):
    optimizer = est.lazy(optax.chain(part, optax.adam(0.1)))
    assert takes_rows(optimizer, "mine", ["words"], optimizer.init(PARAMS), PARAMS)
    assert ("`est.lazy` gives the optimizer 'mine' only the looked-up rows of ['words']" in caplog.text) == warns
