"""The functions of `est.summary`: they report values of a model_fn for TensorBoard."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from estimator.core._record import Histogram, Rows, Scalar, as_reported_array, metric_of, report


def scalar(name: str, value: Any) -> None:
    """Shows a number over the steps; of several towers the mean, or a metric's (`accuracy[1]`) value of all rows.

    >>> import estimator as est, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     est.summary.scalar("brightness", features.mean())
    ...     return est.EstimatorSpec(mode, predictions=features)

    Args:
      name: the tag; prefixed by the variable scopes around the call, and made unique in the run as by `est.record`.
      value: a number: a scalar array, or one of a single element.

    Raises:
      ValueError: the value has several elements.
    """
    array = as_reported_array("est.summary.scalar", name, value)
    if array.size != 1:
        raise ValueError(
            f"`est.summary.scalar({name!r})` needs a number; got an array of shape {array.shape}. "
            "Reduce it, for example by `.mean()`, or use `est.summary.histogram`."
        )
    report("est.summary.scalar", name, Scalar(array.reshape(()), metric_of(value), summary=True))


def histogram(name: str, values: Any) -> None:
    """Shows the distribution of values, in TensorFlow's buckets; of several towers, all values together.

    Args:
      name: the tag; prefixed by the variable scopes around the call, and made unique in the run as by `est.record`.
      values: a non-empty array of numbers, of any shape.

    Raises:
      ValueError: there are no values.
    """
    array = as_reported_array("est.summary.histogram", name, values)
    if not array.size:
        raise ValueError(f"`est.summary.histogram({name!r})` needs values; got an array of shape {array.shape}.")
    report("est.summary.histogram", name, Histogram.of(array))


def image(name: str, images: Any, max_outputs: int = 3) -> None:
    """Shows the first images of a batch.

    Args:
      name: the tag; prefixed by the variable scopes around the call, and made unique in the run as by `est.record`.
      images: array of shape `(batch, height, width, channels)` with 1, 3 or 4 channels; floats, or uint8. A float image
        from 0 to 1 is shown as it is; one with larger values is divided by the largest; one with negative values is
        scaled so that zero is at half the brightness, as in TensorFlow. What is not finite is black or white.
      max_outputs: the maximum number of images of the batch to show.

    Raises:
      ValueError: the array has another shape.
    """
    array = as_reported_array("est.summary.image", name, images)
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"`est.summary.image({name!r})` needs an array of shape (batch, height, width, channels) with 1, 3 or 4 "
            f"channels; got {array.shape}. Add a channel by `images[..., None]`."
        )
    if isinstance(max_outputs, bool) or not isinstance(max_outputs, int) or max_outputs < 1:
        raise ValueError(f"`est.summary.image({name!r})` needs max_outputs >= 1; got {max_outputs!r}.")
    if array.dtype != jnp.uint8 and not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"`est.summary.image({name!r})` needs floats from 0 to 1, or uint8; got {array.dtype}.")
    # Each tower reports its first images; the limit applies again after they are merged.
    report("est.summary.image", name, Rows(array[:max_outputs], limit=max_outputs, image=True))
