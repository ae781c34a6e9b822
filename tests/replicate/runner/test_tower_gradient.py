"""Gradients that a model_fn takes by itself, in towers and micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import ones
from testing.towers import FOUR, REDUCTIONS, assert_close, cpus, one_step, reduced, regression, replicate

import estimator as est
from replicate import BlockSync, TowerOptimizer, replicate_model_fn

REFUSED = (
    r"`TowerOptimizer\.apply_gradients` got gradients for \['w'\] that no `compute_gradients` of this run returned\. "
    r".* scaled as the loss is, by {scale}\. .*`compute_gradients\(loss\)`, or give `est\.tower_gradient\(gradient\)`"
)


def own_gradient(w, features, reduction="mean"):
    return jax.value_and_grad(lambda w: reduced((w * features) ** 2, reduction))(w)


def model_fn_with(take, reduction="mean", optimizer=lambda: TowerOptimizer(optax.sgd(0.01))):
    """w is trained by what `take(optimizer, loss, gradient)` returns."""

    def model_fn(features, labels, mode):
        loss, gradient = own_gradient(ones("w"), features, reduction)
        made = optimizer()
        return est.EstimatorSpec(mode, loss=loss, train_op=made.apply_gradients(take(made, loss, gradient)))

    return model_fn


def by_hand(optimizer, loss, gradient):
    return [(gradient, "w")]


def said(optimizer, loss, gradient):
    return [(est.tower_gradient(gradient), "w")]


def trained(model_fn, batch=FOUR):
    return one_step(model_fn, batch)[0].variables["w"]


@pytest.mark.quick
@pytest.mark.covers("12 gradients")
@pytest.mark.parametrize(("towers", "reduction"), [(4, "mean"), (2, "sum")])
def test_a_gradient_of_ones_own_counts_as_in_one_big_batch(towers, reduction):
    want = trained(model_fn_with(by_hand, reduction))
    np.testing.assert_allclose(
        trained(replicate(model_fn_with(said, reduction), towers, reduction)), want, rtol=1e-6, atol=1e-6
    )


def test_one_that_nothing_says_is_scaled_is_refused():
    with pytest.raises(ValueError, match=REFUSED.format(scale=0.25)):
        trained(replicate(model_fn_with(by_hand), 4))


@pytest.mark.parametrize(("towers", "take"), [(0, said), (1, by_hand)])
def test_without_several_towers_it_is_the_gradient_itself(towers, take):
    got = trained(replicate(model_fn_with(take), towers))
    np.testing.assert_allclose(got, 1 - 0.01 * 2 * np.mean(FOUR**2), rtol=1e-6)


def test_where_the_loss_is_a_sum_nothing_is_to_be_scaled():
    assert_close(trained(replicate(model_fn_with(by_hand, "sum"), 2, "sum")), trained(model_fn_with(by_hand, "sum")))


@pytest.mark.quick
def test_micro_batches_are_as_towers():
    def optimizer():
        return TowerOptimizer(optax.sgd(0.01), accumulate_steps=2)

    got = trained(replicate(model_fn_with(said, optimizer=optimizer), 2))
    np.testing.assert_allclose(got, trained(model_fn_with(by_hand)), rtol=1e-6)
    with pytest.raises(ValueError, match=REFUSED.format(scale="0.5")):
        trained(replicate(model_fn_with(by_hand, optimizer=optimizer), 2))


@pytest.mark.parametrize("take", [by_hand, said])
def test_a_tower_within_a_block_takes_its_own_gradient_as_it_is(take):
    """Its rows count as the whole batch, so that nothing is to be scaled."""
    model_fn = replicate_model_fn(model_fn_with(take), REDUCTIONS["mean"], cpus(2), block_sync=BlockSync(1))
    np.testing.assert_allclose(trained(model_fn), trained(model_fn_with(by_hand)), rtol=1e-6)


def test_what_compute_gradients_returned_may_be_changed_and_applied_by_another_optimizer():
    def take(optimizer, loss, gradient):
        ((computed, name),) = TowerOptimizer(optax.sgd(1.0), name="other").compute_gradients(loss)
        return [(jnp.clip(2 * computed, -100, 100), name)]

    want = 1 - 0.01 * 2 * 2 * np.mean(FOUR**2)
    np.testing.assert_allclose(trained(replicate(model_fn_with(take), 2)), want, rtol=1e-6)


def test_a_gradient_for_a_variable_that_compute_gradients_left_out_is_refused():
    def model_fn(features, labels, mode):
        v = ones("v")
        loss, gradient = own_gradient(ones("w"), features * v)
        optimizer = TowerOptimizer(optax.sgd(0.01))
        pairs = [*optimizer.compute_gradients(loss, ["v"]), (gradient, "w")]
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    with pytest.raises(ValueError, match=REFUSED.format(scale=0.5)):
        trained(replicate(model_fn, 2))


@pytest.mark.slow
def test_trees_none_and_sparse_gradients():
    (x,), _ = regression(8, steps=1)
    ids = np.arange(8) % 3

    def model_fn(features, labels, mode):
        net = est.get_variable("net", lambda key: {"w": jnp.ones(3), "b": jnp.zeros(())})
        est.get_variable("left", (2,))
        table = ones("table", (3, 2))

        def loss_of(net, rows):
            return jnp.mean((features["x"] @ net["w"] + net["b"] - rows.sum(1)) ** 2)

        loss, (of_net, of_rows) = jax.value_and_grad(loss_of, argnums=(0, 1))(net, table[features["ids"]])
        slices = est.IndexedSlices(of_rows, features["ids"], table.shape)
        pairs = [(est.tower_gradient(of_net), "net"), (None, "left"), (est.tower_gradient(slices), "table")]
        train_op = TowerOptimizer(optax.sgd(0.1)).apply_gradients(pairs)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    batch = {"x": x, "ids": ids.astype(np.int32)}
    plain, wrapped = (est.transform(fn) for fn in (model_fn, replicate(model_fn, 4)))
    state = plain.init(jax.random.key(0), batch)
    assert_close(wrapped.train_step(state, batch)[0].variables, plain.train_step(state, batch)[0].variables)


def test_it_scales_what_evaluation_computes_as_compute_gradients_does():
    def model_fn(features, labels, mode):
        loss, gradient = own_gradient(ones("w"), features)
        ((computed, _),) = TowerOptimizer(optax.sgd(0.01)).compute_gradients(loss)
        equal = est.tower_gradient(gradient) - computed
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops={"equal": est.metrics.mean(equal)})

    model = est.transform(replicate(model_fn, 2))
    spec = model.eval_step(model.init(jax.random.key(0), FOUR, mode="eval"), FOUR)
    np.testing.assert_allclose(spec.eval_metric_ops["equal"].result(), 0, atol=1e-6)


def test_outside_of_a_run():
    with pytest.raises(RuntimeError, match=r"`est\.tower_gradient` must be called inside a model_fn"):
        est.tower_gradient(jnp.ones(2))
