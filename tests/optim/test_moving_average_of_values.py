"""Moving averages of values that are no variables, such as losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import ones
from testing.towers import replicate, started

import estimator as est
from replicate import TowerOptimizer

# Its mean over a batch, in steps, is 1, 2, 4, 8 and 16; the rows of a batch, and so the means of towers, differ.
MEANS = [1.0, 2.0, 4.0, 8.0, 16.0]
BATCHES = [mean * np.linspace(0, 2, 8, dtype=np.float32) for mean in MEANS]


def model_of(rate=0.0, decay=0.9, num_updates=None, zero_debias=False):
    def model_fn(features, labels, mode):
        loss = jnp.mean(features) * ones("w")
        ema = est.ExponentialMovingAverage(decay, num_updates and num_updates(), zero_debias, name="avg")
        averages = ema.apply([loss, -loss])
        est.record("average", ema.average(loss))
        assert ema.average(loss + 0) is None
        train_op = est.group(TowerOptimizer(optax.sgd(rate)).minimize(loss), averages)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def averages_of(model_fn):
    """The averages after each of the steps, each of which reads the average of the one before."""
    model, state = started(model_fn, BATCHES[0])
    averages = [0.0]
    for batch in BATCHES:
        state, spec = model.train_step(state, batch)
        np.testing.assert_allclose(spec.reported["average"].value, averages[-1], rtol=1e-6)
        np.testing.assert_allclose(state.variables["value_1/avg"], -state.variables["value/avg"], rtol=1e-6)
        averages.append(float(state.variables["value/avg"]))
    return averages[1:]


# By hand, as tf.train.ExponentialMovingAverage computes it: 0.9 * 0 + 0.1 * 1, 0.9 * 0.1 + 0.1 * 2, ...
PLAIN = [0.1, 0.29, 0.661, 1.3949, 2.85541]
DEBIASED = [0.1 / 0.1, 0.29 / 0.19, 0.661 / 0.271, 1.3949 / 0.3439, 2.85541 / 0.40951]


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "zero_debias", "want"), [(0, True, DEBIASED), (4, False, PLAIN)])
def test_the_average_of_a_loss_is_tensorflows_on_any_number_of_towers(towers, zero_debias, want):
    np.testing.assert_allclose(averages_of(replicate(model_of(zero_debias=zero_debias), towers)), want, rtol=2e-6)


def test_num_updates_makes_it_faster_in_the_beginning():
    want = [0.0]
    for step, mean in enumerate(MEANS):
        decay = min(0.2, (1 + step) / (10 + step))
        want.append(decay * want[-1] + (1 - decay) * mean)
    model_fn = model_of(decay=0.2, num_updates=est.global_step)
    np.testing.assert_allclose(averages_of(replicate(model_fn, 4)), want[1:], rtol=2e-6)


def test_a_debiased_average_of_a_constant_is_that_constant():
    def model_fn(features, labels, mode):
        train_op = est.ExponentialMovingAverage(0.9999, zero_debias=True).apply([jnp.mean(features)])
        return est.EstimatorSpec(mode, loss=jnp.mean(features), train_op=train_op)

    model, state = started(model_fn, np.full(4, 1.9, np.float32))
    for _ in range(3):
        state, _ = model.train_step(state, np.full(4, 1.9, np.float32))
        np.testing.assert_allclose(state.variables["value/ExponentialMovingAverage"], 1.9, rtol=1e-6)


def test_a_skipped_step_leaves_it_as_it_is():
    model, state = started(replicate(model_of(zero_debias=True), 2, on_nan="skip"), BATCHES[0])
    for batch in [*BATCHES[:3], np.full(8, np.nan, np.float32), *BATCHES[3:]]:
        state, _ = model.train_step(state, batch)
    assert est.skipped_steps(state) == 1
    np.testing.assert_allclose(state.variables["value/avg"], DEBIASED[-1], rtol=2e-6)


@pytest.mark.slow
def test_it_continues_from_a_checkpoint_and_evaluation_reads_it(tmp_path):
    def estimator():
        return est.Estimator(replicate(model_of(zero_debias=True), 4), tmp_path)

    estimator().train(lambda: BATCHES[:2])
    estimator().train(lambda: BATCHES[2:])
    np.testing.assert_allclose(estimator().get_variable_value("value/avg"), DEBIASED[-1], rtol=2e-6)
    state = estimator().get_variable_value(["w", "value/avg/local_step"])
    assert state["value/avg/local_step"] == 5
    model, state = started(replicate(model_of(zero_debias=True), 4), BATCHES[0])
    state, _ = model.train_step(state, BATCHES[2])
    for rows in (8, 7):  # of which seven do not divide by the towers
        spec = model.eval_step(state, BATCHES[0][:rows])
        np.testing.assert_allclose(spec.reported["average"].value, MEANS[2], rtol=1e-6)


def test_names_go_by_the_order_in_each_scope_and_names_of_variables_may_stand_beside():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", ())
        ema = est.ExponentialMovingAverage(0.5, name="avg")
        loss = jnp.mean(features) * w
        with est.variable_scope("a"):
            first = ema.apply([loss, "w"])
        second = ema.apply([loss * 2, loss.astype(jnp.bfloat16)])
        assert ema.average(loss).shape == ema.average("w").shape == ()
        train_op = est.group(est.Optimizer(optax.sgd(0.1)).minimize(loss), first, second)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    variables = started(model_fn, BATCHES[0])[1].variables
    assert set(variables) == {"w", "w/avg", "a/value/avg", "value/avg", "value_1/avg"}
    assert variables["value_1/avg"].dtype == jnp.float32


def apply(*calls):
    ema = est.ExponentialMovingAverage(0.9)
    for values in calls:
        ema.apply(values)


REFUSED = {
    ValueError: [(lambda x, w: apply([x], [x]), "got a value that has an average already.* Call `apply` once")],
    TypeError: [
        (lambda x, w: apply(x), r"or of values, such as `\[loss\]`; got "),
        (lambda x, w: apply([w]), "needs the name of a variable; got the value of 'w'"),
        (lambda x, w: apply([x > 0]), "got a value of bool, which has no average"),
    ],
}


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_invalid_values_are_errors(error, call, message):
    def model_fn(features, labels, mode):
        call(features, est.get_variable("w", ()))
        return est.EstimatorSpec(mode, predictions=features)

    with pytest.raises(error, match=message):
        est.transform(model_fn).init(jax.random.key(0), BATCHES[0], mode="infer")
