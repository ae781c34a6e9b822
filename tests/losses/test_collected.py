"""What a run collects: its losses, regularizers, trainable variables, and a store for libraries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import predicting
from testing.towers import REDUCTIONS, one_step, replicate, started

import estimator as est
from replicate import TowerOptimizer

X, Y = jnp.arange(6.0).reshape(6, 1) / 6, jnp.ones((6, 1))
ones = jax.nn.initializers.ones


def run(body, mode="infer"):
    """What a body returns, on the initial values."""

    model_fn = predicting(lambda x: body())
    model = est.transform(model_fn)
    return model.predict_step(model.init(jax.random.key(0), X, mode=mode), X).predictions


def test_losses_and_regularizers_of_a_run_are_collected_by_scope():
    def body():
        l1, l2 = est.regularizers.l1(1.0), est.regularizers.l2(1.0)
        with est.variable_scope("a", regularizer=l2):
            est.get_variable("w", (4,), initializer=ones)  # 2
            est.get_variable("v", (4,), initializer=ones, regularizer=l1)  # 4
            est.losses.absolute_difference(Y, jnp.zeros_like(Y))  # 1
            est.losses.absolute_difference(Y, jnp.zeros_like(Y), reduction="none")
        with est.variable_scope("a", reuse=True, regularizer=l1):
            est.get_variable("w", (4,))
        with est.variable_scope("ab"):
            est.losses.add_loss(10.0)
            est.losses.compute_weighted_loss(jnp.ones(3), reduction="weighted_sum")  # 3
        est.get_variable("free", (4,))
        losses = est.losses
        regularization = [losses.get_regularization_loss(*scope) for scope in ([], ["a/v"], ["b"])]
        totals = [losses.get_total_loss(*args) for args in ([], [False, "total_loss"], [True, "total_loss", "ab"])]
        return jnp.stack([*regularization, sum(losses.get_losses()), sum(losses.get_losses("a$")), *totals])

    np.testing.assert_allclose(run(body), [6, 4, 0, 14, 1, 20, 14, 13])


def test_nothing_collected_is_a_loss_of_zero():
    both = run(lambda: jnp.stack([est.losses.get_total_loss(), est.losses.get_regularization_loss()]))
    assert both.tolist() == [0, 0]


def test_a_loss_within_a_loop_is_not_collected():
    def body():
        def step(total, x):
            return total + est.losses.mean_squared_error(x, x + 1), None

        total, _ = jax.lax.scan(step, 0.0, X)
        assert not est.losses.get_losses()
        est.losses.add_loss(total)
        return est.losses.get_total_loss()

    assert run(body) == 6


@pytest.mark.slow
@pytest.mark.parametrize("steps, reduction", [(2, "sum"), (1, "mean")])
def test_a_regularizer_counts_once_on_towers(steps, reduction):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (1, 1), initializer=ones, regularizer=est.regularizers.l2(0.5))
        est.losses.mean_squared_error(labels, features @ w, reduction=REDUCTIONS[reduction])
        loss = est.losses.get_total_loss()
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=steps).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    model, state = started(replicate(model_fn, 3, reduction), X, Y)
    reduce = jnp.sum if reduction == "sum" else jnp.mean

    def loss(w, rows=6):
        return reduce((Y[:rows] - X[:rows] * w) ** 2) + 0.25 * w**2

    after, spec = model.train_step(state, X, Y)
    np.testing.assert_allclose(spec.loss, loss(1.0), rtol=1e-6)
    np.testing.assert_allclose(after.variables["w"].item(), 1 - 0.1 * jax.grad(loss)(1.0), rtol=1e-5)
    for rows in (6, 5, 2):
        np.testing.assert_allclose(model.eval_step(state, X[:rows], Y[:rows]).loss, loss(1.0, rows), rtol=1e-6)


def test_trainable_variables_are_names_and_values_in_order():
    def body():
        est.get_variable("b/w", (2,), initializer=ones)
        est.get_variable("a/w", (2,), initializer=ones)
        est.get_variable("count", initializer=np.int32(0))
        est.get_variable("fixed", (), trainable=False)
        variables = est.trainable_variables()
        assert list(variables) == ["b/w", "a/w"] and len(variables) == 2 and "a/w" in variables
        assert list(est.trainable_variables("a")) == ["a/w"] and not est.trainable_variables("w")
        assert list(est.trainable_variables(".*w$")) == ["b/w", "a/w"]
        assert repr(variables) == "VariablesByName(['b/w', 'a/w'])"
        with pytest.raises(KeyError):
            variables["fixed"]
        doubled = jax.tree.map(lambda x: 2 * x, variables)
        assert list(doubled) == ["b/w", "a/w"] and type(doubled) is dict
        return sum(jnp.sum(x) for x in jax.tree.leaves(variables)) + doubled["a/w"][0]

    assert run(body) == 6


def test_names_alone_leave_the_gradient_of_a_table_sparse():
    kinds = []

    def model_fn(features, labels, mode):
        loss = jnp.sum(est.embedding_lookup("table", features.astype(jnp.int32), (9, 2)))
        var_list = est.trainable_variables("t")
        ((gradient, _),) = est.Optimizer(optax.sgd(0.1)).compute_gradients(loss, var_list=var_list)
        kinds.append(type(gradient))
        return est.EstimatorSpec(mode, loss=loss, train_op=est.TrainOp())

    one_step(model_fn, X)
    assert kinds[-1] is est.IndexedSlices


def test_a_store_lasts_one_run():
    made = []

    def model_fn(features, labels, mode):
        def make():
            made.append(mode)
            return itertools.count()

        numbers = [next(est.run_store("numbers", make)) for _ in range(3)]
        assert numbers == [0, 1, 2] and est.run_store("other", list) == []
        loss = est.get_variable("w", (), initializer=ones) * features.mean()
        return est.EstimatorSpec(mode, features, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    model, state = started(replicate(model_fn, 2), X)
    model.train_step(state, X)
    model.eval_step(state, X[:5])
    assert len(made) > 3 and set(made) == {"train", "eval"}


def test_regularizers():
    x = {"a": np.array([-1.0, 2.0]), "b": np.array([[3.0]])}
    assert est.regularizers.l1(0.5)(x) == 3
    assert est.regularizers.l2(0.5)(x) == 3.5
    assert est.regularizers.l1_l2(0.5, 0.5)(x) == 6.5
    assert est.regularizers.l1_l2()(x) == 13
    assert est.regularizers.l2(0)(x) == 0


def in_a_loop(body):
    jax.lax.map(lambda x: (body(x.sum()), x)[1], X)


REFUSED = {
    TypeError: [
        (lambda: est.regularizers.l2("a"), "`est.regularizers.l2` needs a number as its scale; got 'a'"),
        (lambda: est.losses.add_loss("abc"), "`est.losses.add_loss` needs a loss, a scalar; got 'abc'"),
        (lambda: est.losses.get_losses(3), "`est.losses.get_losses` needs the beginning of names, .* got 3"),
        (lambda: est.trainable_variables(3), "needs the beginning of names, a string; got 3"),
        (lambda: est.run_store("a", 3), r"`est.run_store\('a'\)` needs a function that makes what is stored"),
    ],
    ValueError: [
        (lambda: est.regularizers.l1(-1.0), "`est.regularizers.l1` needs a scale of at least 0; got -1.0"),
        (
            lambda: est.losses.add_loss(X),
            r"needs a scalar; got an array of shape \(6, 1\). Reduce it, by `est.losses.compute_weighted_loss`",
        ),
        (lambda: in_a_loop(est.losses.add_loss), r"`est.losses.add_loss` was called within .*add it outside"),
        (
            lambda: (est.get_variable("w", 2, regularizer=jnp.abs), est.losses.get_total_loss()),
            r"The regularizer of 'w' must return a scalar; got an array of shape \(2,\). Sum it up",
        ),
    ],
}


@pytest.mark.parametrize("error, body, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(body, error, message):
    def checked():
        est.losses.absolute_difference(X, X)
        body()
        return X

    with pytest.raises(error, match=message):
        run(checked)


@pytest.mark.parametrize(
    "call",
    [
        lambda: est.losses.add_loss(1.0),
        lambda: est.losses.get_total_loss(),
        lambda: est.trainable_variables(),
        lambda: est.run_store("a", list),
    ],
)
def test_outside_of_a_run_is_an_error(call):
    with pytest.raises(RuntimeError, match="must be called inside a model_fn"):
        call()
