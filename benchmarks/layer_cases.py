"""The layers that `benchmarks/layers.py` measures: each by `est.layers` or `est.losses`, by hand in jax, in PyTorch."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est

DIMENSIONS = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC")}
CHANNELS_FIRST = {3: ("NCW", "WIO", "NCW"), 4: ("NCHW", "HWIO", "NCHW")}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on inputs.

    Attributes:
      name: of the layer, with its arguments.
      inputs: arrays.
      layers: makes the output of the inputs, within a model_fn.
      by_hand: makes it of the variables by name and the inputs.
      torch: makes, of the module `torch`, a function without arguments and the tensors that gradients are taken of.
        Its inputs have channels first, as its users have them. None where PyTorch has no such operation.
    """

    name: str
    inputs: tuple[np.ndarray, ...]
    layers: Callable[..., jax.Array]
    by_hand: Callable[..., jax.Array]
    torch: Callable[[Any], tuple[Callable[[], Any], list[Any]]] | None = None

    @property
    def shapes(self) -> str:
        return ", ".join("x".join(map(str, x.shape)) for x in self.inputs)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def moved(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its channels first."""
    return shape[0], shape[-1], *shape[1:-1]


def pooling(kind: str, shape: tuple[int, ...], size: int, strides: int, padding: str = "valid") -> Case:
    ndim = len(shape) - 2
    window = ((1, *[size] * ndim, 1), (1, *[strides] * ndim, 1), padding.upper())
    layer = getattr(est.layers, f"{kind}_pooling{ndim}d")

    def by_hand(v, x):
        if kind == "max":
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window)
        places = jax.lax.reduce_window(jnp.ones((1, *x.shape[1:-1], 1)), 0.0, jax.lax.add, *window)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, *window) / places

    def in_torch(torch):
        x = torch.randn(moved(shape))
        pool = getattr(torch.nn.functional, f"{'max' if kind == 'max' else 'avg'}_pool{ndim}d")
        return lambda: pool(x, size, strides, padding=size // 2 if padding == "same" else 0), [x]

    name = f"{kind}_pooling{ndim}d {size}, strides {strides}, {padding}"
    return Case(name, (normal(*shape),), lambda x: layer(x, size, strides, padding), by_hand, in_torch)


def convolution(
    shape: tuple[int, ...],
    filters: int,
    size: int,
    strides: int = 1,
    dilation: int = 1,
    data_format: str = "channels_last",
) -> Case:
    ndim, channels = len(shape) - 2, shape[-1]
    layer = getattr(est.layers, f"conv{ndim}d")
    last = data_format == "channels_last"
    numbers = (DIMENSIONS if last else CHANNELS_FIRST)[len(shape)]
    arguments = {"strides": strides, "dilation_rate": dilation, "data_format": data_format, "padding": "same"}

    def by_hand(v, x):
        window = ([strides] * ndim, "SAME")
        y = jax.lax.conv_general_dilated(
            x, v[f"conv{ndim}d/kernel"], *window, rhs_dilation=[dilation] * ndim, dimension_numbers=numbers
        )
        bias = v[f"conv{ndim}d/bias"]
        return y + (bias if last else bias.reshape(-1, *[1] * ndim))

    def in_torch(torch):
        leaves = [torch.randn(moved(shape)), torch.randn(filters, channels, *[size] * ndim), torch.randn(filters)]
        function = getattr(torch.nn.functional, f"conv{ndim}d")
        options = {"stride": strides, "dilation": dilation, "padding": (size - 1) * dilation // 2}
        return lambda: function(*leaves, **options), leaves

    words = [f"strides {strides}" * (strides > 1), f"dilation {dilation}" * (dilation > 1), "" if last else data_format]
    name = ", ".join([f"conv{ndim}d {size}, {filters} filters", *filter(None, words)])
    x = normal(*(shape if last else moved(shape)))
    return Case(name, (x,), lambda x: layer(x, filters, size, **arguments), by_hand, in_torch)


def separable(shape: tuple[int, ...], filters: int, size: int, strides: int = 1, dilation: int = 1) -> Case:
    channels = shape[-1]

    def by_hand(v, x):
        kernel = v["separable_conv2d/depthwise_kernel"].reshape(size, size, 1, channels)
        window = {"rhs_dilation": (dilation,) * 2, "dimension_numbers": DIMENSIONS[4], "feature_group_count": channels}
        y = jax.lax.conv_general_dilated(x, kernel, (strides,) * 2, "SAME", **window)
        return y @ v["separable_conv2d/pointwise_kernel"][0, 0] + v["separable_conv2d/bias"]

    def in_torch(torch):
        x, bias = torch.randn(moved(shape)), torch.randn(filters)
        depthwise, pointwise = torch.randn(channels, 1, size, size), torch.randn(filters, channels, 1, 1)
        convolve = functools.partial(torch.nn.functional.conv2d, stride=strides, dilation=dilation, groups=channels)
        padding = (size - 1) * dilation // 2

        def run():
            return torch.nn.functional.conv2d(convolve(x, depthwise, padding=padding), pointwise, bias)

        return run, [x, depthwise, pointwise, bias]

    words = [f"separable_conv2d {size}, {filters} filters", f"strides {strides}" * (strides > 1)]
    name = ", ".join(filter(None, [*words, f"dilation {dilation}" * (dilation > 1)]))
    arguments = {"strides": strides, "dilation_rate": dilation, "padding": "same"}
    return Case(
        name,
        (normal(*shape),),
        lambda x: est.layers.separable_conv2d(x, filters, size, **arguments),
        by_hand,
        in_torch,
    )


def transposed(shape: tuple[int, ...], filters: int, size: int, strides: int) -> Case:
    def by_hand(v, x):
        y = jax.lax.conv_transpose(
            x,
            v["conv2d_transpose/kernel"],
            (strides,) * 2,
            "SAME",
            dimension_numbers=DIMENSIONS[4],
            transpose_kernel=True,
        )
        return y + v["conv2d_transpose/bias"]

    def in_torch(torch):
        leaves = [torch.randn(moved(shape)), torch.randn(shape[-1], filters, size, size), torch.randn(filters)]
        options = {"stride": strides, "padding": (size - strides + 1) // 2, "output_padding": (size - strides) % 2}
        return lambda: torch.nn.functional.conv_transpose2d(*leaves, **options), leaves

    return Case(
        f"conv2d_transpose {size}, {filters} filters, strides {strides}",
        (normal(*shape),),
        lambda x: est.layers.conv2d_transpose(x, filters, size, strides, padding="same"),
        by_hand,
        in_torch,
    )


def dense(shape: tuple[int, ...], units: int) -> Case:
    def in_torch(torch):
        leaves = [torch.randn(shape), torch.randn(units, shape[-1]), torch.randn(units)]
        return lambda: torch.nn.functional.linear(*leaves), leaves

    return Case(
        f"dense {units}",
        (normal(*shape),),
        lambda x: est.layers.dense(x, units),
        lambda v, x: x @ v["dense/kernel"] + v["dense/bias"],
        in_torch,
    )


def batch_norm(shape: tuple[int, ...]) -> Case:
    def by_hand(v, x):
        axes = tuple(range(x.ndim - 1))
        mean = x.mean(axes)
        variance = jnp.square(x - mean).mean(axes)
        scale = jax.lax.rsqrt(variance + 1e-3) * v["batch_normalization/gamma"]
        return (x - mean) * scale + v["batch_normalization/beta"]

    def in_torch(torch):
        leaves = [torch.randn(moved(shape)), torch.randn(shape[-1]), torch.randn(shape[-1])]
        x, *scale = leaves
        return lambda: torch.nn.functional.batch_norm(x, None, None, *scale, training=True), leaves

    name = "batch_normalization"
    return Case(name, (normal(*shape),), lambda x: est.layers.batch_normalization(x, training=True), by_hand, in_torch)


def layer_norm(shape: tuple[int, ...]) -> Case:
    def by_hand(v, x):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-12) * v["LayerNorm/gamma"] + v["LayerNorm/beta"]

    def in_torch(torch):
        leaves = [torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])]
        x, *scale = leaves
        return lambda: torch.nn.functional.layer_norm(x, shape[-1:], *scale), leaves

    layer = functools.partial(est.layers.layer_norm, begin_norm_axis=-1)
    return Case("layer_norm", (normal(*shape),), layer, by_hand, in_torch)


def lstm(shape: tuple[int, ...], units: int) -> Case:
    def by_hand(v, x):
        kernel, bias = v["rnn/basic_lstm_cell/kernel"], v["rnn/basic_lstm_cell/bias"]

        def step(state, gates):
            c, h = state
            i, j, f, o = jnp.split(gates + h @ kernel[x.shape[-1] :], 4, axis=-1)
            c = c * jax.nn.sigmoid(f + 1) + jax.nn.sigmoid(i) * jnp.tanh(j)
            h = jnp.tanh(c) * jax.nn.sigmoid(o)
            return (c, h), h

        zeros = jnp.zeros((len(x), units))
        gates = x.swapaxes(0, 1) @ kernel[: x.shape[-1]] + bias
        return jax.lax.scan(step, (zeros, zeros), gates)[1].swapaxes(0, 1)

    def in_torch(torch):
        x, layer = torch.randn(shape), torch.nn.LSTM(shape[-1], units, batch_first=True)
        return lambda: layer(x)[0], [x, *layer.parameters()]

    return Case(f"lstm {units}", (normal(*shape),), lambda x: est.layers.lstm(x, units)[0], by_hand, in_torch)


def loss(name: str, shape: tuple[int, ...]) -> Case:
    random = np.random.default_rng(0)
    labels = random.integers(0, shape[-1], shape[0]) if name.startswith("sparse") else random.random(shape, np.float32)
    if name == "softmax_cross_entropy":
        labels /= labels.sum(-1, keepdims=True)
    labels = labels.astype(np.int32 if name.startswith("sparse") else np.float32)
    by_hand = {
        "sparse_softmax_cross_entropy": optax.losses.softmax_cross_entropy_with_integer_labels,
        "softmax_cross_entropy": optax.losses.softmax_cross_entropy,
        "sigmoid_cross_entropy": optax.losses.sigmoid_binary_cross_entropy,
        "mean_squared_error": optax.losses.squared_error,
        "huber_loss": optax.losses.huber_loss,
    }[name]

    def in_torch(torch):
        functions = {
            "sparse_softmax_cross_entropy": "cross_entropy",
            "softmax_cross_entropy": "cross_entropy",
            "sigmoid_cross_entropy": "binary_cross_entropy_with_logits",
            "mean_squared_error": "mse_loss",
            "huber_loss": "huber_loss",
        }
        x, y = torch.randn(shape), torch.from_numpy(labels)
        y = y.long() if y.ndim == 1 else y
        return lambda: getattr(torch.nn.functional, functions[name])(x, y), [x]

    function = getattr(est.losses, name)
    return Case(
        name, (normal(*shape),), lambda x: function(labels, x), lambda v, x: by_hand(x, labels).mean(), in_torch
    )


def cases() -> Iterator[Case]:
    yield pooling("max", (64, 28, 28, 32), 2, 2)
    yield pooling("max", (32, 56, 56, 32), 3, 2, "same")
    yield pooling("max", (64, 28, 28, 16), 3, 2, "same")
    yield pooling("max", (32, 28, 28, 32), 3, 1, "same")
    yield pooling("max", (64, 27, 29, 32), 2, 2)
    yield pooling("max", (64, 512, 32), 2, 2)
    yield pooling("average", (64, 28, 28, 32), 2, 2)
    yield pooling("average", (32, 56, 56, 32), 3, 2, "same")
    yield pooling("average", (32, 28, 28, 32), 3, 1, "same")
    yield convolution((64, 28, 28, 1), 16, 3)
    yield convolution((64, 14, 14, 16), 32, 3)
    yield convolution((32, 28, 28, 32), 32, 3)
    yield convolution((32, 28, 28, 64), 64, 1)
    yield convolution((32, 56, 56, 32), 64, 3, strides=2)
    yield convolution((32, 56, 56, 32), 64, 1, strides=2)
    yield convolution((32, 28, 28, 32), 32, 3, dilation=2)
    yield convolution((32, 28, 28, 32), 32, 3, data_format="channels_first")
    yield convolution((8, 112, 112, 3), 64, 7, strides=2)
    yield convolution((32, 256, 64), 64, 5)
    yield convolution((32, 256, 64), 64, 5, strides=2)
    yield separable((32, 28, 28, 64), 64, 3)
    yield separable((32, 28, 28, 64), 64, 3, strides=2)
    yield separable((32, 28, 28, 64), 64, 3, dilation=2)
    yield transposed((32, 14, 14, 64), 32, 4, 2)
    yield transposed((32, 14, 14, 64), 32, 3, 2)
    yield transposed((32, 14, 14, 64), 32, 3, 1)
    yield dense((128, 512), 512)
    yield dense((32, 32, 64), 256)
    yield batch_norm((64, 28, 28, 32))
    yield layer_norm((4096, 512))
    yield layer_norm((32, 32, 64))
    yield lstm((64, 40, 32), 64)
    yield loss("sparse_softmax_cross_entropy", (512, 8192))
    yield loss("sparse_softmax_cross_entropy", (1024, 64))
    yield loss("softmax_cross_entropy", (512, 8192))
    yield loss("sigmoid_cross_entropy", (512, 8192))
    yield loss("mean_squared_error", (512, 8192))
    yield loss("huber_loss", (512, 8192))
