"""What an optimizer may be given: losses, variables, gradients, and the arguments of TensorFlow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import run
from testing.towers import replicate, started

import estimator as est
from replicate import TowerOptimizer


def two_variables():
    a = est.get_variable("a", (), initializer=jax.nn.initializers.ones)
    b = est.get_variable("b", (2,), initializer=jax.nn.initializers.ones)
    est.get_variable("fixed", (), initializer=jax.nn.initializers.ones, trainable=False)
    return a + b.sum()


def test_var_list_and_none_leave_the_others_as_they_are():
    def minimize():
        return est.Optimizer(optax.sgd(1.0)).minimize(two_variables(), ["b"])

    def apply():
        optimizer = est.Optimizer(optax.adam(1.0))
        gradients = dict((n, g) for g, n in optimizer.compute_gradients(two_variables()))
        return optimizer.apply_gradients([(None, "a"), (gradients["b"], "b")])

    for body in (minimize, apply):
        variables = run(body).variables
        assert variables["a"] == 1
        np.testing.assert_allclose(variables["b"], 0, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("a", TypeError, r"var_list must be a list of names; write \['a'\]"),
        ([], ValueError, "got no variables to optimize"),
        (["a", "x"], ValueError, r"cannot optimize \['x'\]; .* are \['a', 'b'\]"),
        (["fixed"], ValueError, r"cannot optimize \['fixed'\]; the"),
    ],
)
@pytest.mark.parametrize("method", ["minimize", "compute_gradients"])
def test_bad_var_lists_are_errors(method, given, error, message):
    def body():
        getattr(est.Optimizer(optax.sgd(1.0)), method)(two_variables(), given)

    with pytest.raises(error, match=rf"`Optimizer\.{method}`.*{message}"):
        run(body)


def test_a_variable_listed_twice_is_moved_once():
    def body():
        return est.Optimizer(optax.sgd(0.5)).minimize(two_variables(), ["a", "a"])

    assert run(body).variables["a"] == 0.5


@pytest.mark.parametrize("loss", [jnp.ones(2), 1.0, None, jnp.ones((0,))])
def test_bad_losses_are_errors(loss):
    def body():
        two_variables()
        est.Optimizer(optax.sgd(1.0)).minimize(loss)

    with pytest.raises(ValueError, match="`Optimizer.minimize` needs a scalar loss computed by this"):
        run(body)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "got no gradient for any variable"),
        ([(None, "a"), (None, "b")], "got no gradient for any variable; every one is None"),
        ([(jnp.ones(()), "a"), (jnp.ones(()), "a")], "got the variable 'a' twice"),
        ([(jnp.ones(3), "b")], r"the gradient of 'b' must have .*, \(2,\); got \(3,\)"),
        ([({"x": jnp.ones(2)}, "b")], "the gradient of 'b' must have the variable's structure"),
        ([(jnp.ones(()), "x")], r"cannot optimize \['x'\]"),
        ([(jnp.ones(()), "fixed")], r"cannot optimize \['fixed'\]"),
    ],
)
def test_bad_gradients_are_errors(pairs, message):
    def body():
        two_variables()
        return est.Optimizer(optax.sgd(1.0)).apply_gradients(iter(pairs))

    with pytest.raises(ValueError, match=rf"`Optimizer\.apply_gradients`.*{message}"):
        run(body)


@pytest.mark.parametrize("pairs", [[("a", jnp.ones(()))], [jnp.ones(())], ["a"]])
def test_what_are_no_pairs_of_gradient_and_name_is_said_so(pairs):
    def body():
        two_variables()
        return est.Optimizer(optax.sgd(1.0)).apply_gradients(pairs)

    with pytest.raises((TypeError, ValueError), match=r"`Optimizer\.apply_gradients`"):
        run(body)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda o, loss: o.minimize(loss, est.global_step() + 1),
            r"`Optimizer\.minimize` got global_step=.* is not what `est.global_step\(\)` returns",
        ),
        (lambda o, loss: o.compute_gradients(loss, colocate_gradients_with_ops=True), "XLA places what it compiles"),
        (
            lambda o, loss: o.apply_gradients([(jnp.ones(2), "b")], global_step=1),
            r"`Optimizer\.apply_gradients` got global_step=1, .* A counter of your own is a variable",
        ),
        (lambda o, loss: o.minimize(loss, name="train"), r"`est.Optimizer\(optimizer, name=...\)`"),
        (lambda o, loss: o.minimize(loss, typo=1), r"got an unexpected argument 'typo'\."),
        (
            lambda o, loss: est.assign(jnp.ones(()), 1.0),
            r"`est\.assign` takes the name of a variable first, a string; got",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_arguments_of_tensorflow_are_errors_that_say_what_to_write(call, message, mode):
    def body():
        loss = jnp.sum(two_variables())
        call(est.Optimizer(optax.sgd(1.0)), loss)

    with pytest.raises(TypeError, match=message):
        run(body, mode)


def test_a_bare_optax_transformation_is_an_error_with_the_line_to_write():
    with pytest.raises(TypeError, match=r"Write `est\.group\(est\.Optimizer\(optimizer\)\.minimize"):
        est.group(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"`Optimizer` takes an optax.* such as `optax.adam\(1e-3\)`"):
        est.Optimizer("adam")

    def body():
        return est.Optimizer(lambda: "adam").minimize(two_variables())

    with pytest.raises(TypeError, match="must return an optax.GradientTransformation; it returned"):
        run(body)


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("method", ["minimize", "apply_gradients"])
def test_a_complex_variable_moves_downhill_as_in_tensorflow(towers, method):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), jnp.complex64, lambda key, shape, dtype: jnp.asarray(1 + 1j, dtype))
        loss = jnp.mean(jnp.abs(features * w - labels) ** 2)
        optimizer = TowerOptimizer(optax.sgd(0.1))
        if method == "minimize":
            return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(optimizer.compute_gradients(loss)))

    x = np.array([1.0, 2.0, 0.5, 1.0], np.complex64)
    y = x * np.complex64(2 + 3j)
    model, state = started(replicate(model_fn, towers), x, y)
    for _ in range(100):
        state, spec = model.train_step(state, x, y)
    np.testing.assert_allclose(state.variables["w"], 2 + 3j, rtol=1e-5)
    assert spec.loss < 1e-9


@pytest.mark.parametrize("towers", [1, 3])
def test_a_loss_in_bfloat16_has_the_gradient_of_one_batch(towers):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        loss = jnp.mean(w * features).astype(jnp.bfloat16)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(1.0)).minimize(loss))

    x = np.arange(6, dtype=np.float32)
    model, state = started(replicate(model_fn, towers), x)
    state, _ = model.train_step(state, x)
    np.testing.assert_allclose(state.variables["w"], 1 - 2.5, rtol=1e-6)


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_an_update_that_the_spec_leaves_out_is_a_line_in_the_log(towers, grouped, messages):
    def two(features, labels, mode):
        loss = two_variables() * features.mean()
        of_a = TowerOptimizer(optax.sgd(1.0), name="of_a").minimize(loss, var_list=["a"])
        of_b = TowerOptimizer(optax.sgd(1.0), name="of_b").minimize(loss, var_list=["b"])
        return est.EstimatorSpec(mode, loss=loss, train_op=est.group(of_a, of_b) if grouped else of_b)

    started(replicate(two, towers), np.ones(2, np.float32))
    lines = [line for line in messages() if "has no update of the optimizers ['of_a']" in line]
    assert len(lines) == (0 if grouped else 1)
