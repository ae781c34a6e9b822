"""Optimizers that want more than gradients: they do what the loop written by hand does, on any number of towers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import ones
from testing.towers import FOUR, assert_close, one_step, reduced, regression, replicate

import estimator as est
from estimator.core._train_op import TrainOp, Update
from estimator.optim._apply_updates import StepGradients, apply_step
from replicate import TowerOptimizer

STEPS = 3
SHAPES = {"w": (3, 2), "v": (2,)}


def sam(rate=0.1, **settings):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(rate), adversary, **settings)


def line_search():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True)
    return optax.chain(optax.sgd(3.0), search)


# The extra arguments of each optimizer, as optax's documentation calls them.
OPTIMIZERS = {
    "polyak": (optax.polyak_sgd, ["value"]),
    "multi_steps": (lambda: optax.MultiSteps(optax.polyak_sgd(), 2), ["value"]),
    "lbfgs": (optax.lbfgs, ["value", "grad", "value_fn"]),
    "backtracking": (line_search, ["value", "grad", "value_fn"]),
    "sam": (lambda: sam(opaque_mode=True, sync_period=3), ["grad_fn"]),
    "sam_in_a_chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), sam(opaque_mode=True)), ["grad_fn"]),
    "sophia": (lambda: optax.contrib.sophia(0.05, update_interval=2), ["obj_fn"]),
}


def loss_of(params, x, y, reduction):
    return reduced((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2, reduction)


def model_fn_of(optimizer, reduction, loss_of=loss_of):
    def model_fn(features, labels, mode):
        params = {name: est.get_variable(name, shape) for name, shape in SHAPES.items()}
        loss = loss_of(params, features, labels, reduction)
        return est.EstimatorSpec(mode, {}, loss, TowerOptimizer(optimizer).minimize(loss))

    return model_fn


@functools.cache
def by_hand(name, reduction):
    """The variables after each step, and the slots at the end, of the loop in optax's documentation."""
    make, arguments = OPTIMIZERS[name]
    optimizer = make()
    x, y = regression(8, steps=STEPS)
    params = start(model_fn_of(optax.sgd(0.1), reduction), x, y).variables

    @jax.jit
    def step(params, slots, x, y):
        def value_fn(params):
            return loss_of(params, x, y, reduction)

        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {
            "value": value,
            "grad": grad,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, _: jax.grad(value_fn)(params),
        }
        with jax.numpy_dtype_promotion("standard"):
            updates, slots = optimizer.update(grad, slots, params, **{name: extra[name] for name in arguments})
        return optax.apply_updates(params, updates), slots

    slots = optimizer.init(params)
    trace = []
    for batch in zip(x, y, strict=True):
        params, slots = step(params, slots, *batch)
        trace.append(params)
    return trace, slots


def start(model_fn, x, y):
    return est.transform(model_fn).init(jax.random.key(0), x[0], y[0])


# Each optimizer with one number of towers and one reduction, and one without towers.
CASES = [(name, *[(2, "sum"), (4, "mean")][i % 2]) for i, name in enumerate(OPTIMIZERS)] + [("sam", None, "mean")]


@pytest.mark.quick
@pytest.mark.parametrize("name, towers, reduction", CASES)
def test_every_argument_matches_the_whole_batch(name, towers, reduction):
    model = est.transform(replicate(model_fn_of(OPTIMIZERS[name][0](), reduction), towers, reduction))
    x, y = regression(8, steps=STEPS)
    trace, slots = by_hand(name, reduction)
    state = model.init(jax.random.key(0), x[0], y[0])
    for batch, want in zip(zip(x, y, strict=True), trace, strict=True):
        state, _ = model.train_step(state, *batch)
        assert_close(state.variables, want, rtol=1e-4, atol=1e-5)
    assert_close(jax.tree.leaves(state.slots), jax.tree.leaves(slots), rtol=2e-3, atol=1e-4)


