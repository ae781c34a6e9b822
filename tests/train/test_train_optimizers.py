"""The optimizers of `est.train` as TensorFlow's are called, and as optimizers of this library."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from replicate import BlockSync, TowerOptimizer, replicate_model_fn

ARGUMENTS = {  # of TensorFlow 1.12, in order, less use_locking and name
    "AdaMaxOptimizer": "learning_rate=0.001 beta1=0.9 beta2=0.999 epsilon=1e-08",
    "AdadeltaOptimizer": "learning_rate=0.001 rho=0.95 epsilon=1e-08",
    "AdagradDAOptimizer": "learning_rate global_step initial_gradient_squared_accumulator_value=0.1 "
    "l1_regularization_strength=0.0 l2_regularization_strength=0.0",
    "AdagradOptimizer": "learning_rate initial_accumulator_value=0.1",
    "AdamOptimizer": "learning_rate=0.001 beta1=0.9 beta2=0.999 epsilon=1e-08",
    "AdamWOptimizer": "weight_decay learning_rate=0.001 beta1=0.9 beta2=0.999 epsilon=1e-08",
    "AddSignOptimizer": "learning_rate=0.1 alpha=1.0 beta=0.9 sign_decay_fn=None",
    "FtrlOptimizer": "learning_rate learning_rate_power=-0.5 initial_accumulator_value=0.1 "
    "l1_regularization_strength=0.0 l2_regularization_strength=0.0 accum_name=None linear_name=None "
    "l2_shrinkage_regularization_strength=0.0",
    "GradientDescentOptimizer": "learning_rate",
    "LazyAdamOptimizer": "learning_rate=0.001 beta1=0.9 beta2=0.999 epsilon=1e-08",
    "MomentumOptimizer": "learning_rate momentum use_nesterov=False",
    "MomentumWOptimizer": "weight_decay learning_rate momentum use_nesterov=False",
    "PowerSignOptimizer": "learning_rate=0.1 base=2.718281828459045 beta=0.9 sign_decay_fn=None",
    "ProximalAdagradOptimizer": "learning_rate initial_accumulator_value=0.1 l1_regularization_strength=0.0 "
    "l2_regularization_strength=0.0",
    "ProximalGradientDescentOptimizer": "learning_rate l1_regularization_strength=0.0 l2_regularization_strength=0.0",
    "RMSPropOptimizer": "learning_rate decay=0.9 momentum=0.0 epsilon=1e-10 centered=False",
}
NAMES = {
    "LazyAdamOptimizer": "Adam",
    "AddSignOptimizer": "AddSignOptimizer",
    "PowerSignOptimizer": "PowerSignOptimizer",
}


BEHIND = {  # how the arguments end, where they do so in another way
    "FtrlOptimizer": ["use_locking", "name", "accum_name", "linear_name", "l2_shrinkage_regularization_strength"],
    "MomentumOptimizer": ["use_locking", "name", "use_nesterov"],
    "MomentumWOptimizer": ["use_locking", "name", "use_nesterov"],
    "RMSPropOptimizer": ["use_locking", "centered", "name"],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_order_and_the_defaults_of_tensorflow(name):
    parameters = inspect.signature(getattr(est.train, name)).parameters.copy()
    behind = BEHIND.get(name, ["use_locking", "name"])
    assert [*parameters][-len(behind) :] == behind
    assert parameters.pop("use_locking").default is False
    assert parameters.pop("name").default == NAMES.get(name, name.removesuffix("Optimizer"))
    written = [n if p.default is p.empty else f"{n}={p.default!r}" for n, p in parameters.items()]
    assert written == ARGUMENTS[name].split()


def test_every_optimizer_is_listed_here():
    assert {*ARGUMENTS} == {name for name in est.train.__all__ if name.endswith("Optimizer")}


X = np.arange(4, dtype=np.float32)


def model_fn_with(make, dtype=jnp.float32):
    def model_fn(features, labels, mode):
        net = est.get_variable("net", lambda key: {"w": jnp.ones((), dtype), "b": jnp.zeros((2,), dtype)})
        loss = jnp.mean((net["w"].astype(jnp.float32) * features + net["b"].astype(jnp.float32).sum() - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=make().minimize(loss))

    return model_fn


def state_after(model_fn, steps=3):
    model = est.transform(model_fn)
    return model.train_loop(model.init(jax.random.key(0), X, 2 * X), [(X, 2 * X)] * steps)[0]


MAKE = {
    "ftrl": lambda: est.train.FtrlOptimizer(0.01),
    "rmsprop": lambda: est.train.RMSPropOptimizer(0.01, momentum=0.5, centered=True),
    "adamw": lambda: est.train.AdamWOptimizer(0.01, 0.01),
}


@pytest.mark.quick
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_variables_that_are_trees_and_of_half_precision(make):
    """Slots keep the dtype of their variable, so that a loop of steps has one state."""
    exact, half = (state_after(model_fn_with(make, dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(half.variables))
    for one, other in zip(jax.tree.leaves(exact.variables), jax.tree.leaves(half.variables), strict=True):
        np.testing.assert_allclose(one, other.astype(np.float32), rtol=0.1, atol=0.05)


def test_a_function_may_return_an_optimizer():
    """As `tf.contrib.estimator.TowerOptimizer(lambda: tf.train.AdamOptimizer(rate))` took one."""

    def late():
        rate = est.train.exponential_decay(0.1, est.train.get_global_step(), 2, 0.5)
        return est.train.AdamOptimizer(rate)

    plain = state_after(model_fn_with(late))
    towers = state_after(
        replicate_model_fn(model_fn_with(lambda: TowerOptimizer(late, name="Adam")), devices=["cpu:0", "cpu:1"])
    )
    np.testing.assert_allclose(towers.variables["net"]["w"], plain.variables["net"]["w"], rtol=1e-5)
    assert est.learning_rates(towers) == est.learning_rates(plain) == {"Adam": pytest.approx(0.05)}


@pytest.mark.slow
@pytest.mark.parametrize("computed", [False, True])
def test_slots_begin_again_where_blocks_end(computed):
    def make():
        rate = est.train.piecewise_constant(est.global_step() if computed else None, [9], [0.01, 0.0])
        return TowerOptimizer(est.train.MomentumOptimizer(rate, 0.9))

    sync = BlockSync(block_steps=2, outer_optimizer=optax.sgd(1.0), reset_slots=True)
    towers = replicate_model_fn(model_fn_with(make), devices=["cpu:0", "cpu:1"], block_sync=sync)
    slots = {steps: state_after(towers, steps).slots["Momentum"] for steps in (1, 2)}
    assert jax.tree.reduce(lambda found, x: found or np.any(x), slots[1].inner, False)
    assert not any(np.any(x) for x in jax.tree.leaves(slots[2].inner))
    np.testing.assert_allclose(slots[2].hyperparams["learning_rate"], 0.01)


REFUSED = {
    "a rate that is None": (lambda: est.train.AdamOptimizer(None), TypeError, "`AdamOptimizer` needs a number as lear"),
    "an accumulator of 0": (lambda: est.train.AdagradOptimizer(0.1, 0.0), ValueError, "value above 0; got 0.0"),
    "a power above 0": (lambda: est.train.FtrlOptimizer(0.1, 0.5), ValueError, "learning_rate_power of at most 0; got"),
    "a strength below 0": (
        lambda: est.train.ProximalGradientDescentOptimizer(0.1, -1.0),
        ValueError,
        r"`ProximalGradientDescentOptimizer` needs regularization strengths of at least 0; got \(-1.0, 0.0\)",
    ),
}


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
