"""What a model_fn says within functions that jax traces apart: loops, branches, jit, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, ones
from testing.towers import assert_close, regression, replicate, started

import estimator as est
from replicate import TowerOptimizer

X = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)


def run(body, mode="train", towers=None):
    """The predictions, or the error, of a model_fn that returns `body(features)` as such."""

    def model_fn(features, labels, mode):
        w = ones("w", (3,))
        est.get_variable("count", initializer=0.0, trainable=False)
        predictions = body(features)
        loss = jnp.mean(features @ w)
        return est.EstimatorSpec(mode, predictions, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    model, state = started(replicate(model_fn, towers), X, mode=mode)
    return model.train_step(state, X)[1].predictions if mode == "train" else model.predict_step(state, X).predictions


def custom_vjp(fn):
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda x: (fn(x), None), lambda _, cotangent: (cotangent,))
    return wrapped


def while_loop(fn, x):
    return jax.lax.while_loop(lambda at: at[0] < 3, lambda at: (at[0] + 1, fn(at[1])), (0, x))[1]


LOOPS = {
    "jax.lax.scan": lambda fn, x: jax.lax.scan(lambda _, row: (None, fn(row)), None, x)[1],
    "jax.lax.map": lambda fn, x: jax.lax.map(fn, x),
    "jax.lax.fori_loop": lambda fn, x: jax.lax.fori_loop(0, 3, lambda i, x: fn(x), x),
    "jax.lax.while_loop": lambda fn, x: while_loop(fn, x),
    "jax.vmap": lambda fn, x: jax.vmap(fn)(x),
}
ONCE = {
    "jax.jit": lambda fn, x: jax.jit(fn)(x),
    "jax.checkpoint": lambda fn, x: jax.checkpoint(fn)(x),
    "checkpoint_segments": lambda fn, x: est.checkpoint_segments(fn)(x),
    "jax.custom_vjp": lambda fn, x: custom_vjp(fn)(x),
    "jax.grad": lambda fn, x: jax.grad(lambda x: jnp.sum(fn(x) * x))(x),
    "jax.lax.cond": lambda fn, x: jax.lax.cond(x.sum() > 0, fn, lambda x: x, x),
    "jax.lax.switch": lambda fn, x: jax.lax.switch(est.global_step(), [fn, jnp.sin], x),
}
OUTSIDE = [name for name in ONCE if name != "jax.grad"]


def noisy(x):
    return x + jax.random.normal(est.make_rng(), x.shape)


@pytest.mark.parametrize(("loop", "towers"), [*((loop, None) for loop in LOOPS), ("jax.lax.scan", 2)])
def test_a_key_drawn_in_a_loop_is_refused(loop, towers):
    where = rf"in a function that `{loop}` runs many times, each time with the same key"
    instead = r"`jax\.random\.split\(key, n\)`.*`jax\.random\.fold_in\(key, i\)`"
    with pytest.raises(ValueError, match=rf"`est\.make_rng\(\)` was called {where}.*{instead}"):
        run(lambda x: LOOPS[loop](noisy, x), towers=towers)


def test_the_name_of_the_key_is_in_the_message():
    with pytest.raises(ValueError, match=r"`est\.make_rng\('drop'\)` was called in a function that `jax\.lax\.map`"):
        run(lambda x: jax.lax.map(lambda row: jax.random.normal(est.make_rng("drop"), row.shape), x))


def test_keys_split_before_a_loop_differ():
    def body(x):
        return jax.lax.map(lambda key: jax.random.uniform(key), jax.random.split(est.make_rng(), len(x)))

    assert len(set(run(body).tolist())) == len(X)


@pytest.mark.quick
@pytest.mark.parametrize("once", ONCE)
def test_a_key_drawn_in_a_function_that_runs_once_matches_the_model_fn(once):
    derived = (lambda fn: jax.grad(lambda x: jnp.sum(fn(x) * x))) if once == "jax.grad" else lambda fn: fn
    assert_close(run(lambda x: ONCE[once](lambda x: noisy(x), x)), run(lambda x: derived(noisy)(x)), rtol=1e-5)


@pytest.mark.slow
def test_a_loop_within_which_the_model_fn_runs_is_none_of_its_own():
    """Steps in a scan, micro-batches, several models in a vmap."""
    model_fn = minimizing(lambda x, y: jnp.mean(noisy(x) @ est.get_variable("w", (3,))), accumulate_steps=2)
    model = est.transform(replicate(model_fn, 1))
    states = jax.vmap(lambda key: model.init(key, X))(jax.random.split(jax.random.key(0), 2))
    assert jax.vmap(model.train_step, in_axes=(0, None))(states, X)[1].loss.shape == (2,)
    assert len(set(model.train_loop(model.init(jax.random.key(0), X), [X, X])[1].loss.tolist())) == 2


@pytest.mark.slow
def test_where_jit_is_off_keys_differ_in_a_loop_and_are_let():
    def body(x):
        return jax.lax.map(lambda row: jax.random.uniform(est.make_rng()) + 0 * row[0], x)

    with jax.disable_jit():
        assert len(set(np.asarray(run(body)).tolist())) == len(X)


# Modules of Flax.

MODULES = {
    "linen": lambda nn, nnx: nn.Dropout(0.5, deterministic=False),
    "nnx": lambda nn, nnx: lambda rngs: nnx.Dropout(0.5, rngs=rngs),
}
DRAW_NOTHING = {
    "linen": lambda nn, nnx: nn.Dense(2),
    "linen without dropout": lambda nn, nnx: nn.Dropout(0.5, deterministic=True),
    "nnx": lambda nn, nnx: lambda rngs: nnx.Linear(3, 2, rngs=rngs),
}


def module_of(make):
    return make(pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx"))


@pytest.mark.parametrize("kind", MODULES)
def test_dropout_of_a_module_in_a_loop_is_refused(kind):
    module = module_of(MODULES[kind])

    def body(x):
        net = est.flax_module(module, "net")
        return net(x), jax.lax.map(net, x)

    with pytest.raises(ValueError, match=r"The module 'net' draws random numbers .* `jax\.lax\.map` runs many times"):
        run(body)


@pytest.mark.quick
@pytest.mark.parametrize("kind", DRAW_NOTHING)
def test_a_module_that_draws_nothing_may_be_called_in_a_loop(kind):
    module = module_of(DRAW_NOTHING[kind])

    def body(x):
        net = est.flax_module(module, "net")
        return {"at once": net(x), "in a loop": jax.lax.map(net, x)}

    predictions = run(body)
    assert_close(predictions["in a loop"], predictions["at once"])


def test_dropout_under_checkpoint_is_a_modules_own_affair():
    module = module_of(MODULES["linen"])

    def body(x):
        net = est.flax_module(module, "net")
        net(x)
        return jax.checkpoint(net)(x)

    assert 0 < np.count_nonzero(run(body)) < X.size


# Variables.

APART = r"within a function that jax traces apart \({}.*\), "


@pytest.mark.quick
@pytest.mark.parametrize("where", [*LOOPS, *OUTSIDE])
def test_a_variable_is_not_created_where_it_would_not_exist_outside(where):
    def body(x):
        return (LOOPS | ONCE)[where](lambda x: x + est.get_variable("v", ()), x)

    if where == "jax.vmap":  # what does not depend on the rows is known outside of it
        assert run(body).shape == X.shape
        return
    message = APART.format("`jax") + "outside of which the variable would not exist. Get it before, outside of "
    with pytest.raises(ValueError, match=r"`est\.get_variable\('v'\)` was called " + message + "the function"):
        run(body, "infer" if where == "jax.lax.while_loop" else "train")


READING = [*LOOPS, *(name for name in ONCE if name != "jax.custom_vjp")]  # which may not close over a variable


@pytest.mark.quick
@pytest.mark.parametrize("where", READING)
def test_a_variable_got_before_is_read_anywhere(where):
    def body(x):
        with est.variable_scope("scope", reuse=est.AUTO_REUSE):
            ones("v")
            return (LOOPS | ONCE)[where](lambda x: x * est.get_variable("v", ()) * est.read_variable("w")[0], x)

    want = jnp.asarray(X) if where == "jax.lax.switch" else (LOOPS | ONCE)[where](lambda x: x * 1, jnp.asarray(X))
    assert_close(run(body), want)


def test_a_derivative_lets_variables_and_writes_out():
    def body(x):
        def potential(x):
            est.assign("count", 3.0)
            return jnp.sum(x * ones("v", (3,)))

        return jax.grad(potential)(x)

    assert_close(run(body), jnp.ones_like(X))


@pytest.mark.parametrize("both", [lambda fn: jax.grad(jax.jit(fn)), lambda fn: jax.jit(jax.grad(fn))])
def test_jax_itself_refuses_a_variable_created_in_a_jit_within_or_around_a_derivative(both):
    def body(x):
        return both(lambda x: jnp.sum(x * est.get_variable("v", (3,))))(x)

    with pytest.raises(jax.errors.UnexpectedTracerError):
        run(body)


@pytest.mark.parametrize(
    ("where", "call"), [*((where, "assign") for where in [*LOOPS, *OUTSIDE]), ("jax.lax.cond", "assign_add")]
)
def test_a_write_whose_value_is_not_known_outside_is_refused(where, call):
    def body(x):
        def write(x):
            getattr(est, call)("count", x.sum())
            return x

        return (LOOPS | ONCE)[where](write, x)

    message = rf"`est\.{call}\('count'\)` was called " + APART.format("`jax")
    with pytest.raises(ValueError, match=message + "outside of which the value is not known. Return it, and write it"):
        run(body)


@pytest.mark.parametrize(
    ("method", "where"),
    [("minimize", "jax.lax.cond"), ("compute_gradients", "jax.lax.scan"), ("apply_gradients", "jax.jit")],
)
def test_an_optimizer_within_a_loop_or_a_branch(method, where):
    def body(x):
        def inside(x):
            applied = [(jnp.ones(3), "w")] if method == "apply_gradients" else jnp.sum(x * est.read_variable("w"))
            getattr(est.Optimizer(optax.sgd(0.1), name="inner"), method)(applied)
            return x

        return (LOOPS | ONCE)[where](inside, x)

    message = rf"`Optimizer\.{method}` was called " + APART.format(f"`{where}`")
    with pytest.raises(ValueError, match=message + r"where a loss or a gradient .*Return it, and call this outside"):
        run(body)


def test_a_metric_may_be_what_a_branch_or_a_loop_returns():
    def body(x):
        mean = jax.lax.cond(x.sum() > 0, est.metrics.mean, lambda x: est.metrics.mean(0 * x), x)
        each = jax.lax.map(lambda row: est.metrics.mean(row).result(), x)
        return {"mean": jnp.broadcast_to(mean.result(), len(x)), "each": each}

    predictions = run(body)
    assert_close(predictions["mean"], jnp.full(4, X.mean()))
    assert_close(predictions["each"], jnp.asarray(X.mean(1)))


# Losses, whose denominators are sums over all rows.


def in_cond(loss, x):
    return jax.lax.cond(est.global_step() >= 0, loss, lambda x: jnp.mean(x), x)


def in_scan(loss, x):
    return jax.lax.scan(lambda total, factor: (total + loss(factor * x), None), jnp.float32(0), jnp.arange(1.0, 4.0))[0]


PLACES = {
    "nowhere": lambda loss, x: loss(x),
    "cond": in_cond,
    "scan": in_scan,
    "vmap": lambda loss, x: jax.vmap(lambda factor: loss(factor * x))(jnp.arange(1.0, 4.0)).sum(),
    "checkpoint": lambda loss, x: jax.checkpoint(loss)(x),
    "grad": lambda loss, x: loss(x) + jax.grad(lambda factor: loss(factor * x))(1.0),
}


def weighted_model_fn(place, steps=1):
    def model_fn(features, labels, mode):
        output = features @ ones("w", (3,))
        weights = (features[:, 0] > 0) * features[:, 1] ** 2

        def loss_of(output):
            mean = est.losses.mean_squared_error(labels, output, weights)
            return mean + est.losses.absolute_difference(labels, output, weights, reduction=est.Reduction.MEAN)

        loss = PLACES[place](loss_of, output)
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=steps).minimize(loss)
        metrics = {"error": est.metrics.mean_squared_error(labels, output, weights)}
        return est.EstimatorSpec(mode, {"output": output}, loss, train_op, metrics)

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_weighted_losses_match_one_big_batch(place):
    """Of any number of rows, in evaluation."""
    plain, replicated = map(est.transform, (weighted_model_fn(place), replicate(weighted_model_fn(place), 4)))
    with jax.numpy_dtype_promotion("standard"):
        (x,), (y,) = regression(8, seed=8, steps=1)
        state = plain.init(jax.random.key(0), x, y)
        assert_close(*(model.train_step(state, x, y)[0].variables for model in (replicated, plain)))
        for rows in (7, 3) if place == "nowhere" else (7,):
            (x,), (y,) = regression(rows, seed=rows, steps=1)
            got, want = (model.eval_step(state, x, y) for model in (replicated, plain))
            assert want.loss > 0
            assert_close((got.loss, got.predictions), (want.loss, want.predictions))
            assert_close(*(spec.eval_metric_ops["error"].result() for spec in (got, want)))


@pytest.mark.quick
@pytest.mark.parametrize("place", ["nowhere", "cond", "vmap", "grad"])
def test_weighted_losses_in_micro_batches_are_right_or_refused(place):
    (x,), (y,) = regression(8, steps=1)
    plain, replicated = map(est.transform, (weighted_model_fn(place), replicate(weighted_model_fn(place, 2), 2)))
    with jax.numpy_dtype_promotion("standard"):
        state = plain.init(jax.random.key(0), x, y)
        if place in ("nowhere", "grad"):
            assert_close(replicated.train_step(state, x, y)[0].variables, plain.train_step(state, x, y)[0].variables)
            return
        message = "A loss with weights for each example is computed within a function that jax traces apart"
        with pytest.raises(ValueError, match=message + ".*`accumulate_steps`.*reduce them outside"):
            replicated.train_step(state, x, y)
