"""The forward function of towers transformed: the same results, whatever a model_fn does; what transforms may do."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import everything
from testing.towers import assert_close, mlp_model_fn, regression, replicate, started

import estimator as est

TRANSFORMS = {
    "checkpoint": jax.checkpoint,
    "segments": functools.partial(est.checkpoint_segments, segments=5),
    "named": jax.named_scope("a tower"),
}


@functools.cache
def model_of(name, accumulate_steps):
    model_fn = everything(accumulate_steps)
    return est.transform(replicate(model_fn, 2, tower_transform=TRANSFORMS.get(name)))


@functools.cache
def trained(name, accumulate_steps):
    model, (x, y) = model_of(name, accumulate_steps), regression(8, steps=2)
    state = model_of("none", accumulate_steps).init(jax.random.key(0), x[0], y[0])
    state, spec = model.train_loop(state, (x, y))
    return state._replace(key=jax.random.key_data(state.key)), values(spec)


def values(spec):
    return spec.loss, spec.predictions, spec.reported, jax.tree.leaves(spec.eval_metric_ops)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accumulate_steps"), [("segments", 1), ("checkpoint", 2)])
def test_training_is_that_without_a_transform(name, accumulate_steps):
    want = trained("none", accumulate_steps)
    assert np.isfinite(want[1][0]).all()
    assert_close(trained(name, accumulate_steps), want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_evaluation_and_prediction_are_those_without_a_transform():
    state, _ = trained("none", 1)
    state = state._replace(key=jax.random.wrap_key_data(state.key))
    x, y = (batches[0, :7] for batches in regression(8, steps=1))  # which do not divide by the towers
    for step in (lambda model: model.eval_step(state, x, y), lambda model: model.predict_step(state, x)):
        got, want = (values(step(model_of(name, 1))) for name in ("segments", "none"))
        assert_close(got, want, rtol=1e-6, atol=1e-6)


def jaxpr_of_training(transform):
    x, y = regression(4)
    model, state = started(replicate(mlp_model_fn(optax.sgd(0.1)), 2, tower_transform=transform), x[0], y[0])
    return model, state, jax.make_jaxpr(model.train_step)(state, x[0], y[0])


@pytest.mark.slow
def test_the_gradients_match_the_transformed_function():
    def tanhs(transform):
        return str(jaxpr_of_training(transform)[2]).count("tanh ")

    assert tanhs(None) == 1
    assert tanhs(jax.checkpoint) == 2  # once more, in the backward pass
    assert tanhs(functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)) == 1


def test_without_a_transform_the_program_equals_one_with_a_transform_that_does_nothing():
    x, y = regression(4)
    programs = []
    for transform in (None, lambda forward: forward):
        model, state, _ = jaxpr_of_training(transform)
        programs.append(jax.jit(model.train_step).lower(state, x[0], y[0]).as_text())
    assert programs[0] == programs[1]


def test_a_scope_names_the_operations_of_towers():
    model, state, _ = jaxpr_of_training(TRANSFORMS["named"])
    x, y = regression(4)
    text = jax.jit(model.train_step).lower(state, x[0], y[0]).as_text(debug_info=True)
    assert re.search(r"a tower\)?/tanh", text)


@pytest.mark.parametrize("wrong", [3, "checkpoint", {"policy": None}])
def test_what_is_no_function_is_refused(wrong):
    with pytest.raises(TypeError, match="tower_transform must be a function that takes a function, such as.*; got "):
        replicate(mlp_model_fn(optax.sgd(0.1)), 2, tower_transform=wrong)


def on_outputs(change):
    """A transform whose function returns what `change` makes of what the forward function returns."""
    return lambda forward: lambda *args: change(forward(*args))


def each(change):
    return on_outputs(lambda outputs: jax.tree.map(change, outputs))


BREAKING = {
    TypeError: [(lambda forward: None, "must return a function, .* forward function it made None")],
    ValueError: [
        (lambda forward: lambda *args: [], "did not call the tower's forward function"),
        (on_outputs(lambda x: x[0]), r"must return what .*; at \[0\]\[0\] it returned nothing instead of float32\[\]"),
        (each(lambda x: x[None]), r"at \[0\]\[0\] it returned float32\[1\] instead of float32\[\]"),
        (each(lambda x: x.astype(jnp.bfloat16)), r"it returned bfloat16\[\] instead of float32\[\]"),
        (on_outputs(list), "pytree of the same structure, shapes and dtypes; it returned another structure"),
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize("error, transform, message", refused.rows(BREAKING))
def test_a_transform_that_breaks_the_function_is_refused(transform, error, message):
    with pytest.raises(error, match=message):
        jaxpr_of_training(transform)


def test_a_transform_gets_what_is_differentiated_first_and_the_losses_first():
    seen = []

    def watching(forward):
        def run(trained, rest, batch):
            losses, others = forward(trained, rest, batch)
            seen.append(([x.shape for x in losses], jax.tree.map(jnp.shape, batch), sorted(trained[0])))
            return losses, others

        return run

    jaxpr_of_training(watching)
    assert seen == [([()], ((((2, 3)), (2,)),), ["hidden/b", "hidden/w", "v"])]
