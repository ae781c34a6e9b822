"""A function cut into parts that are computed again: the same values and gradients, in less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import estimator as est


def net(params, x, ids, key):
    """Of what models are made of: products, keys, integers, jitted, scanned and custom derivatives, constants."""
    x = jax.nn.relu(x @ params["w"][0])
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    x = jnp.where(kept, x, jnp.zeros_like(x)) + params["table"][ids]
    top = x.argmax(-1)
    x = jax.jit(jnp.sin)(x @ params["w"][1]) * np.float32(2.0)
    x, sums = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, params["w"])
    x = x + jax.nn.one_hot(top, 4)
    roots = jnp.sqrt(jax.lax.stop_gradient(x) * 0.0)  # of infinite derivative
    logits = jax.nn.gelu(x) - jax.nn.logsumexp(x, axis=-1, keepdims=True)
    loss = (jax.lax.stop_gradient(sums.mean()) * logits**2).mean()
    return loss, {"top": top, "roots": roots, "half": logits.astype(jnp.bfloat16), "is": kept, "empty": x[:0]}


def arguments():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4, 4)).astype(np.float32), "table": rng.normal(size=(5, 4)).astype(np.float32)}
    return jax.tree.map(jnp.asarray, (params, rng.normal(size=(6, 4)).astype(np.float32), np.arange(6) % 5)) + (
        jax.random.key(1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("segments", [2, 1000])
def test_values_and_gradients_match_the_function(segments):
    def both(fn):
        return jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))(*arguments())

    got, want = both(est.checkpoint_segments(net, segments)), both(net)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.isfinite(np.asarray(one, np.float32)).all()
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("segments", [None, 2])
def test_a_function_that_computes_nothing_is_left_as_it_is(segments):
    fn = est.checkpoint_segments(lambda x, y: {"y": y, "one": 1.0}, segments)
    assert fn(jnp.float32(2), jnp.float32(3)) == {"y": 3, "one": 1}


def test_values_of_an_outer_trace_may_be_closed_over():
    def loss(cut, scale, x):
        return cut(lambda x: jnp.sin(jnp.sin(x * scale) * scale).sum())(x)

    def gradients(cut):
        return jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)(cut, 1.5, jnp.arange(3.0))

    for one, other in zip(gradients(lambda fn: est.checkpoint_segments(fn, 3)), gradients(lambda fn: fn), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


@pytest.mark.slow
def test_under_vmap_and_without_jit_gradients_are_the_same():
    weights, x = list(jnp.linspace(-1.0, 1.0, 12).reshape(3, 2, 2)), jnp.arange(8.0).reshape(4, 2)

    def gradients(fn):
        one = jax.grad(fn, argnums=1)
        return one(weights, x[0]), jax.jit(jax.vmap(one, in_axes=(None, 0)))(weights, x)

    for one, other in zip(gradients(est.checkpoint_segments(layers, 2)), gradients(layers), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


def compiled(fn, depth, segments=None):
    weights, x = jax.ShapeDtypeStruct((depth, 16, 16), jnp.float32), jax.ShapeDtypeStruct((512, 16), jnp.float32)
    return jax.jit(jax.grad(lambda weights, x: fn(list(weights), x))).lower(weights, x).compile()


def test_what_is_computed_again_stays_in_the_compiled_program():
    def tanhs(fn):
        return len(re.findall(r" tanh\(", compiled(fn, 12).as_text()))

    assert tanhs(layers) == 12
    assert tanhs(est.checkpoint_segments(layers, 3)) >= 18
    assert tanhs(jax.checkpoint(layers)) == 12  # which the compiler for CPU devices takes out


@pytest.mark.slow
def test_memory_grows_with_the_root_of_the_depth():
    def activations(fn, depth):
        return compiled(fn, depth).memory_analysis().temp_size_in_bytes / (512 * 16 * 4)

    assert activations(layers, 36) > 36
    assert activations(est.checkpoint_segments(layers), 36) < 2 * 36**0.5 + 4


def test_names_of_scopes_stay():
    def scoped(x):
        with jax.named_scope("inner"):
            return jnp.sin(x).sum()

    text = jax.jit(jax.grad(est.checkpoint_segments(scoped))).lower(jnp.ones(3)).as_text(debug_info=True)
    assert "inner" in text


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="takes a function of pytrees of arrays; got 3"):
        est.checkpoint_segments(3)
    for wrong in (0, -1, 2.0, True, "all"):
        with pytest.raises(ValueError, match="needs segments, an integer of at least 1, or None; got"):
            est.checkpoint_segments(layers, wrong)
