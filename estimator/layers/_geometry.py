"""The geometry of a kernel: sizes, strides, padding, and the dimension of the channels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from estimator.layers import _cpu_forms
from estimator.layers._layer import channels_are_last, check_not_empty, padding_of, sizes


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The checked arguments of a convolution.

    Attributes:
      layer: the name of the function that has them.
      kernel_size, strides, dilation_rate: by spatial dimension.
      padding: "VALID" or "SAME".
      channels_last: whether the inputs' last dimension has the channels, or their second one.
    """

    layer: str
    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation_rate: tuple[int, ...]
    padding: str
    channels_last: bool

    @classmethod
    def of(
        cls,
        layer: str,
        ndim: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int],
        padding: str,
        data_format: str,
        dilation_rate: int | Sequence[int] = 1,
    ) -> Geometry:
        strides = sizes(layer, "strides", strides, ndim)
        dilation_rate = sizes(layer, "dilation_rate", dilation_rate, ndim)
        if max(strides) > 1 and max(dilation_rate) > 1:
            raise ValueError(
                f"`est.layers.{layer}` got strides={strides} and dilation_rate={dilation_rate}, which do not go "
                "together. Set one of them to 1."
            )
        return cls(
            layer,
            sizes(layer, "kernel_size", kernel_size, ndim),
            strides,
            dilation_rate,
            padding_of(layer, padding),
            channels_are_last(layer, data_format),
        )

    def channels(self, x: jax.Array) -> int:
        return x.shape[-1 if self.channels_last else 1]

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        spatial = "HW"[-len(self.kernel_size) :]
        inputs = f"N{spatial}C" if self.channels_last else f"NC{spatial}"
        return inputs, f"{spatial}IO", inputs

    def convolve(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        # An abstract run gives the output's shape by XLA's own rule and computes nothing.
        check_not_empty(self.layer, "kernel_size", self.kernel_size, x, jax.eval_shape(self._by_xla, x, kernel))
        # A kernel of one place is a product of matrices, for which XLA's convolution takes 3 times as long on a CPU.
        if max(self.kernel_size) > 1:
            return self._by_xla(x, kernel)

        def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
            form = functools.partial(_cpu_forms.convolve_points, strides=self.strides)
            return self._with_channels_last(form, x, kernel)

        return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=self._by_xla)

    def convolve_depthwise(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The convolution of each channel with its own kernels, `[*kernel_size, channels, multiplier]`."""

        def by_xla(x: jax.Array, kernel: jax.Array) -> jax.Array:
            # One group for each channel: XLA needs the outputs of one channel next to each other, as in TensorFlow's
            # kernel.
            return self._by_xla(x, kernel.reshape(*self.kernel_size, 1, -1), groups=self.channels(x))

        def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
            form = functools.partial(
                _cpu_forms.depthwise_convolve,
                strides=self.strides,
                dilation=self.dilation_rate,
                padding=self.padding,
            )
            return self._with_channels_last(form, x, kernel)

        check_not_empty(self.layer, "kernel_size", self.kernel_size, x, jax.eval_shape(by_xla, x, kernel))
        return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=by_xla)

    def _by_xla(self, x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation_rate,
            dimension_numbers=self.dimension_numbers,
            feature_group_count=groups,
        )

    def convolve_transposed(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The gradient of the convolution that `kernel`, `[*kernel_size, filters, channels]`, belongs to."""

        def by_xla(x: jax.Array, kernel: jax.Array) -> jax.Array:
            # `transpose_kernel`, since TensorFlow's layer is the gradient of a convolution; by default jax does not
            # flip the kernel.
            return jax.lax.conv_transpose(
                x, kernel, self.strides, self.padding, dimension_numbers=self.dimension_numbers, transpose_kernel=True
            )

        def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
            form = functools.partial(_cpu_forms.convolve_transposed, strides=self.strides, padding=self.padding)
            return self._with_channels_last(form, x, kernel)

        # Without strides there are no zeros between the inputs, so that XLA's convolution is fast on a CPU, too.
        if max(self.strides) == 1:
            return by_xla(x, kernel)
        return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=by_xla)

    def _with_channels_last(
        self, form: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, kernel: jax.Array
    ) -> jax.Array:
        if self.channels_last:
            return form(x, kernel)
        return jnp.moveaxis(form(jnp.moveaxis(x, 1, -1), kernel), -1, 1)

    def add_bias(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        return x + (bias if self.channels_last else bias.reshape(-1, *(1,) * (x.ndim - 2)))
