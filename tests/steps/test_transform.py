"""transform: a model_fn as pure, compiled functions of a state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, zeros

import estimator as est

X = jnp.arange(6.0).reshape(3, 2)
Y = jnp.ones((3, 1))
KEY = jax.random.key(0)


class Noisy:
    """A model with a variable that it writes itself and with randomness; counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, features, labels, mode):
        self.traces += 1
        w = est.get_variable("w", (2, 1))
        est.get_variable("seen", (), jnp.int32, trainable=False)
        est.assign_add("seen", features.shape[0])
        predictions = features @ w
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=predictions)
        noise = 0.1 * jax.random.normal(est.make_rng(), predictions.shape)
        loss = est.losses.mean_squared_error(labels, predictions + noise)
        train_op = est.Optimizer(optax.adam(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, predictions, loss, train_op, {"mean": est.metrics.mean(predictions)})


def fresh(donate=False):
    model_fn = Noisy()
    model = est.transform(model_fn, donate=donate)
    return model_fn, model, model.init(KEY, X, Y)


@functools.cache
def ready():
    """One model and its state for all tests that trace nothing else: a state is never changed."""
    return fresh()[1:]


def numbers(tree):
    as_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return jax.tree.map(lambda x: np.array(as_data(x)), tree)


def assert_equal(a, b, rtol=0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), numbers(a), numbers(b))


def test_a_state_is_a_pytree_of_all_that_training_changes():
    model, state = ready()
    assert isinstance(state, est.State)
    assert set(state.variables) == {"w", "seen"}
    assert set(state.slots) == {"optimizer"}
    assert (state.global_step.dtype, state.global_step.shape, state.global_step) == (jnp.int32, (), 0)
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    copied = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))
    # Batches of numpy are as good.
    assert_equal(model.train_step(copied, np.asarray(X), np.asarray(Y))[0], model.train_step(state, X, Y)[0])


def test_steps_are_pure():
    model, state = ready()
    before = numbers(state)
    first, spec = model.train_step(state, X, Y)
    again, same = model.train_step(state, X, Y)
    assert_equal(first, again)
    assert_equal(spec, same)
    model.eval_step(state, X, Y)
    model.predict_step(state, X)
    model.train_loop(state, [(X, Y)] * 2)
    assert_equal(numbers(state), before)
    assert (first.global_step, first.variables["seen"]) == (1, 3)
    np.testing.assert_array_equal(X, jnp.arange(6.0).reshape(3, 2))


def test_evaluating_and_predicting_change_nothing_and_return_concrete_values():
    model, state = ready()
    spec = model.eval_step(state, X, Y)
    assert isinstance(spec.loss, jax.Array) and spec.loss.shape == ()
    assert spec.mode == est.ModeKeys.EVAL and spec.train_op is None
    np.testing.assert_allclose(spec.predictions, X @ state.variables["w"])
    np.testing.assert_allclose(spec.eval_metric_ops["mean"].result(), spec.predictions.mean())
    predicted = model.predict_step(state, X)
    np.testing.assert_allclose(predicted.predictions, spec.predictions)
    assert predicted.mode == est.ModeKeys.PREDICT
    assert set(predicted.export_outputs) == {"serving_default"}


