"""Operations that layers write otherwise on a CPU: the numbers of XLA's own, and every kind of derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.model_fns import predicting
from testing.towers import started

import estimator as est
from estimator.layers import _cpu_forms
from estimator.layers._geometry import Geometry

WINDOWS = [  # inputs without the batch and channels, pool_size, strides, padding
    ((9, 7), (3, 3), (2, 2), "same"),
    ((9, 7), (3, 2), (1, 3), "valid"),
    ((6, 5), (1, 1), (2, 2), "valid"),
    ((4, 30), (2, 26), (1, 1), "valid"),
]


def by_xla(x, size, strides, padding):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, *size, 1), (1, *strides, 1), padding.upper())


def images(spatial, dtype=np.float32):
    """Images of a few different values, so that most windows have several largest ones."""
    return np.random.default_rng(0).integers(-2, 3, (2, *spatial, 3)).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spatial, size, strides, padding, dtype",
    [*((*window, np.float32) for window in WINDOWS), (*WINDOWS[0], jnp.bfloat16)],
)
def test_the_values_and_the_gradient_of_equal_values_are_those_of_xla(spatial, size, strides, padding, dtype):
    x = images(spatial, dtype)
    ours = functools.partial(est.layers.max_pooling2d, pool_size=size, strides=strides, padding=padding)
    theirs = functools.partial(by_xla, size=size, strides=strides, padding=padding)
    cotangents = np.random.default_rng(1).integers(-3, 4, jax.eval_shape(theirs, x).shape).astype(dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def values(pool, x):
        output, pull_back = jax.vjp(pool, x)
        return output, *pull_back(cotangents)

    jax.tree.map(np.testing.assert_array_equal, values(ours, x), values(theirs, x))


def test_nan_is_the_largest_value():
    x = images((4, 4))
    x[0, 1, 2, 0] = x[1, 0, 0, 1] = np.nan
    np.testing.assert_array_equal(est.layers.max_pooling2d(x, 2, 2), by_xla(x, (2, 2), (2, 2), "valid"))


CONVOLUTIONS = [  # kernel_size, strides, dilation of the depthwise one, padding
    ((3, 3), (1, 1), (1, 1), "SAME"),
    ((3, 2), (2, 2), (1, 1), "VALID"),
    ((4, 4), (2, 2), (1, 1), "SAME"),
    ((1, 5), (3, 2), (1, 1), "SAME"),
    ((1, 5), (3, 2), (1, 1), "VALID"),
    ((2, 3), (1, 1), (2, 1), "SAME"),
]


NUMBERS = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def depthwise_by_xla(x, kernel, strides, dilation, padding):
    kernel, groups = kernel.reshape(*kernel.shape[:2], 1, -1), {"feature_group_count": x.shape[-1]}
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, rhs_dilation=dilation, **NUMBERS, **groups)


def transposed_by_xla(x, kernel, strides, padding):
    return jax.lax.conv_transpose(x, kernel, strides, padding, transpose_kernel=True, **NUMBERS)


def assert_same_with_gradients(ours, theirs, *arguments, tolerance=1e-5):
    def values(function):
        output, pull_back = jax.vjp(function, *arguments)
        return output, pull_back(jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape))

    for a, b in zip(*(jax.tree.leaves(jax.jit(values, static_argnums=0)(f)) for f in (ours, theirs)), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=tolerance, atol=tolerance)


@pytest.mark.quick
@pytest.mark.parametrize("size, strides, dilation, padding", [*CONVOLUTIONS[1:4], CONVOLUTIONS[5]])
def test_a_depthwise_convolution_has_the_numbers_and_gradients_of_xla(size, strides, dilation, padding):
    x = jax.random.normal(jax.random.key(0), (2, 7, 6, 3))
    kernel = jax.random.normal(jax.random.key(1), (*size, 3, 2))
    window = {"strides": strides, "dilation": dilation, "padding": padding}
    ours = functools.partial(_cpu_forms.depthwise_convolve, **window)
    assert_same_with_gradients(ours, functools.partial(depthwise_by_xla, **window), x, kernel)


ADDED, GATHERED = (1, 5), (4, 2)  # the filters and channels for which a transposed convolution has either form


@pytest.mark.quick
@pytest.mark.parametrize("form, window", [(ADDED, 1), (ADDED, 3), (GATHERED, 0), (GATHERED, 2), (GATHERED, 4)])
def test_a_transposed_convolution_has_the_numbers_and_gradients_of_xla(form, window):
    (filters, channels), (size, strides, _, padding) = form, CONVOLUTIONS[window]
    x = jax.random.normal(jax.random.key(0), (2, 4, 5, channels))
    kernel = jax.random.normal(jax.random.key(1), (*size, filters, channels))
    window = {"strides": strides, "padding": padding}
    ours = functools.partial(_cpu_forms.convolve_transposed, **window)
    assert_same_with_gradients(ours, functools.partial(transposed_by_xla, **window), x, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, form", [(jnp.bfloat16, ADDED), (jnp.float16, GATHERED)])
def test_a_transposed_convolution_rounds_half_precision_once(dtype, form):
    filters, channels = form
    x = jax.random.normal(jax.random.key(0), (2, 4, 5, channels), dtype)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, filters, channels), dtype)
    half = _cpu_forms.convolve_transposed(x, kernel, (2, 2), "SAME")
    full = _cpu_forms.convolve_transposed(x.astype(jnp.float32), kernel.astype(jnp.float32), (2, 2), "SAME")
    assert half.dtype == dtype
    np.testing.assert_allclose(half.astype(jnp.float32), full, rtol=jnp.finfo(dtype).eps, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    "strides, dtype, data_format",
    [((2, 3), np.float32, "channels_first"), ((2, 1), jnp.bfloat16, "channels_last")],
)
def test_a_kernel_of_one_place_has_the_numbers_and_gradients_of_xla(strides, data_format, dtype):
    geometry = Geometry.of("conv2d", 2, 1, strides, "same", data_format)
    x = jax.random.normal(jax.random.key(0), (2, 7, 6, 3) if data_format == "channels_last" else (2, 3, 7, 6), dtype)
    kernel = jax.random.normal(jax.random.key(1), (1, 1, 3, 2), dtype)
    window = {"window_strides": strides, "padding": "SAME", "dimension_numbers": geometry.dimension_numbers}
    theirs = functools.partial(jax.lax.conv_general_dilated, **window)
    tolerance = 1e-5 if dtype == np.float32 else 0.02
    assert_same_with_gradients(geometry.convolve, theirs, x, kernel, tolerance=tolerance)


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (0, 3, 4)])
def test_a_product_of_many_dimensions_has_the_numbers_and_gradients_of_xla(shape):
    x, kernel = jax.random.normal(jax.random.key(0), shape), jax.random.normal(jax.random.key(1), (4, 6))
    assert_same_with_gradients(_cpu_forms.multiply, jnp.matmul, x, kernel)


def pooled(x):
    return est.layers.max_pooling2d(x, 3, 2, "same")


def pooled_by_xla(x):
    return by_xla(x, (3, 3), (2, 2), "same")


def convolved(x):
    kernel = x[:, :3, :2].reshape(3, 2, 2, 1)
    geometry = Geometry.of("separable_conv2d", 2, (3, 2), 1, "same", "channels_last")
    up = Geometry.of("conv2d_transpose", 2, (3, 2), 2, "same", "channels_last")
    x = up.convolve_transposed(geometry.convolve_depthwise(x, kernel), kernel.reshape(3, 2, 1, 2))
    return up.convolve_transposed(x, kernel.reshape(3, 2, 2, 1))


def convolved_by_xla(x):
    kernel = x[:, :3, :2].reshape(3, 2, 2, 1)
    x = depthwise_by_xla(x, kernel, (1, 1), (1, 1), "SAME")
    x = transposed_by_xla(x, kernel.reshape(3, 2, 1, 2), (2, 2), "SAME")
    return transposed_by_xla(x, kernel.reshape(3, 2, 2, 1), (2, 2), "SAME")


def upsampled(x):
    kernel = jnp.ones((3, 2, 3, 2))
    x = _cpu_forms.depthwise_convolve(x, kernel, strides=(1, 1), dilation=(1, 1), padding="SAME")
    x = _cpu_forms.convolve_transposed(x, jnp.ones((3, 2, 1, 6)), strides=(2, 2), padding="SAME")
    return _cpu_forms.convolve_transposed(x, jnp.ones((3, 2, 2, 1)), strides=(2, 2), padding="SAME")


@pytest.mark.quick
@pytest.mark.parametrize("ours", [pooled, upsampled])
def test_batches_of_any_size_can_be_exported(ours):
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 7, 6, 3"), "float32")
    exported = jax.export.export(jax.jit(ours), platforms=["cpu"])(shape)
    x = images((7, 6))
    np.testing.assert_allclose(exported.call(x), ours(x), rtol=1e-5)


POOLED, CONVOLVED = (pooled, pooled_by_xla), (convolved, convolved_by_xla)


@pytest.mark.quick
@pytest.mark.parametrize(
    "derive, both",
    [
        (lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()), POOLED),
        (lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()), CONVOLVED),
        (lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1], CONVOLVED),
        (lambda f: lambda x: jax.vmap(jax.grad(jax.remat(f)))(jnp.stack([x, 2 * x])), CONVOLVED),
    ],
    ids=["second derivative of a pool", "second derivative", "forward of reverse", "vmap of remat"],
)
def test_all_transformations_work(derive, both):
    with jax.enable_x64(True):  # rounding in float32 is up to 1e-3 of second derivatives
        x = jax.random.normal(jax.random.key(0), (1, 5, 4, 2), jnp.float64)
        results = [jax.jit(derive(lambda x, f=f: (jnp.sin(f(x)) ** 2).sum()))(x) for f in both]
        np.testing.assert_allclose(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_float64_stays_float64():
    with jax.enable_x64(True):
        assert est.layers.max_pooling2d(images((4, 4), np.float64), 2, 2).dtype == jnp.float64
        assert convolved(jnp.ones((1, 5, 4, 2))).dtype == jnp.float64


def pointed(x):
    geometry = Geometry.of("conv2d", 2, 1, 2, "same", "channels_last")
    return geometry.convolve(x, x[:, :2, 0].reshape(1, 1, 2, 2))


def texts_of(function, x):
    """The programs of a CPU and of an accelerator."""
    traced = jax.jit(function).trace(x)
    return [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")]


@pytest.mark.parametrize(
    "function, operation",
    [(pooled, "reduce_window"), (convolved, "stablehlo.convolution"), (pointed, "stablehlo.convolution")],
)
def test_a_cpu_runs_another_form_and_an_accelerator_the_operation_of_xla(function, operation):
    cpu, cuda = texts_of(function, jnp.ones((1, 5, 4, 2)))
    assert operation not in cpu and operation in cuda


def test_a_gradient_of_layer_norm_is_products_of_matrices_on_a_cpu_alone():
    x = jnp.ones((3, 4))
    model, state = started(predicting(est.layers.layer_norm), x, mode="infer")
    cpu, cuda = texts_of(jax.grad(lambda x: model.predict_step(state, x).predictions.sum()), x)
    assert "dot_general" in cpu and "dot_general" not in cuda
