"""TowerOptimizer: one optimizer on the sum of all towers' gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import towers as shared
from testing.model_fns import constant, ones, zeros
from testing.towers import FOUR, one_step, started

import estimator as est
from replicate import TowerOptimizer, num_towers, tower_index

ONES = np.ones((2, 1), np.float32)
replicate = functools.partial(shared.replicate, reduction=est.Reduction.SUM)
MEAN = {"reduction": est.Reduction.MEAN}


# The cases of the original's own tests.


@pytest.mark.parametrize("first", ["minimize", "compute_gradients"])
def test_two_optimizers_on_one_loss(first):
    def model_fn(features, labels, mode):
        c = constant("c", 10.0)
        est.get_variable("count", initializer=0.0, trainable=False)
        est.assign_add("count", 1.0)
        loss = est.losses.absolute_difference(labels, c * features, reduction=est.Reduction.SUM)
        one, other = (TowerOptimizer(optax.sgd(1.0)) for _ in range(2))
        if first == "minimize":
            train_op = one.minimize(loss)
        else:
            train_op = one.apply_gradients(one.compute_gradients(loss))
        train_op = est.group(train_op, other.minimize(loss))
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, spec = one_step(replicate(model_fn, 2), ONES, ONES)
    assert spec.loss == 18.0
    assert state.variables["c"] == 6.0
    assert state.variables["count"] == 2.0
    assert set(state.slots) == {"optimizer", "optimizer_1"}


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "steps"), [(4, 1), (2, 2)])
def test_two_losses_with_disjoint_var_lists(towers, steps):
    def model_fn(features, labels, mode):
        a, b = constant("a", 10.0), constant("b", 5.0)
        first, second = jnp.sum(a * features), jnp.sum(b * features**2 + a)
        train_op = est.group(
            TowerOptimizer(optax.sgd(1.0), "first", accumulate_steps=steps).minimize(first, var_list=["a"]),
            TowerOptimizer(optax.sgd(0.5), "second", accumulate_steps=steps).minimize(second, var_list=["b"]),
        )
        return est.EstimatorSpec(mode, loss=first + second, train_op=train_op)

    state, spec = one_step(replicate(model_fn, towers), FOUR)
    assert spec.loss == 10 * 12 + 5 * 50 + 4 * 10
    assert state.variables["a"] == 10.0 - 12.0
    assert state.variables["b"] == 5.0 - 0.5 * 50.0
    assert set(state.slots) == {"first", "second"}


@pytest.mark.slow
def test_two_different_optimizers_on_overlapping_variables_take_gradients_at_the_same_values():
    def model_fn(features, labels, mode):
        loss = jnp.sum(constant("a", 1.0) ** 2 * features)
        train_op = est.group(
            TowerOptimizer(optax.sgd(0.01)).minimize(loss), TowerOptimizer(optax.sgd(0.02)).minimize(2 * loss)
        )
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, _ = one_step(replicate(model_fn, 2), FOUR)
    np.testing.assert_allclose(state.variables["a"], 1 - 0.01 * 24 - 0.02 * 48, rtol=1e-5)


def test_a_gradient_of_none_leaves_the_variable_as_it_is():
    def model_fn(features, labels, mode):
        c, d = constant("c", 10.0), constant("d", 5.0)
        loss = jnp.sum(c * d * features)
        optimizer = TowerOptimizer(optax.adam(0.5))
        gradients = dict((name, g) for g, name in optimizer.compute_gradients(loss))
        train_op = optimizer.apply_gradients([(gradients["c"], "c"), (None, "d")])
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, _ = one_step(replicate(model_fn, 2), FOUR)
    np.testing.assert_allclose(state.variables["c"], 9.5, rtol=1e-5)
    assert state.variables["d"] == 5.0
    assert set(state.slots["optimizer"][0].mu) == {"c"}


def test_only_gradients_of_none():
    def model_fn(features, labels, mode):
        c = constant("c", 10.0)
        train_op = TowerOptimizer(optax.sgd(0.5)).apply_gradients([(None, "c")])
        return est.EstimatorSpec(mode, loss=jnp.sum(c * features), train_op=train_op)

    with pytest.raises(ValueError, match=r"`TowerOptimizer\.apply_gradients` got None for all of"):
        one_step(replicate(model_fn, 2), FOUR)


def square_model_fn(make_optimizer):
    def model_fn(features, labels, mode):
        loss = jnp.mean((constant("w", 1.0) * features) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=make_optimizer().minimize(loss))

    return model_fn


WRAPPED = {  # by the number of towers
    2: [lambda: optax.adam(0.1), est.Optimizer(optax.adam(0.1)), est.Optimizer(lambda: optax.adam(0.1))],
    1: [est.Optimizer(optax.adam(0.1))],
}


@pytest.mark.slow
@pytest.mark.parametrize("towers", WRAPPED)
@pytest.mark.usefixtures("users_compiler")
def test_every_way_to_give_the_optimizer_trains_alike(towers):
    def trained(make_optimizer):
        return one_step(replicate(square_model_fn(make_optimizer), towers, **MEAN), FOUR)

    want_state, want = trained(lambda: TowerOptimizer(optax.adam(0.1)))
    for given in WRAPPED[towers]:
        state, spec = trained(lambda given=given: TowerOptimizer(given) if towers > 1 else given)
        assert spec.loss == want.loss == 12.5
        jax.tree.map(np.testing.assert_array_equal, state[:2], want_state[:2])
        assert set(state.slots) == {"optimizer"}


def test_the_name_of_a_wrapped_optimizer_is_kept_or_replaced():
    inner = est.Optimizer(optax.sgd(0.1), name="inner")
    assert TowerOptimizer(inner).get_name() == "inner"
    assert TowerOptimizer(inner, name="outer").get_name() == "outer"
    assert TowerOptimizer(TowerOptimizer(inner)).get_name() == "inner"
    assert TowerOptimizer(optax.sgd(0.1)).get_name() == "optimizer"


@pytest.mark.parametrize("wrong", [0.1, None, "adam"])
def test_what_is_no_optimizer(wrong):
    with pytest.raises(TypeError, match=r"`TowerOptimizer` takes an optax\.GradientTransformation"):
        TowerOptimizer(wrong)


def test_a_function_that_returns_no_optimizer():
    model_fn = square_model_fn(lambda: TowerOptimizer(lambda: 0.1))
    message = r"function given to `TowerOptimizer` must return .*; it returned 0\.1"
    with pytest.raises(TypeError, match=message):
        one_step(replicate(model_fn, 2), FOUR)


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_minimize_may_be_called_in_every_mode(mode):
    def model_fn(features, labels, mode):
        w = constant("w", 1.0)
        loss = jnp.mean((w * features) ** 2)
        return est.EstimatorSpec(mode, w * features, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    model, state = started(replicate(model_fn, 2, **MEAN), FOUR, mode=mode)
    assert not state.slots
    step = model.eval_step if mode == "eval" else model.predict_step
    np.testing.assert_array_equal(step(state, FOUR).predictions, FOUR)


def test_the_optax_chain_sees_the_global_gradient():
    """Clipped before the sum, each of two equal gradients would be 1, and the step 2."""
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    model_fn = square_model_fn(lambda: TowerOptimizer(chain))
    state, _ = one_step(replicate(model_fn, 2), np.ones(4, np.float32))
    np.testing.assert_allclose(state.variables["w"], 0.0, atol=1e-6)


def test_the_loss_reaches_optimizers_that_ask_for_its_value():
    transform = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1))
    model_fn = square_model_fn(lambda: TowerOptimizer(transform))
    state, spec = one_step(replicate(model_fn, 4, **MEAN), FOUR)
    np.testing.assert_allclose(state.slots["optimizer"][1].best_value, 12.5, rtol=1e-6)
    assert spec.loss == 12.5


# compute_gradients.


def gradient_model_fn(change=lambda gradient: gradient):
    """Predicts the gradient that each tower got, once per row."""

    def model_fn(features, labels, mode):
        w = constant("w", 1.0)
        optimizer = TowerOptimizer(optax.sgd(1.0))
        loss = jnp.mean(w * features)
        ((gradient, name),) = optimizer.compute_gradients(loss)
        assert name == "w"
        train_op = optimizer.apply_gradients([(change(gradient), name)])
        seen = jnp.broadcast_to(gradient, features.shape)
        return est.EstimatorSpec(mode, {"gradient": seen}, loss, train_op)

    return model_fn


@pytest.mark.parametrize(
    "reduction, want", [("weighted_sum", [1.5, 1.5, 4.5, 4.5]), ("weighted_mean", [0.75, 0.75, 2.25, 2.25])]
)
def test_gradients_are_the_towers_own_of_the_scaled_loss(reduction, want):
    state, spec = one_step(replicate(gradient_model_fn(), 2, reduction=reduction), FOUR)
    np.testing.assert_allclose(spec.predictions["gradient"], want, rtol=1e-6)
    np.testing.assert_allclose(state.variables["w"], 1 - want[0] - want[2], rtol=1e-5)


def test_gradients_changed_by_the_model_fn_are_changed_before_the_sum():
    model_fn = gradient_model_fn(lambda gradient: jnp.minimum(gradient, 1.0))
    state, _ = one_step(replicate(model_fn, 2, **MEAN), FOUR)
    np.testing.assert_allclose(state.variables["w"], 1 - 0.75 - 1.0, rtol=1e-5)


def test_gradients_may_depend_on_the_tower():
    model_fn = gradient_model_fn(lambda g: jnp.where(tower_index() == num_towers() - 1, g, 0.0))
    state, spec = one_step(replicate(model_fn, 2), FOUR)
    np.testing.assert_allclose(state.variables["w"], 1 - spec.predictions["gradient"][-1])


@pytest.mark.quick
def test_compute_gradients_twice_the_second_loss_from_the_first_gradient():
    def model_fn(features, labels, mode):
        w, v = ones("w"), constant("v", 2.0)
        optimizer = TowerOptimizer(optax.sgd(1.0))
        ((dw, _),) = optimizer.compute_gradients(jnp.sum(w**2 * features), ["w"])
        loss = jnp.sum(v * dw * features)
        ((dv, _),) = optimizer.compute_gradients(loss, ["v"])
        predictions = {name: jnp.broadcast_to(g, features.shape) for name, g in [("w", dw), ("v", dv)]}
        return est.EstimatorSpec(mode, predictions, loss, optimizer.apply_gradients([(dw, "w"), (dv, "v")]))

    state, spec = one_step(replicate(model_fn, 2), FOUR)
    totals = FOUR.reshape(2, -1).sum(1)
    dw = 2 * totals
    np.testing.assert_allclose(spec.predictions["w"], np.repeat(dw, 2), rtol=1e-6)
    np.testing.assert_allclose(spec.predictions["v"], np.repeat(dw * totals, 2), rtol=1e-6)
    np.testing.assert_allclose(state.variables["w"], 1 - dw.sum(), rtol=1e-6)
    np.testing.assert_allclose(state.variables["v"], 2 - (dw * totals).sum(), rtol=1e-6)


def test_compute_gradients_next_to_minimize_and_random_draws():
    """The part of the model_fn before `compute_gradients` is run again; nothing of it counts twice."""

    def model_fn(features, labels, mode):
        w = ones("w", (1,))
        est.get_variable("draws", initializer=np.int32(0), trainable=False)
        est.assign_add("draws", 1)
        noise = jax.random.normal(est.make_rng(), features.shape)
        loss = jnp.sum(w * (features + noise))
        optimizer = TowerOptimizer(optax.sgd(1.0))
        ((gradient, _),) = optimizer.compute_gradients(loss)
        late = jax.random.normal(est.make_rng(), features.shape)
        train_op = est.group(
            optimizer.apply_gradients([(gradient, "w")]), TowerOptimizer(optax.sgd(1.0)).minimize(jnp.sum(w * late))
        )
        predictions = {"x": features + noise, "late": late}
        return est.EstimatorSpec(mode, predictions, loss, train_op)

    state, spec = one_step(replicate(model_fn, 2), FOUR)
    total = spec.predictions["x"].sum() + spec.predictions["late"].sum()
    np.testing.assert_allclose(state.variables["w"], 1 - total[None], rtol=1e-5)
    np.testing.assert_allclose(spec.loss, spec.predictions["x"].sum(), rtol=1e-5)
    assert state.variables["draws"] == 2


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "steps"), [(2, 1), (2, 2)])
def test_compute_gradients_of_a_weighted_loss(towers, steps):
    """Its denominator is averaged over towers in the repeated run as in the first."""

    def model_fn(features, labels, mode):
        loss = est.losses.compute_weighted_loss(ones("w") * features, labels)
        optimizer = TowerOptimizer(optax.sgd(1.0), accumulate_steps=steps)
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    weights = np.array([0, 0, 0, 2], np.float32)
    state, spec = one_step(replicate(model_fn, towers, **MEAN), FOUR, weights)
    assert spec.loss == 12.0
    assert state.variables["w"] == -11.0


# Slots.


@pytest.mark.quick
def test_slots_are_those_at_the_start_of_the_step():
    names = []

    def model_fn(features, labels, mode):
        w = constant("w", 1.0)
        zeros("other", (2,))
        loss = jnp.mean(w * features)
        optimizer = TowerOptimizer(optax.adam(0.1))
        train_op = optimizer.minimize(loss, var_list=["w"])
        names.append(optimizer.get_slot_names())
        assert optimizer.get_slot("other", "mu") is None
        assert optimizer.get_slot("w", "momentum") is None
        mu = optimizer.get_slot("w", "mu")
        count, *rest = optimizer.variables()
        assert len(rest) == 2
        predictions = {"mu": jnp.broadcast_to(mu, features.shape), "count": jnp.broadcast_to(count, features.shape)}
        return est.EstimatorSpec(mode, predictions, loss, train_op)

    model, state = started(replicate(model_fn, 2, **MEAN), FOUR)
    state, first = model.train_step(state, FOUR)
    _, second = model.train_step(state, FOUR)
    np.testing.assert_array_equal(first.predictions["mu"], np.zeros(4))
    np.testing.assert_allclose(second.predictions["mu"], np.full(4, 0.1 * 3.0), rtol=1e-5)
    np.testing.assert_array_equal(second.predictions["count"], np.ones(4))
    assert set(map(tuple, names)) == {("mu", "nu")}


def test_slots_of_two_optimizers_have_different_names():
    def model_fn(features, labels, mode):
        a, b = constant("a", 1.0), constant("b", 1.0)
        loss = jnp.sum((a + b) * features)
        one, other = TowerOptimizer(optax.adam(0.1)), TowerOptimizer(optax.sgd(0.1, momentum=0.9))
        train_op = est.group(one.minimize(loss, ["a"]), other.minimize(loss, ["b"]))
        assert one.get_slot_names() == ["mu", "nu"]
        assert other.get_slot_names() == ["trace"]
        assert one.get_slot("b", "mu") is None
        trace = jnp.broadcast_to(other.get_slot("b", "trace"), features.shape)
        return est.EstimatorSpec(mode, trace, loss, train_op)

    model, state = started(replicate(model_fn, 2), FOUR)
    state, _ = model.train_step(state, FOUR)
    _, spec = model.train_step(state, FOUR)
    np.testing.assert_allclose(spec.predictions, np.full(4, 12.0))


def test_the_methods_outside_of_a_run():
    optimizer = TowerOptimizer(optax.adam(0.1))
    loss = jnp.float32(1)
    calls = {"minimize": [loss], "compute_gradients": [loss], "apply_gradients": [[(loss, "w")]], "variables": []}
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError, match=rf"`TowerOptimizer\.{name}` must be called inside a model_fn"):
            getattr(optimizer, name)(*arguments)