def test_randomness_changes_with_the_step_and_not_with_the_call():
    model, state = ready()
    losses = [model.eval_step(state._replace(global_step=jnp.int32(i)), X, Y).loss for i in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.quick
@pytest.mark.parametrize("donate", [True, False])
def test_donate_takes_the_memory_of_the_state_and_only_then(donate):
    model, state = fresh(donate)[1:] if donate else ready()
    for train, batch in ((model.train_step, (X, Y)), (model.train_loop, ([(X, Y)],))):
        leaves = jax.tree.leaves(state)
        state, _ = train(state, *batch)
        assert [leaf.is_deleted() for leaf in leaves] == [donate] * len(leaves)
        assert not any(leaf.is_deleted() for leaf in (X, Y, KEY, *jax.tree.leaves(state)))
    model.eval_step(state, X, Y)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_second_call_traces_and_compiles_nothing_and_another_shape_is_traced_again(caplog):
    model_fn, model, state = fresh()

    def all_calls(state):
        model.init(KEY, X, Y)
        model.abstract_init(X, Y)
        state, _ = model.train_step(state, X, Y)
        state, _ = model.train_loop(state, (jnp.stack([X] * 3), jnp.stack([Y] * 3)))
        model.eval_step(state, X, Y)
        model.predict_step(state, X)
        return state

    state = all_calls(state)
    traces = model_fn.traces
    with jax.log_compiles():
        for _ in range(3):
            state = all_calls(state)
    assert model_fn.traces == traces
    assert not [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]

    state, _ = model.train_step(state, X[:2], Y[:2])
    assert model_fn.traces == traces + 1
    assert state.variables["seen"] == 4 * (1 + 3) * 3 + 2


def test_nothing_runs_before_the_first_call():
    model_fn = Noisy()
    model = est.transform(model_fn)
    assert model_fn.traces == 0
    model.abstract_init(X, Y)
    assert model_fn.traces == 1


@pytest.mark.quick
def test_a_loop_equals_its_steps():
    model, state = ready()
    batches = [(X + i, Y * i) for i in range(4)]
    looped, specs = model.train_loop(state, batches)
    stacked = tuple(jnp.stack(part) for part in zip(*batches, strict=True))
    jax.tree.map(np.testing.assert_array_equal, numbers(model.train_loop(state, stacked)), numbers((looped, specs)))
    losses, predictions = [], []
    for batch in batches:
        state, spec = model.train_step(state, *batch)
        losses.append(spec.loss)
        predictions.append(spec.predictions)
    assert_equal(looped, state, rtol=2e-5)
    np.testing.assert_allclose(specs.loss, losses, rtol=2e-5)
    np.testing.assert_allclose(specs.predictions, predictions, rtol=2e-5, atol=1e-6)
    assert {leaf.shape for leaf in jax.tree.leaves(specs.eval_metric_ops)} == {(4,)}


def test_a_loop_over_features_alone():
    model_fn = minimizing(lambda x, y: jnp.mean((zeros("w") - x) ** 2), est.Optimizer(optax.sgd(0.5)))
    model = est.transform(model_fn)
    batches = [jnp.full(2, float(i)) for i in range(3)]
    state = model.init(KEY, batches[0])
    for form in (batches, [(batch, None) for batch in batches], (jnp.stack(batches), None)):
        assert model.train_loop(state, form)[0].variables["w"] == 2


def test_bad_batches_for_a_loop():
    model, state = ready()
    with pytest.raises(ValueError, match="`train_loop` needs at least one batch; got an empty list"):
        model.train_loop(state, [])
    for bad in (X, (X, Y, Y), iter([(X, Y)])):
        with pytest.raises(TypeError, match=f"`train_loop` takes a list .*; got {type(bad).__name__}"):
            model.train_loop(state, bad)
    with pytest.raises(ValueError, match=r"same batch size .*got features: 3, labels: 2"):
        model.train_loop(state, [(X, Y[:2])])
    with pytest.raises(TypeError, match="must be arrays of numbers; got features of dtype <U1"):
        model.train_loop(state, [(np.array(["a"] * 3), Y)])
    with pytest.raises(ValueError, match="same"):
        model.train_loop(state, [(X, Y), (X[:2], Y[:2])])


def test_legacy_keys_are_wrapped():
    model, state = ready()
    legacy = model.init(jax.random.PRNGKey(0), X, Y)
    assert_equal(legacy, state)
    assert legacy.key.dtype == state.key.dtype


@pytest.mark.parametrize("key", [0, None, np.zeros(2, np.uint32), jnp.zeros(2)])
def test_other_keys_are_errors(key):
    with pytest.raises(TypeError, match=r"`init` needs a PRNG key such as `jax.random.key\(0\)`; got"):
        ready()[0].init(key, X, Y)


@pytest.mark.quick
@pytest.mark.usefixtures("users_compiler")
def test_init_in_each_mode_gives_the_same_variables():
    _, model, trained = fresh()
    for mode in ("eval", "infer"):
        state = model.init(KEY, X, None if mode == "infer" else Y, mode=mode)
        assert_equal(state.variables, trained.variables)
        assert set(state.slots) == set()
    with pytest.raises(ValueError, match="mode must be one of"):
        model.init(KEY, X, Y, mode="bogus")


def test_training_a_state_that_was_not_made_for_it_is_an_error():
    model, _ = ready()
    state = model.init(KEY, X, mode="infer")
    with pytest.raises(ValueError, match=r"no slots for the optimizer 'optimizer', only \[\]"):
        model.train_step(state, X, Y)


def test_abstract_init_tells_what_init_returns():
    model, state = ready()
    for mode in est.ModeKeys:
        like = model.abstract_init(X, Y, mode=mode)
        made = model.init(KEY, X, Y, mode=mode)
        assert jax.tree.structure(like) == jax.tree.structure(made)
        for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(made), strict=True):
            assert isinstance(a, jax.ShapeDtypeStruct)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_steps_can_be_transformed_further():
    model, state = ready()
    jitted, spec = jax.jit(model.train_step)(state, X, Y)
    plain, same = model.train_step(state, X, Y)
    assert_equal(jitted, plain, rtol=1e-5)
    np.testing.assert_allclose(spec.loss, same.loss, rtol=1e-5)
    gradient = jax.grad(lambda w: model.eval_step(state._replace(variables=state.variables | {"w": w}), X, Y).loss)
    assert gradient(state.variables["w"]).shape == (2, 1)


def test_a_failed_run_leaves_no_frame_open():
    def model_fn(features, mode):
        with est.variable_scope("a"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        est.transform(model_fn).init(KEY, X, mode="infer")
    with pytest.raises(RuntimeError, match="must be called inside a model_fn"):
        est.get_variable("w", ())
    fresh()
