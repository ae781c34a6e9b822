"""Operations in the form that XLA runs fast on a CPU, of slices, products and sums, so that any derivative is too.

Each takes inputs `[batch, ..., channels]`. The comments say how much longer XLA's own operation takes, forward and
backward, on two cores.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def max_pool(x: jax.Array, size: Sequence[int], strides: Sequence[int], padding: str) -> jax.Array:
    """The largest value of each window; the gradient goes to the first of equal values. XLA: 8 to 24 times."""
    pads = jax.lax.padtype_to_pads(x.shape, size, strides, padding)
    # -inf is never the result: with "SAME", too, each window has at least one place of the inputs.
    x = jnp.pad(x, pads, constant_values=-jnp.inf)
    for axis in reversed(range(x.ndim)):  # rows come after columns, so that the first of equal values is XLA's
        if size[axis] == strides[axis] == 1:
            continue
        stop = x.shape[axis] - size[axis] + 1
        shifted = [jax.lax.slice_in_dim(x, i, i + stop, strides[axis], axis) for i in range(size[axis])]
        # NaN is the maximum, as in XLA; a plain comparison would skip it.
        x = functools.reduce(lambda first, other: jnp.where((other > first) | jnp.isnan(other), other, first), shifted)
    return x


def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` as a product of two matrices. XLA, of three dimensions and more: up to twice."""
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


def convolve_points(x: jax.Array, kernel: jax.Array, strides: Sequence[int]) -> jax.Array:
    """A convolution with a kernel of one place, `[*ones, channels, filters]`, as a matrix product. XLA: 3 times."""
    x = x[(slice(None), *(slice(None, None, step) for step in strides))]
    return multiply(x, kernel.reshape(kernel.shape[-2:]))


