"""The transposed convolution."""

from __future__ import annotations

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
    refuse(
        layer,
        activity_regularizer=activity_regularizer,
        kernel_constraint=kernel_constraint,
        bias_constraint=bias_constraint,
    )
    with layer_scope(layer, layer, name, reuse):
        geometry = Geometry.of(layer, 2, kernel_size, strides, padding, data_format)
        x = as_input(layer, inputs, 4)
        filters = check_count(layer, "filters", filters)
        shape = (*geometry.kernel_size, filters, geometry.channels(x))
        kernel = get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=kernel_regularizer)
        x = geometry.convolve_transposed(x, kernel)
        if use_bias:
            bias = get_variable("bias", (filters,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
            x = add_bias(x, bias, geometry.channels_last)
    return activate(layer, activation, x)
