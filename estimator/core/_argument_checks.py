"""Checks of arguments, and of shapes, dtypes and values of arrays, that several functions share."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def check_intervals(caller: str, **given: float | None) -> None:
    """Raises a ValueError unless exactly one of the intervals is given and positive; steps are ints."""
    shown = " and ".join(f"{name}={value!r}" for name, value in given.items())
    if sum(value is not None for value in given.values()) != 1:
        raise ValueError(f"Exactly one of {' and '.join(given)} should be provided to {caller}; got {shown}.")
    for name, value in given.items():
        # Seconds may be a fraction, steps may not. True and False, which Python has for ints, are refused.
        kind = numbers.Real if name.endswith("secs") else numbers.Integral
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or value <= 0):
            wanted = "number" if kind is numbers.Real else "int"
            raise ValueError(f"{name} of {caller} must be a positive {wanted}; got {value!r}.")


def check_steps(caller: str, **given: Any) -> None:
    """Raises an error unless each number of steps is a positive integer or None."""
    for name, value in given.items():
        if value is not None and as_int(caller, name, value) <= 0:
            raise ValueError(f"Must specify {name} > 0, given: {value}.")


def as_int(caller: str, name: str, value: Any) -> int:
    """An integer as an int; it may be a scalar of numpy or jax.

    >>> as_int("MultiClassHead", "n_classes", jnp.int32(3))
    3

    Raises:
      TypeError: it is something else.
    """
    try:
        if not isinstance(value, bool):
            # It takes integers of any library, but not 2.5, which `int` would truncate.
            return operator.index(value)
    except TypeError:  # jax says the same of a value that is not known yet
        pass
    raise TypeError(f"`{caller}` needs an int as {name}; got {value!r} of type {type(value).__name__}.")


def check_order(caller: str, labels: jax.Array, logits: jax.Array, what: str = "logits") -> None:
    """Raises a TypeError if labels are floats and logits integers: they have changed places."""
    if jnp.issubdtype(labels.dtype, jnp.floating) and not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"`{caller}` takes (labels, {what}), in this order; got labels of dtype {labels.dtype} and shape "
            f"{labels.shape}, and {what} of dtype {logits.dtype} and shape {logits.shape}. Write `{caller}(labels, "
            f"{what})`. If these are the {what}, write `{what}.astype(jnp.float32)`."
        )


def check_same_shape(caller: str, labels: jax.Array, predictions: jax.Array, what: str = "predictions") -> None:
    """Raises a ValueError that names `caller`, both shapes and the fix, if they differ."""
    if labels.shape == predictions.shape:
        return
    fix = "give both one value for each element"
    if labels.size == predictions.size:
        fix = f"write `labels.reshape({predictions.shape})`"
    raise ValueError(
        f"`{caller}` got labels of shape {labels.shape} and {what} of shape {predictions.shape}, "
        f"which would be broadcast against each other. They must be equal: {fix}."
    )


def squeeze_last(array: jax.Array, ndim: int) -> jax.Array:
    """`array` without its last dimension, if that is 1 and one more than `ndim`."""
    # TensorFlow takes `[batch, 1]` with `[batch]`; left as they are, these would broadcast to a matrix.
    return array[..., 0] if array.ndim == ndim + 1 and array.shape[-1] == 1 else array


def check_weights(caller: str, weights: jax.Array, shape: tuple[int, ...], what: str = "losses") -> None:
    """Raises a ValueError unless `weights` is a scalar, or each of its dimensions is 1 or equal.

    TensorFlow's rule: numpy would also broadcast over missing leading dimensions.
    """
    if weights.ndim == 0:
        return
    if weights.ndim == len(shape):
        if all(given in (1, wanted) for given, wanted in zip(weights.shape, shape, strict=True)):
            return
    raise ValueError(
        f"`{caller}` got weights of shape {weights.shape} for {what} of shape {shape}. Weights "
        f"must be a scalar or have as many dimensions as the {what}, each of them 1 or equal: "
        f"reshape them to {shape}, or put 1 where they are to be repeated."
    )


def as_float(array: ArrayLike) -> jax.Array:
    """`array` in its own dtype if that is floating, else in float32."""
    array = as_real(array)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def as_real(array: ArrayLike) -> jax.Array:
    """`array` as one of jax; raises a TypeError if it is complex."""
    array = jnp.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(
            f"Real numbers are needed here; got an array of dtype {array.dtype} and shape {array.shape}, which would "
            "lose its imaginary part. Pass `jnp.real(x)`, `jnp.imag(x)` or `jnp.abs(x)`."
        )
    return array


def widen(x: jax.Array) -> jax.Array:
    """The array in float32 if it is of half precision, whose sums and squares overflow and stop growing early."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32 else x


def widen_int(x: jax.Array) -> jax.Array:
    """Integers in 32 bits at least: a byte cannot be compared with 1000, nor replaced by it."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def hide_absent(weights: ArrayLike, x: jax.Array, valid: jax.Array | None = None, by: float = 0) -> jax.Array:
    """`by` for what is not `valid`, by default not finite, where the weight is 0: such a row counts as absent.

    Otherwise zero times NaN would be NaN: in a sum, and in a gradient if it is hidden only after it was computed with.
    All else stays as it is, so that the gradient of a weight that happens to be 0 is right.
    """
    if isinstance(weights, int | float) and weights:
        return x
    valid = jnp.isfinite(x) if valid is None else valid
    return jnp.where((jnp.asarray(weights) == 0) & ~valid, jnp.asarray(by, x.dtype), x)


def unsign_zeros(x: jax.Array) -> jax.Array:
    """The array with 0.0 for -0.0: `jax.lax.top_k` takes the latter for smaller."""
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)
