"""What `estimator.testing` gives to tests of a user's own models. Its `simulate_devices` is run by an example."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing.towers import regression

import estimator as est
from estimator.testing import assert_towers_match_one_batch, simulate_devices
from replicate import TOWER_AXIS, TowerOptimizer, VariableDistribution, replicate_model_fn

X, Y = (batch[0] for batch in regression(8, steps=1))
SUMS = functools.partial(replicate_model_fn, loss_reduction=est.Reduction.SUM)


def match(model_fn, features=X, labels=Y, replicate=replicate_model_fn, **options):
    assert_towers_match_one_batch(model_fn, features, labels, replicate=replicate, **options)


def model(optimizer=None, loss=jnp.mean, outputs=lambda output: output, metric=lambda output: est.metrics.mean(output)):
    """A linear model_fn, whose parts may be replaced by wrong ones."""

    def model_fn(features, labels, mode):
        with est.variable_scope("linear"):
            output = features @ est.get_variable("w", (3,))
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": outputs(output)})
        value = loss((output - labels) ** 2)
        train_op = TowerOptimizer(optimizer or optax.sgd(0.01)).minimize(value)
        return est.EstimatorSpec(mode, loss=value, train_op=train_op, eval_metric_ops={"m": metric(output)})

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize("distribution", VariableDistribution)
def test_a_right_model_fn_passes_wherever_its_variables_are(distribution):
    replicate = functools.partial(replicate_model_fn, variable_distribution=distribution)
    match(model(optax.adam(0.1, eps=1e-3)), replicate=replicate, towers=[2])


@pytest.mark.slow
def test_a_sum_passes_as_a_sum_with_any_towers():
    match(model(loss=jnp.sum), replicate=SUMS, towers=range(1, 9, 7), steps=1)


@pytest.mark.slow
def test_a_model_fn_may_name_the_axis_of_the_towers():
    match(model(loss=lambda losses: jax.lax.pmean(losses.mean(), TOWER_AXIS)), towers=[2], steps=1)


@pytest.mark.slow
def test_features_may_be_sparse():
    match(model(), BCOO.fromdense(jnp.asarray(X)), towers=[2], steps=1)


def test_a_loss_reduction_that_is_not_the_loss_s_is_named_with_both_losses():
    with pytest.raises(AssertionError) as caught:
        match(model(loss=jnp.sum))
    head, loss, hint = str(caught.value).splitlines()
    assert head == "2 towers differ from one in training step 1:"
    in_towers, in_one = map(float, re.fullmatch(r"  the loss: (\S+) in 2 towers, (\S+) in one", loss).groups())
    assert in_towers == pytest.approx(in_one / 2)
    assert hint.startswith("Is the loss a mean over examples, as the loss_reduction says by default, or a sum")


@pytest.mark.slow
def test_statistics_of_a_tower_s_rows_are_named_by_variable_and_number_of_towers():
    def model_fn(features, labels, mode):
        with est.variable_scope("norm"):
            est.get_variable("largest", (), initializer=jax.nn.initializers.zeros, trainable=False)
            if mode == est.ModeKeys.TRAIN:
                est.assign("largest", features[:, 0].max())
        return model()(features, labels, mode)

    x = np.repeat(np.arange(4, dtype=np.float32)[[0, 3, 2, 3]], 2)[:, None] * np.ones(3, np.float32)
    match(model_fn, x / 3, towers=[2])  # in each half there is a 3
    with pytest.raises(AssertionError) as caught:
        match(model_fn, x / 3)
    head, variable, hint = str(caught.value).splitlines()
    assert head == "4 towers differ from one in training step 1:"
    assert re.fullmatch(r"  the variable 'norm/largest': 0\.6\d+ in 4 towers, 1\.0 in one", variable)
    assert hint.endswith("as in a batch norm, needs `cross_tower_mean`.")


@pytest.mark.slow
def test_a_metric_that_is_the_mean_of_means_is_named_where_rows_remain():
    with pytest.raises(AssertionError, match=r"2 .* in the evaluation of 7 rows:\n  the metric 'm': \S+ in 2 towers, "):
        match(model(metric=lambda output: est.metrics.mean(output.mean())))


@pytest.mark.slow
def test_predictions_that_depend_on_the_other_rows_are_named_with_the_worst_of_them():
    with pytest.raises(AssertionError) as caught:
        match(model(outputs=lambda output: output - output.mean()), towers=[4])
    head, prediction, _ = str(caught.value).splitlines()
    assert head == "4 towers differ from one in the prediction of 8 rows:"
    line = r"  the prediction 'output': \S+ in 4 towers, \S+ in one \(at \[\d\]; 8 of 8 differ\)"
    assert re.fullmatch(line, prediction)


def test_too_few_devices_are_an_error_that_names_what_to_call():
    with pytest.raises(
        ValueError, match=r"16 towers need as many .*has 8\. Call `estimator.testing.simulate_devices\(16"
    ):
        match(model(), towers=[2, 16])


@pytest.mark.parametrize("n", [0, True, 2.0])
def test_a_number_of_devices_that_cannot_be_is_an_error(n):
    with pytest.raises(ValueError, match="takes a positive int"):
        simulate_devices(n)


def test_once_jax_has_started_its_devices_are_what_they_are():
    assert len(jax.devices("cpu")) == 8
    simulate_devices(8)
    with pytest.raises(RuntimeError, match=r"simulate_devices\(4\) was called after jax had started with 8 CPU device"):
        simulate_devices(4)
