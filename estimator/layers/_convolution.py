"""Convolutions: plain ones, the transposed one and the separable one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from estimator.layers._geometry import Geometry
from estimator.layers._layer import (
    Activation,
    Initializer,
    Regularizer,
    activate,
    as_input,
    check_count,
    layer_scope,
    refuse,
    refuse_constraints,
    zeros,
)
from estimator.variables._variable_scope import Reuse
from estimator.variables._variables import get_variable


def conv1d(
    inputs: ArrayLike,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: int | Sequence[int] = 1,
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = zeros,
    kernel_regularizer: Regularizer = None,
    bias_regularizer: Regularizer = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
) -> jax.Array:
    """Convolution over one dimension, as `tf.layers.conv1d`, for inputs `[batch, steps, channels]`.

    Its variables are `conv1d/kernel`, of shape `[*kernel_size, channels, filters]`, and `conv1d/bias`; the arguments
    are the ones of `conv2d`, with one integer instead of two.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=est.layers.conv1d(features, 8, 3, padding="same"))
    >>> model, x = est.transform(model_fn), jnp.ones((2, 10, 4))
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(state.variables["conv1d/kernel"].shape, model.predict_step(state, x).predictions.shape)
    (3, 4, 8) (2, 10, 8)
    """
    refuse_constraints("conv1d", activity_regularizer, kernel_constraint, bias_constraint)
    with layer_scope("conv1d", name, reuse):
        geometry = Geometry.of("conv1d", 1, kernel_size, strides, padding, data_format, dilation_rate)
        x = as_input("conv1d", inputs, 3)
        filters = check_count("conv1d", "filters", filters)
        # As in TensorFlow, the shape of the kernel does not depend on `data_format`, and so neither does a checkpoint.
        shape = (*geometry.kernel_size, geometry.channels(x), filters)
        kernel = get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=kernel_regularizer)
        x = geometry.convolve(x, kernel)
        if use_bias:
            bias = get_variable("bias", (filters,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
            x = geometry.add_bias(x, bias)
    return activate("conv1d", activation, x)


def conv2d(
    inputs: ArrayLike,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: int | Sequence[int] = (1, 1),
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = zeros,
    kernel_regularizer: Regularizer = None,
    bias_regularizer: Regularizer = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
) -> jax.Array:
    """Convolution over two dimensions, as `tf.layers.conv2d`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     x = est.layers.conv2d(features, 8, 3, padding="same", activation=jax.nn.relu)
    ...     return est.EstimatorSpec(mode, predictions=est.layers.max_pooling2d(x, 2, 2))
    >>> model, x = est.transform(model_fn), jnp.ones((2, 10, 10, 3))
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(state.variables["conv2d/kernel"].shape, model.predict_step(state, x).predictions.shape)
    (3, 3, 3, 8) (2, 5, 5, 8)

    Args:
      inputs: `[batch, height, width, channels]`, or with "channels_first" `[batch, channels, height, width]`.
      filters: the number of output channels.
      kernel_size, strides, dilation_rate: an integer, or two. Strides and a dilation do not go together, as in
        TensorFlow.
      padding: "valid" or "same".
      data_format: "channels_last" or "channels_first".
      activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer,
        activity_regularizer, kernel_constraint, bias_constraint, trainable, name, reuse: as in `dense`.

    Raises:
      as `dense`.
    """
    refuse_constraints("conv2d", activity_regularizer, kernel_constraint, bias_constraint)
    with layer_scope("conv2d", name, reuse):
        geometry = Geometry.of("conv2d", 2, kernel_size, strides, padding, data_format, dilation_rate)
        x = as_input("conv2d", inputs, 4)
        filters = check_count("conv2d", "filters", filters)
        shape = (*geometry.kernel_size, geometry.channels(x), filters)
        kernel = get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=kernel_regularizer)
        x = geometry.convolve(x, kernel)
        if use_bias:
            bias = get_variable("bias", (filters,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
            x = geometry.add_bias(x, bias)
    return activate("conv2d", activation, x)


def conv2d_transpose(
    inputs: ArrayLike,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = zeros,
    kernel_regularizer: Regularizer = None,
    bias_regularizer: Regularizer = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
) -> jax.Array:
    """The transposed convolution over two dimensions, as `tf.layers.conv2d_transpose`.

    Its kernel has the shape `[*kernel_size, filters, channels]`. With "same" the output is `strides` times as large
    as the inputs. The arguments are as in `conv2d`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, est.layers.conv2d_transpose(features, 8, 3, strides=2, padding="same"))
    >>> model, x = est.transform(model_fn), jnp.ones((2, 5, 5, 3))
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(state.variables["conv2d_transpose/kernel"].shape, model.predict_step(state, x).predictions.shape)
    (3, 3, 8, 3) (2, 10, 10, 8)
    """
    layer = "conv2d_transpose"
    refuse_constraints(layer, activity_regularizer, kernel_constraint, bias_constraint)
    with layer_scope(layer, name, reuse):
        geometry = Geometry.of(layer, 2, kernel_size, strides, padding, data_format)
        x = as_input(layer, inputs, 4)
        filters = check_count(layer, "filters", filters)
        # Filters before channels, as in TensorFlow: the layer is the gradient of a convolution from its outputs to its
        # inputs.
        shape = (*geometry.kernel_size, filters, geometry.channels(x))
        kernel = get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=kernel_regularizer)
        x = geometry.convolve_transposed(x, kernel)
        if use_bias:
            bias = get_variable("bias", (filters,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
            x = geometry.add_bias(x, bias)
    return activate(layer, activation, x)


def separable_conv2d(
    inputs: ArrayLike,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: int | Sequence[int] = (1, 1),
    depth_multiplier: int = 1,
    activation: Activation = None,
    use_bias: bool = True,
    depthwise_initializer: Initializer = None,
    pointwise_initializer: Initializer = None,
    bias_initializer: Initializer = zeros,
    depthwise_regularizer: Regularizer = None,
    pointwise_regularizer: Regularizer = None,
    bias_regularizer: Regularizer = None,
    activity_regularizer: Any = None,
    depthwise_constraint: Any = None,
    pointwise_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
) -> jax.Array:
    """A convolution of each channel by itself, then a 1 x 1 convolution, as `tf.layers.separable_conv2d`.

    Its variables are `separable_conv2d/depthwise_kernel`, `[*kernel_size, channels, depth_multiplier]`,
    `pointwise_kernel`, `[1, 1, channels * depth_multiplier, filters]`, and `bias`. The arguments are as in `conv2d`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, est.layers.separable_conv2d(features, 8, 3, depth_multiplier=2))
    >>> state = est.transform(model_fn).init(jax.random.key(0), jnp.ones((2, 5, 5, 3)), mode="infer")
    >>> for name, value in sorted(state.variables.items()):
    ...     print(name, value.shape)
    separable_conv2d/bias (8,)
    separable_conv2d/depthwise_kernel (3, 3, 3, 2)
    separable_conv2d/pointwise_kernel (1, 1, 6, 8)
    """
    layer = "separable_conv2d"
    refuse(
        layer,
        activity_regularizer=activity_regularizer,
        depthwise_constraint=depthwise_constraint,
        pointwise_constraint=pointwise_constraint,
        bias_constraint=bias_constraint,
    )
    with layer_scope(layer, name, reuse):
        geometry = Geometry.of(layer, 2, kernel_size, strides, padding, data_format, dilation_rate)
        x = as_input(layer, inputs, 4)
        filters = check_count(layer, "filters", filters)
        channels, each = geometry.channels(x), check_count(layer, "depth_multiplier", depth_multiplier)
        variable = functools.partial(get_variable, dtype=x.dtype, trainable=trainable)
        shape = (*geometry.kernel_size, channels, each)
        # Both kernels, then the bias: the order in which TensorFlow creates them, which `trainable_variables` shows.
        depthwise = variable(
            "depthwise_kernel", shape, initializer=depthwise_initializer, regularizer=depthwise_regularizer
        )
        shape = (1, 1, channels * each, filters)
        pointwise = variable(
            "pointwise_kernel", shape, initializer=pointwise_initializer, regularizer=pointwise_regularizer
        )
        x = geometry.convolve_depthwise(x, depthwise)
        # Strides and dilation belong to the depthwise part; the 1 x 1 part sees its output place by place.
        points = dataclasses.replace(geometry, kernel_size=(1, 1), strides=(1, 1), dilation_rate=(1, 1))
        x = points.convolve(x, pointwise)
        if use_bias:
            bias = get_variable("bias", (filters,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
            x = geometry.add_bias(x, bias)
    return activate(layer, activation, x)
