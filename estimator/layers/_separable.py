"""The separable convolution: one of each channel by itself, then one of single points over all channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from estimator.core._variable_scope import Reuse
from estimator.core._variables import get_variable
from estimator.layers._geometry import Geometry
from estimator.layers._layer import (
    Activation,
    Initializer,
    Regularizer,
    activate,
    add_bias,
    as_input,
    check_count,
    layer_scope,
    refuse,
    zeros,
)


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
    with layer_scope(layer, layer, name, reuse):
        geometry = Geometry.of(layer, 2, kernel_size, strides, padding, data_format, dilation_rate)
        x = as_input(layer, inputs, 4)
        filters = check_count(layer, "filters", filters)
        channels, each = geometry.channels(x), check_count(layer, "depth_multiplier", depth_multiplier)
        depthwise = get_variable(
            "depthwise_kernel",
            (*geometry.kernel_size, channels, each),
            x.dtype,
            depthwise_initializer,
            trainable,
            regularizer=depthwise_regularizer,
        )
        pointwise = get_variable(
            "pointwise_kernel",
            (1, 1, channels * each, filters),
            x.dtype,
            pointwise_initializer,
            trainable,
            regularizer=pointwise_regularizer,
        )
        by_channel = depthwise.reshape(*geometry.kernel_size, 1, channels * each)
        x = geometry.convolve(x, by_channel, groups=channels)
        points = dataclasses.replace(geometry, kernel_size=(1, 1), strides=(1, 1), dilation_rate=(1, 1))
        x = points.convolve(x, pointwise)
        if use_bias:
            bias = get_variable("bias", (filters,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
            x = add_bias(x, bias, geometry.channels_last)
    return activate(layer, activation, x)
