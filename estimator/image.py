"""Functions of TensorFlow's `tf.image` whose numbers `jax.image` does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_int, as_real
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = ["resize_bilinear", "resize_nearest_neighbor"]


def resize_bilinear(
    images: ArrayLike, size: Sequence[int], align_corners: bool = False, name: str | None = None
) -> jax.Array:
    """Images of another size, interpolated as TensorFlow 1's `tf.image.resize_bilinear` does.

    Pixel i is sampled at `i * old / new`. `jax.image.resize` samples at the centres of pixels, half of a pixel away,
    and takes means where it makes an image smaller: weights trained with one give worse results with the other.

    >>> row = jnp.arange(4.0).reshape(1, 1, 4, 1)
    >>> resize_bilinear(row, (1, 8)).ravel().tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
    >>> jax.image.resize(row, (1, 1, 8, 1), "bilinear").ravel().tolist()
    [0.0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.0]

    Args:
      images: `[batch, height, width, channels]`, floats or integers.
      size: the new height and width.
      align_corners: whether pixel i is sampled at `i * (old - 1) / (new - 1)`, so that corners stay corners.
      name: of TensorFlow's op; without effect here.

    Returns:
      `[batch, new height, new width, channels]` in float32 at least, as in TensorFlow.

    Raises:
      ValueError: the images have other than 4 dimensions, or the size is not two positive integers.
      TypeError: the images are complex, or a size is not an integer.
    """
    images, (height, width) = _check("resize_bilinear", images, size)
    images = images.astype(jnp.promote_types(images.dtype, jnp.float32))
    return _interpolate(_interpolate(images, width, 2, align_corners), height, 1, align_corners)


def resize_nearest_neighbor(
    images: ArrayLike, size: Sequence[int], align_corners: bool = False, name: str | None = None
) -> jax.Array:
    """Images of another size, of pixels chosen as TensorFlow 1's `tf.image.resize_nearest_neighbor` chooses them.

    Pixel i is the old pixel `floor(i * old / new)`.

    >>> resize_nearest_neighbor(jnp.arange(3).reshape(1, 1, 3, 1), (1, 2)).ravel().tolist()
    [0, 1]

    Args:
      images, size, name: as in `resize_bilinear`.
      align_corners: whether it is the old pixel nearest to `i * (old - 1) / (new - 1)`.

    Returns:
      `[batch, new height, new width, channels]` in the dtype of the images.

    Raises:
      as `resize_bilinear`.
    """
    images, (height, width) = _check("resize_nearest_neighbor", images, size)
    # Half away from zero, as in TensorFlow; numpy's own rounding is to even numbers.
    whole: Callable[[Any], Any] = (lambda at: np.floor(at + 0.5)) if align_corners else np.floor
    rows, columns = (
        np.minimum(whole(_places(old, new, align_corners)).astype(int), old - 1)
        for old, new in zip(images.shape[1:3], (height, width), strict=True)
    )
    return images[:, rows][:, :, columns]


def _check(caller: str, images: ArrayLike, size: Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
    images = as_real(images)
    if images.ndim != 4 or 0 in images.shape[1:3]:
        raise ValueError(
            f"`est.image.{caller}` needs images of shape [batch, height, width, channels]; got shape {images.shape}. "
            "Write `images[None]` for a single one."
        )
    given = size if isinstance(size, Sequence | np.ndarray) else (size,)
    sizes = tuple(as_int(f"est.image.{caller}", "size", each) for each in given)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"`est.image.{caller}` needs two positive integers as `size`; got {size!r}.")
    return images, sizes


def _places(old: int, new: int, align_corners: bool) -> np.ndarray:
    """The places among `old` pixels at which `new` ones are sampled."""
    scale = (old - 1) / (new - 1) if align_corners and new > 1 else old / new
    # In float32, as in TensorFlow: where a place is nearly an integer, its rounding chooses the pixel.
    return np.arange(new, dtype=np.float32) * np.float32(scale)


def _interpolate(images: jax.Array, new: int, axis: int, align_corners: bool) -> jax.Array:
    old = images.shape[axis]
    at = _places(old, new, align_corners)
    below = np.minimum(np.floor(at).astype(int), old - 1)
    first, second = (jnp.take(images, i, axis) for i in (below, np.minimum(below + 1, old - 1)))
    part = (at - np.floor(at)).astype(images.dtype).reshape(-1, *(1,) * (3 - axis))
    return first + (second - first) * part


if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(
        __name__,
        f"; it has {', '.join(__all__)}. See `jax.image`; images are decoded and changed at random in input_fn.",
    )
