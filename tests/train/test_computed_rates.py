"""A learning rate that a model_fn computes: for optimizers, summaries and arithmetic, alone and on towers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import started

import estimator as est
from replicate import BlockSync, TowerOptimizer, VariableDistribution, replicate_model_fn

# A ported program: a decay, a warm-up by hand as in BERT, a summary of the rate.

STEPS, X = 5, np.arange(8, dtype=np.float32)


def rate_of(step):
    rate = est.train.exponential_decay(0.1, step, 2, 0.5)
    is_warmup = jnp.asarray(step < 2, jnp.float32)
    return (1.0 - is_warmup) * rate + is_warmup * 0.1 * jnp.asarray(step, jnp.float32) / 2


OPTIMIZERS = {
    "est.train": lambda rate: est.train.MomentumOptimizer(rate, 0.9),
    "optax": lambda rate: est.Optimizer(optax.adam, learning_rate=rate),
}


def model_fn_with(optimizer, wrap=TowerOptimizer):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        rate = rate_of(est.train.get_global_step())
        est.summary.scalar("rate", rate)
        loss = jnp.mean((w * features - labels) ** 2)
        train_op = wrap(optimizer(rate)).minimize(loss, est.train.get_or_create_global_step())
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def trained(model_fn):
    """The values of the variable after each step, and the learning rates of the steps."""
    model, state = started(model_fn, X, X / 2)
    values, rates = [], []
    for _ in range(STEPS):
        state, spec = model.train_step(state, X, X / 2)
        values.append(float(np.ravel(state.variables["w"])[0]))
        rates.append(*spec.train_op.learning_rates.values())
    assert list(est.learning_rates(state).values()) == [np.float32(rates[-1])]
    return np.array(values), np.array(rates)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def optimizer(request):
    """An optimizer, and what it does with the rate as a function of the step on one device."""
    make = OPTIMIZERS[request.param]
    return make, *trained(model_fn_with(lambda _: make(rate_of), lambda o: o))


FOUR, MODES = {"devices": [f"cpu:{i}" for i in range(4)]}, VariableDistribution
WAYS = {
    "four": FOUR,
    "sharded": {**FOUR, "variable_distribution": MODES.SHARDED},
    "server": {**FOUR, "variable_distribution": MODES.SHARED_LOCAL_PARAMETER_SERVER},
    "round robin": {**FOUR, "variable_distribution": MODES.SHARED_ROUND_ROBIN},
    "blocks": {**FOUR, "block_sync": BlockSync(block_steps=1, outer_optimizer=optax.sgd(1.0))},
    "micro-batches": {"devices": ["cpu:0", "cpu:1"]},
}


@pytest.mark.slow
@pytest.mark.covers("12 equality")
@pytest.mark.parametrize(
    ("optimizer", "way"),
    [
        *(("est.train", way) for way in ("sharded", "blocks", "micro-batches")),
        *(("optax", way) for way in ("four", "server", "round robin")),
    ],
    indirect=["optimizer"],
)
def test_a_rate_computed_in_towers_is_the_rate_of_the_step(optimizer, way):
    make, values, rates = optimizer
    parts = 2 if way == "micro-batches" else 1
    model_fn = model_fn_with(make, lambda o: TowerOptimizer(o, accumulate_steps=parts))
    got = trained(replicate_model_fn(model_fn, **WAYS[way]))
    if way == "blocks":  # each tower has an optimizer of its own
        np.testing.assert_allclose(got[1], rates, rtol=1e-6)
    else:
        np.testing.assert_allclose(got, (values, rates), rtol=1e-5)
    np.testing.assert_allclose(rates[:4], [0, 0.05, 0.05, 0.1 * 0.5**1.5], rtol=1e-6)


@pytest.mark.quick
def test_a_rate_computed_without_towers(optimizer):
    make, values, rates = optimizer
    np.testing.assert_allclose(trained(model_fn_with(make, lambda o: o)), (values, rates), rtol=1e-6)


def test_the_mean_of_different_rates_counts():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        train_op = TowerOptimizer(optax.sgd, learning_rate=features.mean()).minimize(w * 1.0)
        return est.EstimatorSpec(mode, loss=w, train_op=train_op)

    model = est.transform(replicate_model_fn(model_fn, devices=["cpu:0", "cpu:1"]))
    x = np.float32([0.1, 0.3])
    state, _ = model.train_step(model.init(jax.random.key(0), x), x)
    np.testing.assert_allclose(state.variables["w"], 0.8, rtol=1e-6)


def test_a_summary_and_the_log_have_the_rate(tmp_path):
    estimator = est.Estimator(
        model_fn_with(OPTIMIZERS["est.train"]), str(tmp_path), est.RunConfig(save_summary_steps=1)
    )
    estimator.train(lambda: [(X, X / 2)] * 3)
    assert estimator.get_learning_rates() == {"Momentum": pytest.approx(0.05)}
    assert est.read_history(str(tmp_path))[-1]["learning_rate"] == pytest.approx(0.05)


def test_a_number_that_the_program_changes_counts_from_the_next_start_on(tmp_path):
    def estimator(rate):
        return est.Estimator(model_fn_with(lambda _: est.train.AdamOptimizer(rate), lambda o: o), str(tmp_path))

    estimator(0.5).train(lambda: [(X, X / 2)])
    later = estimator(0.25).train(lambda: [(X, X / 2)])
    assert later.get_learning_rates() == {"Adam": 0.25}


def test_set_learning_rate_says_that_the_program_gives_the_rate():
    model, state = started(model_fn_with(lambda _: est.train.AdamOptimizer(0.1), lambda o: o), X, X / 2)
    with pytest.raises(ValueError, match="which the program gives in each step. Write"):
        est.set_learning_rate(state, "Adam", 0.2)


@pytest.mark.parametrize("rate", ["0.1", jnp.ones(2)])
def test_what_is_no_learning_rate(rate):
    with pytest.raises(TypeError, match="`AdamOptimizer` needs a number as learning_rate"):
        est.train.AdamOptimizer(rate)


def test_a_learning_rate_needs_a_function_of_it():
    with pytest.raises(TypeError, match="`TowerOptimizer` got a learning_rate, and needs a function of it such as"):
        TowerOptimizer(optax.adam(0.1), learning_rate=0.2)
    with pytest.raises(ValueError, match="`TowerOptimizer` got a learning_rate for the optimizer 'Adam', which has"):
        TowerOptimizer(est.train.AdamOptimizer(0.1), learning_rate=0.2)
