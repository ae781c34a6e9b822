"""A replicated model_fn is a model_fn: wrappers, scopes, optimizers of one's own, hooks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import predicting, zeros
from testing.towers import FOUR, assert_close, mlp_model_fn, one_step, regression, replicate, started

import estimator as est


@pytest.mark.slow
@pytest.mark.covers("12 returned fn")
def test_a_replicated_model_fn_can_be_wrapped():
    inner = replicate(mlp_model_fn(optax.sgd(0.1)), 4)

    def wrapped(features, labels, mode, params):
        spec = inner(features, labels, mode)
        bias = params["bias"]
        shifted = spec.predictions | {"shifted": spec.predictions["output"] + bias}
        metrics = spec.eval_metric_ops | {"mean_shifted": est.metrics.mean(shifted["shifted"])}
        return spec._replace(predictions=shifted, eval_metric_ops=metrics, loss=2 * spec.loss)

    x, y = regression(8)
    plain = est.transform(mlp_model_fn(optax.sgd(0.1)))
    model, state = started(wrapped, x[0], y[0], params={"bias": 1.0})
    want_state, want = plain.train_step(plain.init(jax.random.key(0), x[0], y[0]), x[0], y[0])
    after, spec = model.train_step(state, x[0], y[0])
    assert_close(after.variables, want_state.variables)
    for got in (spec, model.eval_step(state, x[0][:7], y[0][:7])):
        shifted = want.predictions["output"][: len(got.predictions["shifted"])] + 1
        assert_close(got.predictions["shifted"], shifted)
        assert_close(got.eval_metric_ops["mean_shifted"].result(), shifted.mean())
    assert_close(spec.loss, 2 * want.loss)


tower_predictions = predicting(lambda x: est.get_variable("w", (), initializer=jax.nn.initializers.constant(2.0)) * x)


def test_a_wrapped_model_fn_predicts():
    inner = replicate(tower_predictions, 4)

    def wrapped(features, labels, mode):
        spec = inner(features, labels, mode)
        return spec._replace(predictions={"half": spec.predictions / 2}, export_outputs=None)

    model = est.transform(wrapped)
    x = np.arange(7, dtype=np.float32)
    spec = model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x)
    assert_close(spec.predictions, {"half": jnp.asarray(x)})
    assert_close(spec.export_outputs["serving_default"].outputs, {"half": jnp.asarray(x)})


def test_a_scope_around_a_replicated_model_fn_prefixes_its_variables():
    inner = replicate(tower_predictions, 2)

    def wrapped(features, labels, mode):
        with est.variable_scope("model"):
            return inner(features, labels, mode)

    model, state = started(wrapped, FOUR, mode="infer")
    assert set(state.variables) == {"model/w"}
    assert_close(model.predict_step(state, FOUR).predictions, jnp.asarray(2 * FOUR))


@pytest.mark.quick
def test_a_wrapper_that_minimizes_first_has_slots_of_its_own():
    inner = replicate(mlp_model_fn(optax.adam(0.1)), 2)

    def wrapped(features, labels, mode):
        loss = jnp.mean((zeros("bias") - labels) ** 2)
        own = est.Optimizer(optax.sgd(0.5, momentum=0.9)).minimize(loss, var_list=["bias"])
        spec = inner(features, labels, mode)
        return spec._replace(train_op=est.group(own, spec.train_op))

    x, y = regression(8)
    state, _ = one_step(wrapped, x[0], y[0])
    assert set(state.slots) == {"optimizer", "optimizer_1"}
    want, _ = one_step(mlp_model_fn(optax.adam(0.1)), x[0], y[0])
    assert_close(state.variables, {"bias": np.float32(y[0].mean()), **want.variables}, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_hooks_are_taken_once():
    hook = est.Hook()

    def model_fn(features, labels, mode):
        spec = mlp_model_fn(optax.sgd(0.1))(features, labels, mode)
        return spec._replace(training_hooks=[hook], evaluation_hooks=[hook])

    x, y = regression(8, steps=1)
    model, state = started(replicate(model_fn, 4), x[0], y[0])
    _, trained = model.train_step(state, x[0], y[0])
    evaluated = model.eval_step(state, x[0][:7], y[0][:7])
    for spec in (trained, evaluated):
        assert spec.training_hooks == spec.evaluation_hooks == (hook,)
