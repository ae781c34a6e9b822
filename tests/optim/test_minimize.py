"""What an optimizer may be given: losses, variables, gradients, and the arguments of TensorFlow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import minimizing, ones, run
from testing.towers import replicate, started

import estimator as est
from replicate import TowerOptimizer


def two_variables():
    est.get_variable("fixed", (), initializer=jax.nn.initializers.ones, trainable=False)
    return ones("a") + ones("b", (2,)).sum()


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
        ([], ValueError, r"got no variables to optimize; .* `est.flax_module\(net, \"net\"\)`. Weights that"),
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


NO_GRADIENTS = "No gradients provided for any variable: "


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w: jnp.mean(jnp.argmax(jnp.stack([w, -w])) == 0).astype(jnp.float32), "depends on none of ['a', 'b']"),
        (jax.lax.stop_gradient, "depends on none of ['a', 'b']"),
        (lambda w: jnp.float32(3), "depends on none of ['a', 'b']"),
        (lambda w: w.astype(jnp.int32).astype(jnp.float32), "depends on none of ['a', 'b']"),
        (lambda w: w.astype(jnp.int32), "`Optimizer.minimize` got a loss of dtype int32, which has no derivative"),
        (lambda w: jnp.bool_(True), "`Optimizer.minimize` got a loss of dtype bool, which has no derivative"),
    ],
)
def test_a_loss_that_depends_on_no_variable_is_an_error(loss, message):
    def body():
        return est.Optimizer(optax.sgd(1.0)).minimize(loss(two_variables()))

    def compute():
        optimizer = est.Optimizer(optax.sgd(1.0))
        return optimizer.apply_gradients(optimizer.compute_gradients(loss(two_variables())))

    with pytest.raises(ValueError, match=re.escape(NO_GRADIENTS) + f".*{re.escape(message)}.*The usual causes: a loss"):
        run(body)
    with pytest.raises(ValueError, match=re.escape(NO_GRADIENTS) + ".*`Optimizer.*The usual causes: a loss"):
        run(compute)


def test_a_var_list_without_what_the_loss_uses_is_an_error():
    def body():
        two_variables()
        return est.Optimizer(optax.sgd(1.0), "mine").minimize(est.read_variable("a") ** 2, var_list=["b"])

    with pytest.raises(ValueError, match=r"\(optimizer 'mine'\) depends on none of \['b'\]"):
        run(body)


def test_a_complex_loss_is_an_error_that_names_it():
    def body():
        return est.Optimizer(optax.sgd(1.0)).minimize(two_variables().astype(jnp.complex64))

    with pytest.raises(TypeError, match=r"`Optimizer.minimize` needs a real loss; got complex64. Write `loss.real`"):
        run(body)
    with pytest.raises(TypeError, match=r"loss must be real, given: .*complex64"):
        est.EstimatorSpec("eval", loss=jnp.complex64(1))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], r"got None for all of \[\]"),
        ([(None, "a"), (None, "b")], r"got None for all of \['a', 'b'\]. The usual causes: a loss made of `argmax`"),
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
        (lambda o, loss: o.compute_gradients(loss, None, 1), "argument 'gate_gradients': XLA orders what it compiles"),
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


NOT_HERE = {
    ValueError: [
        (lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5), "`optax.lookahead` needs each variable as a pair"),
        (lambda: optax.chain(optax.monitor({"n": optax.tree.norm})), "`optax.monitor` adds its measurements"),
        (lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, 0), "need a gradient of each example"),
        (
            lambda: optax.GradientTransformation(lambda p: {"n": jnp.zeros(())}, lambda g, s, p=None: (g, {})),
            r"'optimizer' changes the structure of its slots.*: \[\"\['n'\]\"\] is of other shapes",
        ),
    ],
    TypeError: [
        (lambda: optax.sgd, r"`sgd` needs \['learning_rate'\]. .*, or `Optimizer\(sgd, learning_rate=0.1\)`"),
        (lambda: lambda rate: optax.sgd(rate), r"`<lambda>` needs \['rate'\]"),
    ],
}


@pytest.mark.parametrize(("error", "make", "message"), refused.rows(NOT_HERE))
@pytest.mark.filterwarnings("ignore")
def test_optimizers_that_do_not_work_here_say_what_they_need(make, error, message):
    with pytest.raises(error, match=message):
        run(lambda: est.Optimizer(make()).minimize(two_variables()))


def test_slots_keep_their_dtypes():
    def loss_of(features, labels):
        w = ones("w", dtype=jnp.bfloat16).astype(jnp.float32)
        return jnp.mean((w * est.get_variable("v", ()) * features) ** 2)

    model_fn = minimizing(loss_of, est.Optimizer(optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)))
    x = np.ones(2, np.float32)
    model, state = started(model_fn, x)
    after, _ = model.train_step(state, x)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    after, _ = model.train_loop(after, [(x, None)] * 2)
    assert after.slots["optimizer"].inner_state[0].trace["w"].dtype == jnp.bfloat16


def test_a_bare_optax_transformation_is_an_error_with_the_line_to_write():
    with pytest.raises(TypeError, match=r"Write `est\.group\(est\.Optimizer\(optimizer\)\.minimize"):
        est.group(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"`Optimizer` takes an optax.* such as `optax.adam\(1e-3\)`"):
        est.Optimizer("adam")

    def body():
        return est.Optimizer(lambda: "adam").minimize(two_variables())

    with pytest.raises(TypeError, match="must return an optax.GradientTransformation; it returned"):
        run(body)


@pytest.mark.quick
@pytest.mark.parametrize(
    "towers, update",
    [(1, TowerOptimizer.minimize), (2, lambda own, loss: own.apply_gradients(own.compute_gradients(loss)))],
)
def test_a_complex_variable_moves_downhill_as_in_tensorflow(towers, update):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), jnp.complex64, lambda key, shape, dtype: jnp.asarray(1 + 1j, dtype))
        loss = jnp.mean(jnp.abs(features * w - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=update(TowerOptimizer(optax.sgd(0.1)), loss))

    x = np.array([1.0, 2.0, 0.5, 1.0], np.complex64)
    y = x * np.complex64(2 + 3j)
    model, state = started(replicate(model_fn, towers), x, y)
    for _ in range(100):
        state, spec = model.train_step(state, x, y)
    np.testing.assert_allclose(state.variables["w"], 2 + 3j, rtol=1e-5)
    assert spec.loss < 1e-9


def test_a_loss_in_bfloat16_has_the_gradient_of_one_batch():
    model_fn = minimizing(lambda x, y: jnp.mean(ones("w") * x).astype(jnp.bfloat16), optax.sgd(1.0))
    x = np.arange(6, dtype=np.float32)
    model, state = started(replicate(model_fn, 3), x)
    state, _ = model.train_step(state, x)
    np.testing.assert_allclose(state.variables["w"], 1 - 2.5, rtol=1e-6)


@pytest.mark.parametrize("grouped", [False, True])
def test_an_update_that_the_spec_leaves_out_is_a_line_in_the_log(grouped, messages):
    def two(features, labels, mode):
        loss = two_variables() * features.mean()
        of_a = TowerOptimizer(optax.sgd(1.0), name="of_a").minimize(loss, var_list=["a"])
        of_b = TowerOptimizer(optax.sgd(1.0), name="of_b").minimize(loss, var_list=["b"])
        return est.EstimatorSpec(mode, loss=loss, train_op=est.group(of_a, of_b) if grouped else of_b)

    started(replicate(two, 2), np.ones(2, np.float32))
    lines = [line for line in messages() if "has no update of the optimizers ['of_a']" in line]
    assert len(lines) == (0 if grouped else 1)
