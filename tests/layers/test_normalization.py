"""Layer normalization has a derivative of its own, with the numbers of jax's, of any order and direction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.model_fns import predicting
from testing.towers import predict

import estimator as est


def by_layer(x, scale=True):
    return predict(predicting(lambda x: est.layers.layer_norm(x, scale=scale)), x).predictions


def without_scale(x):
    return by_layer(x, scale=False)


def by_hand(x, epsilon=1e-12):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.square(x - mean).mean(-1, keepdims=True) + epsilon)


@pytest.mark.quick
@pytest.mark.parametrize(
    "derive",
    [jax.jacrev, jax.jacfwd, lambda f: jax.jacfwd(jax.jacrev(f)), lambda f: jax.jacrev(jax.jacrev(jax.remat(f)))],
    ids=["reverse", "forward", "forward of reverse", "reverse of reverse, with remat"],
)
def test_the_derivatives_of_layer_norm_are_those_of_its_formula(derive):
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (3, 4), jnp.float64)
        weights = jax.random.normal(jax.random.key(1), (3, 4), jnp.float64)
        got, without, want = (
            derive(lambda x, f=f: (jnp.sin(f(x)) * weights).sum(-1))(x) for f in (by_layer, without_scale, by_hand)
        )
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(without, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, epsilon", [(jnp.bfloat16, 1e-12), (jnp.float16, 1e-3)])
def test_half_precision_is_normalized_in_float32(dtype, epsilon):
    x = 0.03 * jax.random.normal(jax.random.key(0), (3, 4))
    got = by_layer(x.astype(dtype))
    assert got.dtype == dtype
    want = by_hand(x.astype(dtype).astype(jnp.float32), epsilon)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0.02, atol=0.02)
