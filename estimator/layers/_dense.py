"""The densely connected layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.layers import _cpu_forms
from estimator.layers._layer import (
    Activation,
    Initializer,
    Regularizer,
    activate,
    as_input,
    check_count,
    layer_scope,
    refuse_constraints,
    zeros,
)
from estimator.variables._variable_scope import Reuse
from estimator.variables._variables import get_variable


def dense(
    inputs: ArrayLike,
    units: int,
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
    """`activation(inputs @ kernel + bias)`, as `tf.layers.dense`, with its names and shapes of variables.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     hidden = est.layers.dense(features, 8, jax.nn.relu)
    ...     return est.EstimatorSpec(mode, predictions=est.layers.dense(hidden, 2))
    >>> state = est.transform(model_fn).init(jax.random.key(0), jnp.ones((5, 3)), mode="infer")
    >>> for name, value in sorted(state.variables.items()):
    ...     print(name, value.shape)
    dense/bias (8,)
    dense/kernel (3, 8)
    dense_1/bias (2,)
    dense_1/kernel (8, 2)

    What follows holds for all layers with variables.

    A layer without a name has its kind's, made unique in the enclosing scope: `dense`, `dense_1`, ... The numbers
    count within one run of the model_fn, so they are the same in every mode and on every tower. A scope that is opened
    again counts from the beginning, as in TensorFlow.

    Args:
      inputs: shape `[..., width]`, floating. Variables have their dtype; under an `est.Policy` float32.
      units: the width of the output.
      activation: a function, such as `jax.nn.relu`, or the name of one, such as "relu"; or None.
      use_bias: whether to add a bias.
      kernel_initializer, bias_initializer: `fn(key, shape, dtype)`, as in `jax.nn.initializers`. If None, as the
        scope says, or else glorot uniform.
      kernel_regularizer, bias_regularizer: of `est.regularizers`, for `est.losses.get_regularization_loss`.
      activity_regularizer, kernel_constraint, bias_constraint: must be None.
      trainable: whether optimizers change the variables by default.
      name: of the scope of the variables, within the scopes around the call.
      reuse: True: takes the variables of an earlier layer of that name; `est.AUTO_REUSE`: if there is one.

    Raises:
      TypeError: the inputs are not floating.
      ValueError: an argument is wrong, or there is a layer of that name already.
      RuntimeError: no model_fn is running.
    """
    refuse_constraints("dense", activity_regularizer, kernel_constraint, bias_constraint)
    units = check_count("dense", "units", units)
    with layer_scope("dense", name, reuse):
        x = as_input("dense", inputs, at_least=2)
        shape = (x.shape[-1], units)
        kernel = get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=kernel_regularizer)
        x = multiply(x, kernel)
        if use_bias:
            x = x + get_variable("bias", (units,), x.dtype, bias_initializer, trainable, regularizer=bias_regularizer)
    return activate("dense", activation, x)


def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # With two dimensions it is one product of matrices already; with more, XLA's takes up to twice as long on a CPU.
    if x.ndim == 2:
        return x @ kernel
    return jax.lax.platform_dependent(x, kernel, cpu=_cpu_forms.multiply, default=jnp.matmul)
