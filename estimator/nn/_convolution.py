"""Convolutions with kernels that the caller has."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float


def conv1d(
    value: ArrayLike,
    filters: ArrayLike,
    stride: int,
    padding: str,
    use_cudnn_on_gpu: bool | None = None,
    data_format: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Convolution over one dimension, as `tf.nn.conv1d`; `est.layers.conv1d` has variables of its own.

    >>> conv1d(jnp.arange(5.0)[None, :, None], jnp.ones((3, 1, 1)), 2, "VALID").ravel()
    Array([3., 9.], dtype=float32)

    Args:
      value: `[batch, steps, channels]`, floating, or with "NCW" `[batch, channels, steps]`.
      filters: `[width, channels, outputs]`.
      stride: an integer.
      padding: "SAME" or "VALID".
      data_format: "NWC" or "NCW"; None is "NWC". TensorFlow's older "NHWC" and "NCHW" are taken, too.
      use_cudnn_on_gpu, name: without effect here.

    Raises:
      ValueError: shapes, stride, padding or data_format do not fit.
    """
    known = {None: "NWC", "NHWC": "NWC", "NCHW": "NCW"}.get(data_format, data_format)
    return _convolve("conv1d", value, filters, (stride,), padding, known or "", 1)


def conv2d(
    input: ArrayLike,
    filter: ArrayLike,
    strides: int | Sequence[int],
    padding: str,
    use_cudnn_on_gpu: bool | None = True,
    data_format: str = "NHWC",
    dilations: int | Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
    """Convolution over two dimensions, as `tf.nn.conv2d`; `est.layers.conv2d` has variables of its own.

    >>> conv2d(jnp.ones((1, 4, 4, 3)), jnp.ones((2, 2, 3, 8)), [1, 2, 2, 1], "SAME").shape
    (1, 2, 2, 8)

    Args:
      input: `[batch, height, width, channels]`, floating, or with "NCHW" `[batch, channels, height, width]`.
      filter: `[height, width, channels, outputs]`.
      strides: four integers in the order of `data_format`, 1 for batch and channels; or two, of height and width,
        or one for both.
      padding: "SAME" or "VALID".
      data_format: "NHWC" or "NCHW".
      dilations: as `strides`.
      use_cudnn_on_gpu, name: without effect here.

    Raises:
      ValueError: shapes, strides, padding, data_format or dilations do not fit.
    """
    return _convolve("conv2d", input, filter, strides, padding, data_format, dilations)


def depthwise_conv2d(
    input: ArrayLike,
    filter: ArrayLike,
    strides: int | Sequence[int],
    padding: str,
    rate: int | Sequence[int] | None = None,
    name: str | None = None,
    data_format: str | None = None,
) -> jax.Array:
    """Convolution of each channel with kernels of its own, as `tf.nn.depthwise_conv2d`.

    >>> depthwise_conv2d(jnp.ones((1, 4, 4, 3)), jnp.ones((2, 2, 3, 2)), [1, 1, 1, 1], "VALID").shape
    (1, 3, 3, 6)

    Args:
      input: as in `conv2d`.
      filter: `[height, width, channels, multiplier]`. The outputs of one channel stand next to each other.
      strides, padding: as in `conv2d`.
      rate: the dilations of height and width, or None.
      data_format: "NHWC" or "NCHW"; None is "NHWC".
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: as in `conv2d`.
    """
    return _convolve("depthwise_conv2d", input, filter, strides, padding, data_format or "NHWC", rate or 1)


def separable_conv2d(
    input: ArrayLike,
    depthwise_filter: ArrayLike,
    pointwise_filter: ArrayLike,
    strides: int | Sequence[int],
    padding: str,
    rate: int | Sequence[int] | None = None,
    name: str | None = None,
    data_format: str | None = None,
) -> jax.Array:
    """`depthwise_conv2d`, then a convolution with a kernel of one place, as `tf.nn.separable_conv2d`.

    >>> x, depthwise, pointwise = jnp.ones((1, 4, 4, 3)), jnp.ones((2, 2, 3, 2)), jnp.ones((1, 1, 6, 8))
    >>> separable_conv2d(x, depthwise, pointwise, [1, 1, 1, 1], "VALID").shape
    (1, 3, 3, 8)

    Args:
      depthwise_filter: `[height, width, channels, multiplier]`.
      pointwise_filter: `[1, 1, channels * multiplier, outputs]`.
      input, strides, padding, rate, data_format: as in `depthwise_conv2d`.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: as in `conv2d`.
    """
    layout = data_format or "NHWC"
    x = _convolve("depthwise_conv2d", input, depthwise_filter, strides, padding, layout, rate or 1)
    return _convolve("separable_conv2d", x, pointwise_filter, 1, "VALID", layout, 1)


def _convolve(
    caller: str,
    x: ArrayLike,
    kernel: ArrayLike,
    strides: int | Sequence[int],
    padding: str,
    data_format: str,
    dilations: int | Sequence[int],
) -> jax.Array:
    """The convolution over the dimensions of `data_format` that are neither N nor C."""
    x, kernel = as_float(x), as_float(kernel)
    spatial = "W" if caller == "conv1d" else "HW"
    if data_format not in (formats := (f"N{spatial}C", f"NC{spatial}")):
        raise ValueError(f"`est.nn.{caller}` needs {' or '.join(formats)} as `data_format`; got {data_format!r}.")
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"`est.nn.{caller}` needs 'SAME' or 'VALID' as `padding`; got {padding!r}.")
    depthwise = caller == "depthwise_conv2d"
    channels = x.shape[data_format.index("C")] if x.ndim == kernel.ndim == len(data_format) else None
    if channels is None or kernel.shape[-2] != channels:
        raise ValueError(
            f"`est.nn.{caller}` needs an input of shape [{', '.join(data_format)}] and a kernel of shape "
            f"[{', '.join(spatial)}, C, {'multiplier' if depthwise else 'outputs'}] with the same C; got shapes "
            f"{x.shape} and {kernel.shape}."
        )
    if depthwise:
        # One group for each channel.
        kernel = kernel.reshape(*kernel.shape[:-2], 1, -1)
    dtype = jnp.result_type(x, kernel)
    return jax.lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        _spatial(caller, "strides", strides, data_format),
        padding,
        rhs_dilation=_spatial(caller, "dilations", dilations, data_format),
        dimension_numbers=(data_format, f"{spatial}IO", data_format),
        feature_group_count=channels if depthwise else 1,
    )


def _spatial(caller: str, name: str, given: int | Sequence[int], data_format: str) -> tuple[int, ...]:
    """The numbers of the spatial dimensions, of one for each dimension, of one for each spatial one, or of one."""
    numbers = np.atleast_1d(np.asarray(given))
    spatial = [i for i, letter in enumerate(data_format) if letter not in "NC"]
    one = numbers
    if numbers.shape == (len(data_format),):
        one = numbers[spatial]
        if numbers.prod() != one.prod():
            one = numbers[:0]  # a stride of batch or channels
    if one.shape not in ((1,), (len(spatial),)) or one.dtype.kind not in "iu" or one.min() < 1:
        raise ValueError(
            f"`est.nn.{caller}` needs a positive integer as `{name}`, or {len(spatial)}, or one for each letter of "
            f"{data_format}, 1 for N and C; got {given!r}."
        )
    return tuple(int(i) for i in np.broadcast_to(one, (len(spatial),)))