@pytest.mark.quick
def test_in_a_loop_of_several_steps():
    x, y = regression(8, steps=STEPS)
    model = est.transform(replicate(model_fn_of(OPTIMIZERS["sam"][0](), "mean"), 2))
    state, _ = model.train_loop(model.init(jax.random.key(0), x[0], y[0]), (x, y))
    assert_close(state.variables, by_hand("sam", "mean")[0][-1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["backtracking", "sam"])
def test_on_some_of_the_variables(group):
    """Towers equal one device, and the group does not know of the other's variables."""
    inner = OPTIMIZERS[group][0]()
    labels = {"w": group, "v": "sgd"}
    optimizer = optax.partition({group: inner, "sgd": optax.sgd(0.1)}, labels, mask_compatible_extra_args=True)
    (x,), (y,) = regression(8, steps=1)

    def trained(model_fn):
        state, _ = one_step(model_fn, x, y)
        return state.variables

    def only_w(params, x, y, reduction):
        return loss_of({"w": params["w"], "v": jax.lax.stop_gradient(params["v"])}, x, y, reduction)

    got = trained(replicate(model_fn_of(optimizer, "mean"), 2))
    assert_close(got["w"], trained(model_fn_of(inner, "mean", only_w))["w"])
    assert_close(got["v"], trained(model_fn_of(optax.sgd(0.1), "mean"))["v"])


def test_elsewhere_means_for_the_variables_of_one_update():
    """All others have the value that the step began with, although one is updated before."""

    def model_fn(features, labels, mode):
        a, b = (est.get_variable(name, (), initializer=jax.nn.initializers.constant(2.0)) for name in "ab")
        loss = jnp.mean(features * a**2 * b)
        adversary = optax.sgd(0.5)
        train_op = est.group(
            TowerOptimizer(optax.sgd(1.0)).minimize(loss, ["b"]),
            TowerOptimizer(optax.contrib.sam(optax.sgd(1.0), adversary, opaque_mode=True)).minimize(loss, ["a"]),
        )
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    state, _ = one_step(replicate(model_fn, 2), FOUR)
    mean, a, b = 3.0, 2.0, 2.0
    elsewhere = a + 0.5 * 2 * mean * a * b
    np.testing.assert_allclose(state.variables["b"], b - mean * a**2)
    np.testing.assert_allclose(state.variables["a"], a - 2 * mean * elsewhere * b)


def test_gradients_changed_by_the_model_fn_are_changed_elsewhere_too():
    """Per tower, as everything between `compute_gradients` and `apply_gradients`."""

    def model_fn(features, labels, mode):
        w = ones("w")
        optimizer = TowerOptimizer(optax.contrib.sam(optax.sgd(1.0), optax.sgd(1.0), opaque_mode=True))
        ((gradient, name),) = optimizer.compute_gradients(jnp.sum(w**2 * features))
        train_op = optimizer.apply_gradients([(jnp.minimum(gradient, 10.0), name)])
        return est.EstimatorSpec(mode, loss=jnp.sum(w**2 * features), train_op=train_op)

    state, _ = one_step(replicate(model_fn, 2, "sum"), np.array([0.25, 0.25, 5, 5], np.float32))
    elsewhere = 1 + (2 * 0.5 + 10)
    np.testing.assert_allclose(state.variables["w"], 1 - (2 * 0.5 * elsewhere if elsewhere < 10 else 10) - 10)


# What it costs, and what it does not.


@pytest.mark.quick
@pytest.mark.parametrize("make, runs", [(lambda: optax.chain(optax.adam(0.1)), 1), (lambda: sam(opaque_mode=True), 2)])
def test_the_model_fn_is_run_again_only_for_an_optimizer_that_asks(make, runs):
    calls = []

    def counted(params, x, y, reduction):
        calls.append(len(x))
        return loss_of(params, x, y, reduction)

    model = est.transform(replicate(model_fn_of(make(), "mean", counted), 2))
    x, y = regression(8, steps=2)
    state = model.init(jax.random.key(0), x[0], y[0])
    calls.clear()
    state, _ = model.train_step(state, x[0], y[0])
    assert calls == [4] * runs
    model.train_step(state, x[1], y[1])
    assert len(calls) == runs


@jax.custom_jvp
def differentiated_never(x):
    return 2 * x


@differentiated_never.defjvp
def refuse(primals, tangents):
    raise AssertionError("A gradient was differentiated.")


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, g: (differentiated_never(x) * g,))


@pytest.mark.slow
def test_what_the_towers_differentiate_is_not_differentiated_once_more():
    def own_rule(params, x, y, reduction):
        return reduced(squared(jnp.tanh(x @ params["w"]) @ params["v"] - y), reduction)

    x, y = regression(8, steps=STEPS)
    state, _ = one_step(replicate(model_fn_of(line_search(), "mean", own_rule), 2), x[0], y[0])
    assert_close(state.variables, by_hand("backtracking", "mean")[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [optax.lbfgs, lambda: sam(opaque_mode=True)])
def test_an_update_apart_from_the_towers_names_the_way_out(make):
    params = {"w": jnp.ones(3)}
    optimizer = TowerOptimizer(make())
    update = Update(jnp.float32(1), ("w",), "optimizer", optimizer)
    slots = {"optimizer": optimizer.transformation.init(params)}
    state = est.State(params, slots, jnp.int32(0), jax.random.key(0))
    message = r"updated apart from the towers. Use VariableDistribution\.MIRRORED or VariableDistribution\.SHARDED"
    with pytest.raises(ValueError, match=message):
        apply_step(TrainOp((update,)), StepGradients({"optimizer": params}), {}, state)


@pytest.mark.parametrize("make", [optax.polyak_sgd, optax.lbfgs, lambda: optax.MultiSteps(optax.polyak_sgd(), 2)])
def test_apply_gradients_for_an_optimizer_that_needs_the_loss(make):
    def model_fn(features, labels, mode):
        loss = jnp.mean(ones("w") ** 2 * features)
        optimizer = TowerOptimizer(make())
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    with pytest.raises(TypeError, match=r"asks for the loss, which `apply_gradients` does not know: .*'value'"):
        one_step(replicate(model_fn, 2), FOUR)


def test_an_argument_that_nobody_gives():
    def update(updates, state, params=None, *, weather, **extra_args):
        raise AssertionError(weather)

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    x, y = regression(8, steps=1)
    with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: 'weather'"):
        one_step(replicate(model_fn_of(optimizer, "mean"), 2), x[0], y[0])
