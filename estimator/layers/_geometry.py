"""Where a kernel is applied: sizes, strides, padding, and which dimension has the channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

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

    def convolve(self, x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
        output = jax.lax.conv_general_dilated(
            x,
            kernel,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation_rate,
            dimension_numbers=self.dimension_numbers,
            feature_group_count=groups,
        )
        check_not_empty(self.layer, "kernel_size", self.kernel_size, x, output)
        return output

    def convolve_transposed(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The gradient of the convolution that `kernel`, `[*kernel_size, filters, channels]`, belongs to."""
        return jax.lax.conv_transpose(
            x, kernel, self.strides, self.padding, dimension_numbers=self.dimension_numbers, transpose_kernel=True
        )

    def add_bias(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        return x + (bias if self.channels_last else bias.reshape(-1, *(1,) * (x.ndim - 2)))