def depthwise_convolve(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], dilation: Sequence[int], padding: str
) -> jax.Array:
    """A convolution of each channel with its own kernels, `[*size, channels, multiplier]`. XLA: 8 times and more."""
    *size, channels, multiplier = kernel.shape
    if multiplier > 1:
        x = jnp.repeat(x, multiplier, axis=-1)
    window = (size, strides, dilation, padding)

    @jax.custom_jvp
    def convolve(x: jax.Array, taps: jax.Array) -> jax.Array:
        return sum(each * tap for each, tap in zip(_shifts(x, *window), taps, strict=True))

    @convolve.defjvp
    def differentiate(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        (x, taps), (moved_x, moved_taps) = primals, tangents
        moved = sum(each * tap for each, tap in zip(_shifts(moved_x, *window), taps, strict=True))
        return convolve(x, taps), _add_by_places(moved, x, moved_taps, *window)

    return convolve(x, kernel.reshape(-1, channels * multiplier))


def convolve_transposed(x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: str) -> jax.Array:
    """The gradient of a convolution with strides, whose kernel is `[*size, filters, channels]`. XLA: 9 to 30 times."""
    *size, filters, channels = kernel.shape
    n = len(size)
    parts = [-(-k // s) for k, s in zip(size, strides, strict=True)]  # of the kernel that one output place sees
    # The form with the smaller matrices: by place of the inputs, the numbers in the rows before and after the product.
    gathered = math.prod(parts) * channels + math.prod(strides) * filters
    added = channels + math.prod(size) * filters
    y = (_add_blocks if added <= gathered else _gather_blocks)(x, kernel, strides, parts)
    places = y.shape[1 : 1 + n]
    # The places of a block go back between the blocks: [batch, h, w, sh, sw, filters] becomes [batch, h, sh, w, sw,
    # filters].
    order = (0, *itertools.chain.from_iterable((1 + i, 1 + n + i) for i in range(n)), 1 + 2 * n)
    y = y.transpose(order).reshape(x.shape[0], *(p * s for p, s in zip(places, strides, strict=True)), filters)
    crops = []
    for length, now, k, s in zip(x.shape[1:-1], y.shape[1:-1], size, strides, strict=True):
        beyond = max(k - s, 0)
        # As XLA crops: "SAME" leaves exactly strides times the length, cut at both ends; "VALID" keeps all of the
        # output.
        first, wanted = (beyond // 2, length * s) if padding == "SAME" else (0, length * s + beyond)
        crops.append((-first, wanted + first - now, 0))
    return jax.lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0), *crops, (0, 0, 0)])


def _gather_blocks(x: jax.Array, kernel: jax.Array, strides: Sequence[int], parts: Sequence[int]) -> jax.Array:
    """The outputs of a transposed convolution in blocks as large as the strides, `[batch, *places, *strides, filters]`.

    Output places of one remainder by the strides see the same part of the kernel: one product of matrices makes all.
    """
    *size, filters, channels = kernel.shape
    # Padded to a multiple of the strides, the kernel splits into a small one for each phase of the output: the
    # remainder of an output place by the strides says which one it needs.
    kernel = jnp.pad(kernel, [*((0, p * s - n) for p, s, n in zip(parts, strides, size, strict=True)), (0, 0), (0, 0)])
    split = tuple(itertools.chain.from_iterable(zip(parts, strides, strict=True)))
    n = len(size)
    kernel = jnp.flip(kernel.reshape(*split, filters, channels), range(0, 2 * n, 2))
    order = (*range(0, 2 * n, 2), 2 * n + 1, *range(1, 2 * n, 2), 2 * n)
    # All phases are columns of one matrix: one product gives a block for each place.
    matrix = kernel.transpose(order).reshape(-1, kernel.size // channels // math.prod(parts))
    x_padded = jnp.pad(x, [(0, 0), *((p - 1, p - 1) for p in parts), (0, 0)])
    y = jnp.concatenate(list(_shifts(x_padded, parts, (1,) * n, (1,) * n, "VALID")), axis=-1) @ matrix
    return y.reshape(*y.shape[:-1], *strides, filters)


def _add_blocks(x: jax.Array, kernel: jax.Array, strides: Sequence[int], parts: Sequence[int]) -> jax.Array:
    """The same: a product gives what each input place adds to the outputs, in blocks that are shifted and added."""
    *size, filters, channels = kernel.shape
    n = len(size)
    dtype = x.dtype if x.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)  # sums in half precision are rounded once
    products = multiply(x.astype(dtype), kernel.astype(dtype).reshape(-1, channels).T)
    blocks = [products.reshape(*x.shape[:-1], *size, filters)]
    for axis, (k, s) in enumerate(zip(size, strides, strict=True), 1 + n):
        # `split`, of which the gradient is one concatenation; of slices it is a sum of padded arrays, twice as slow.
        cuts = [min(s, k - first) for first in range(0, k, s)]
        blocks = [part for block in blocks for part in jax.lax.split(block, cuts, axis)]
    added = []
    for at, block in zip(itertools.product(*map(range, parts)), blocks, strict=True):
        shifts = ((i, p - 1 - i) for i, p in zip(at, parts, strict=True))
        missing = ((0, s - k) for s, k in zip(strides, block.shape[1 + n :], strict=False))
        added.append(jnp.pad(block, [(0, 0), *shifts, *missing, (0, 0)]))
    return functools.reduce(jnp.add, added).astype(x.dtype)


def _shifts(
    x: jax.Array, size: Sequence[int], strides: Sequence[int], dilation: Sequence[int], padding: str
) -> Iterator[jax.Array]:
    """The inputs as each place of a kernel sees them, in the order of these places."""
    x, lengths = _pad(x, size, strides, dilation, padding)
    for place in itertools.product(*map(range, size)):
        starts = [i * d for i, d in zip(place, dilation, strict=True)]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        yield jax.lax.slice(x, (0, *starts, 0), (x.shape[0], *ends, x.shape[-1]), (1, *strides, 1))


def _add_by_places(
    y: jax.Array,
    x: jax.Array,
    taps: jax.Array,
    size: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: str,
) -> jax.Array:
    """Adds to `y` the inputs as each place of a kernel sees them, times its part, in a loop.

    Without the loop the gradient of the kernel would need a copy of the inputs for each place: to get the memory for
    them takes 5 times as long as to compute with it.
    """
    starts = np.array(list(itertools.product(*map(range, size)))) * np.array(dilation)
    x, lengths = _pad(x, size, strides, dilation, padding)
    every = (slice(None), *(slice(None, None, step) for step in strides))

    @functools.partial(jax.checkpoint, prevent_cse=False)  # or all copies would be kept for the gradient
    def add(y: jax.Array, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        start, tap = place
        return y + jax.lax.dynamic_slice(x, (0, *start, 0), (x.shape[0], *lengths, x.shape[-1]))[every] * tap, None

    return jax.lax.scan(add, y, (starts, taps))[0]


def _pad(
    x: jax.Array, size: Sequence[int], strides: Sequence[int], dilation: Sequence[int], padding: str
) -> tuple[jax.Array, list[int]]:
    """The padded inputs, and how long the part of them is that each place of a kernel sees."""
    spans = [(n - 1) * d + 1 for n, d in zip(size, dilation, strict=True)]
    pads = jax.lax.padtype_to_pads(x.shape[1:-1], spans, strides, padding)
    x = jnp.pad(x, [(0, 0), *pads, (0, 0)])
    return x, [n - span + 1 for n, span in zip(x.shape[1:-1], spans, strict=True)]
