"""Normalization: by the moments of a batch, or of each example."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._frame import current_frame
from estimator.layers._layer import (
    Activation,
    Initializer,
    Regularizer,
    activate,
    as_input,
    is_training,
    layer_scope,
    ones,
    refuse,
    zeros,
)
from estimator.variables._variable_scope import Reuse
from estimator.variables._variables import assign, get_variable


def batch_normalization(
    inputs: ArrayLike,
    axis: int | Sequence[int] = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Initializer = zeros,
    gamma_initializer: Initializer = ones,
    moving_mean_initializer: Initializer = zeros,
    moving_variance_initializer: Initializer = ones,
    beta_regularizer: Regularizer = None,
    gamma_regularizer: Regularizer = None,
    beta_constraint: Any = None,
    gamma_constraint: Any = None,
    training: bool | None = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
    renorm: bool = False,
    renorm_clipping: Any = None,
    renorm_momentum: float = 0.99,
    fused: bool | None = None,
    virtual_batch_size: int | None = None,
    adjustment: Any = None,
    *,
    synchronized: bool = False,
) -> jax.Array:
    """Batch normalization, as `tf.layers.batch_normalization`.

    In training it normalizes by the mean and variance of the batch, and moves `moving_mean` and `moving_variance`
    towards them; there are no update ops to run. In the other modes it normalizes by those two.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     x = est.layers.batch_normalization(features, momentum=0.5)
    ...     return est.EstimatorSpec(mode, predictions=x, loss=x.sum(), train_op=est.group())
    >>> model, x = est.transform(model_fn), jnp.array([[2.0], [6.0]])
    >>> state, spec = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(spec.predictions.ravel().round(2))
    [-1.  1.]
    >>> print(*(state.variables[f"batch_normalization/moving_{name}"].item() for name in ("mean", "variance")))
    2.0 2.5

    On towers each normalizes by the moments of its own rows, as in TensorFlow, and `moving_mean` and `moving_variance`
    become the mean of the towers' ones; the mean of their variances is smaller than the variance of all rows together.
    With `synchronized=True` all towers normalize by the moments of all rows, as one device would: that takes two sums
    over towers for each layer, and two of their gradients. The micro-batches of `accumulate_steps` are never put
    together.

    Args:
      inputs: any shape, floating. float16 and bfloat16 are normalized in float32.
      axis: the dimension that keeps its statistics, mostly of the channels; 1 for "channels_first". Or several.
      momentum: how much of `moving_mean` and `moving_variance` stays in each step.
      epsilon: added to the variance.
      center, scale: whether to add `beta`, and to multiply by `gamma`.
      beta_initializer, gamma_initializer, moving_mean_initializer, moving_variance_initializer, beta_regularizer,
        gamma_regularizer, trainable, name, reuse: as in `dense`.
      training: whether to use the moments of the batch. By default in TRAIN, where TensorFlow's default is False in
        all modes. `moving_mean` and `moving_variance` change in TRAIN only.
      fused: as TensorFlow's fused kernel: whether the moving variance is `n / (n - 1)` times the variance of the
        batch, unbiased. If None, it is if the inputs have four dimensions, and `axis` is the last or the second.
      beta_constraint, gamma_constraint, renorm, renorm_clipping, virtual_batch_size, adjustment: must not be given.
      renorm_momentum: has no effect without `renorm`.
      synchronized: whether towers normalize by the moments of all their rows together.

    Raises:
      as `dense`.
    """
    layer = "batch_normalization"
    refuse(
        layer,
        beta_constraint=beta_constraint,
        gamma_constraint=gamma_constraint,
        renorm=renorm,
        renorm_clipping=renorm_clipping,
        virtual_batch_size=virtual_batch_size,
        adjustment=adjustment,
    )
    training = is_training(layer, training)
    x = as_input(layer, inputs, at_least=2)
    kept = _axes(layer, "axis", axis, x.ndim)
    reduced = tuple(i for i in range(x.ndim) if i not in kept)
    sizes = tuple(x.shape[i] for i in kept)
    # No ones before trailing dimensions, so that XLA gets the same operations as of a norm written by hand.
    along = tuple(x.shape[i] if i in kept else 1 for i in range(x.ndim) if i >= min(kept))
    # Statistics in float32 at least: bfloat16 has a precision of 8 bits, and would round away the steps of a moving
    # average, a hundredth of the difference at the default momentum.
    dtype = x.dtype if x.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    # As in TensorFlow, whose fused op for images keeps a moving average of the unbiased variance, without `fused` of
    # the biased one. Both normalize the batch by the biased one.
    if fused is None:
        fused = x.ndim == 4 and kept in ((1,), (3,))
    with layer_scope(layer, name, reuse):
        gamma = beta = None
        if scale:
            gamma = get_variable("gamma", sizes, dtype, gamma_initializer, trainable, regularizer=gamma_regularizer)
        if center:
            beta = get_variable("beta", sizes, dtype, beta_initializer, trainable, regularizer=beta_regularizer)
        moving_mean = get_variable("moving_mean", sizes, dtype, moving_mean_initializer, trainable=False)
        moving_variance = get_variable("moving_variance", sizes, dtype, moving_variance_initializer, trainable=False)
        wide = x.astype(dtype)
        if training:
            mean, variance, rows = _moments(wide, reduced, along, synchronized)
            moved = variance * (rows / max(rows - 1, 1)) if fused else variance
            _move("moving_mean", moving_mean, mean.reshape(sizes), momentum)
            _move("moving_variance", moving_variance, moved.reshape(sizes), momentum)
        else:
            mean, variance = moving_mean.reshape(along), moving_variance.reshape(along)
        return _normalize(wide, mean, variance, gamma, beta, along, epsilon).astype(x.dtype)


def layer_norm(
    inputs: ArrayLike,
    center: bool = True,
    scale: bool = True,
    activation_fn: Activation = None,
    reuse: Reuse = None,
    variables_collections: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    begin_norm_axis: int = 1,
    begin_params_axis: int = -1,
    scope: str | None = None,
) -> jax.Array:
    """Layer normalization, as `tf.contrib.layers.layer_norm`: its variables are `LayerNorm/beta` and `LayerNorm/gamma`.

    Each example is normalized by its own mean and variance, to whose second one 1e-12 is added, as there.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=est.layers.layer_norm(features))
    >>> model, x = est.transform(model_fn), jnp.array([[1.0, 3.0], [10.0, 20.0]])
    >>> print(model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions)
    [[-1.  1.]
     [-1.  1.]]

    Args:
      inputs: `[batch, ...]`, floating.
      center, scale: whether to add `beta`, and to multiply by `gamma`.
      activation_fn: as `activation` in `dense`.
      reuse, trainable: as in `dense`.
      variables_collections, outputs_collections: must be None.
      begin_norm_axis: the first of the dimensions over which the moments are taken.
      begin_params_axis: the first of the dimensions of `beta` and `gamma`.
      scope: as `name` in `dense`; TensorFlow calls it so here.
    """
    refuse("layer_norm", variables_collections=variables_collections, outputs_collections=outputs_collections)
    x = as_input("layer_norm", inputs, at_least=2)
    (first,), (first_param,) = (
        _axes("layer_norm", name, axis, x.ndim)
        for name, axis in (("begin_norm_axis", begin_norm_axis), ("begin_params_axis", begin_params_axis))
    )
    shape = x.shape[first_param:]
    dtype = x.dtype if x.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    with layer_scope("layer_norm", scope, reuse, "LayerNorm"):
        beta = get_variable("beta", shape, dtype, zeros, trainable) if center else None
        gamma = get_variable("gamma", shape, dtype, ones, trainable) if scale else None
    # TensorFlow's values: 1e-12 would be zero in float16.
    epsilon = 1e-3 if x.dtype == jnp.float16 else 1e-12
    wide = x.astype(dtype)
    axes = tuple(range(first, x.ndim))
    if gamma is None:
        output = _standardize(wide, axes, epsilon)
    elif gamma.ndim > len(axes):
        output = _standardize(wide, axes, epsilon) * gamma
    else:
        output = _scale(wide, gamma, axes, epsilon)
    if beta is not None:
        output = output + beta
    return activate("layer_norm", activation_fn, output.astype(x.dtype))


# A function of its own, which jax traces once for all layers of a shape.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _scale(x: jax.Array, gamma: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    """The inputs, standardized, times `gamma`."""
    return jax.lax.platform_dependent(
        x,
        gamma,
        cpu=lambda x, gamma: _scale_on_cpu(x, gamma, axes, epsilon),
        default=lambda x, gamma: _standardize(x, axes, epsilon) * gamma,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    """The inputs less their mean, divided by their standard deviation."""
    return _standardize_with_moments(x, axes, epsilon)[0]


@_standardize.defjvp
def _standardize_jvp(
    axes: tuple[int, ...], epsilon: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # jax's own rule differentiates the mean within the variance, too, which is zero. Of the inputs, not of the output,
    # so that the output is not kept: forward and backward take 0.75 to 1.0 times as long as by that rule on a CPU.
    (x,), (tangent,) = primals, tangents
    output, mean, factor = _standardize_with_moments(x, axes, epsilon)
    along = factor**3 * ((x - mean) * tangent).mean(axes, keepdims=True)
    return output, factor * (tangent - tangent.mean(axes, keepdims=True)) - (x - mean) * along


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _scale_on_cpu(x: jax.Array, gamma: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    return _standardize(x, axes, epsilon) * gamma


@_scale_on_cpu.defjvp
def _scale_on_cpu_jvp(
    axes: tuple[int, ...],
    epsilon: float,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    # In the shape of the inputs: of reshaped ones, XLA computes the output again for each of those that take it.
    output = _scale_on_cpu(*primals, axes, epsilon)
    # As matrices, with a row for each example that is normalized, and outer products, whose gradients are products of
    # matrices and vectors: XLA keeps one array instead of two to four.
    shape = output.shape[axes[0] :]
    x, moved = (each.reshape(-1, math.prod(shape)) for each in (primals[0], tangents[0]))
    gamma, moved_gamma = (jnp.broadcast_to(each, shape).reshape(1, -1) for each in (primals[1], tangents[1]))
    _, mean, factor = _standardize_with_moments(x, (1,), epsilon)
    along = factor**3 * ((x - mean) * moved).mean(1, keepdims=True)
    tangent = factor * gamma * moved - (factor * moved.mean(1, keepdims=True)) @ gamma
    return output, (tangent - (x - mean) * (along @ gamma - factor @ moved_gamma)).reshape(output.shape)


def _standardize_with_moments(
    x: jax.Array, axes: tuple[int, ...], epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    mean = x.mean(axes, keepdims=True)
    factor = jax.lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + epsilon)
    return (x - mean) * factor, mean, factor


def _axes(layer: str, name: str, axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """The dimensions, counted from the first one."""
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    if not axes or any(isinstance(i, bool) or not isinstance(i, int) or not -ndim <= i < ndim for i in axes):
        raise ValueError(
            f"`est.layers.{layer}` needs a dimension of the inputs as `{name}`, from {-ndim} to {ndim - 1}; got "
            f"{axis!r}."
        )
    return tuple(sorted({i % ndim for i in axes}))


def _moments(
    x: jax.Array, axes: tuple[int, ...], shape: tuple[int, ...], synchronized: bool
) -> tuple[jax.Array, jax.Array, int]:
    """Mean and variance, reshaped to `shape`, and of how many numbers they are."""
    replica = current_frame("est.layers.batch_normalization").replica
    average = replica.mean if synchronized else lambda moment: moment
    mean = average(x.mean(axes).reshape(shape))
    # From deviations, since E[x^2] - E[x]^2 cancels where the mean is large; if synchronized, from the mean over all
    # towers.
    variance = average(jnp.square(x - mean).mean(axes).reshape(shape))
    rows = math.prod(x.shape[i] for i in axes)
    return mean, variance, rows * replica.towers if synchronized else rows


def _move(name: str, average: jax.Array, value: jax.Array, momentum: float) -> None:
    # As TensorFlow computes it; a sum of two products rounds in another way.
    assign(name, average - (average - value) * (1 - momentum))


def _normalize(
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array | None,
    beta: jax.Array | None,
    shape: tuple[int, ...],
    epsilon: float,
) -> jax.Array:
    """Normalizes the inputs, times `gamma` plus `beta`, each reshaped to `shape`."""
    factor = jax.lax.rsqrt(variance + epsilon)
    if gamma is not None:
        # Multiplied into the small factor: one product of the size of the inputs instead of two.
        factor = factor * gamma.reshape(shape)
    x = (x - mean) * factor
    return x if beta is None else x + beta.reshape(shape)
