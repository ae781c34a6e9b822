"""Cross entropies and the loss of counts, one for each example or element, in float32 at least.

`est.losses` has their weighted means.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax.losses
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, check_same_shape, widen, widen_int


def sigmoid_cross_entropy_with_logits(
    _sentinel: None = None, labels: ArrayLike | None = None, logits: ArrayLike | None = None, name: str | None = None
) -> jax.Array:
    """The cross entropy of each element, as `tf.nn.sigmoid_cross_entropy_with_logits`: with named arguments only.

    >>> print(sigmoid_cross_entropy_with_logits(labels=jnp.ones(2), logits=jnp.zeros(2)))
    [0.6931472 0.6931472]

    Args:
      labels: from 0 to 1, in the shape of the logits.
      logits: any shape, floating.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: an argument has no name or is missing, or shapes differ.
    """
    labels, logits = _named_pair("sigmoid_cross_entropy_with_logits", _sentinel, labels, logits)
    return optax.losses.sigmoid_binary_cross_entropy(logits, labels)


def softmax_cross_entropy_with_logits(
    _sentinel: None = None,
    labels: ArrayLike | None = None,
    logits: ArrayLike | None = None,
    dim: int = -1,
    name: str | None = None,
    axis: int | None = None,
) -> jax.Array:
    """The cross entropy of each row, as `tf.nn.softmax_cross_entropy_with_logits`: no gradient flows to the labels.

    >>> print(softmax_cross_entropy_with_logits(labels=jnp.eye(2), logits=jnp.zeros((2, 2))))
    [0.6931472 0.6931472]

    Args:
      labels: the probabilities of the classes, in the shape of the logits.
      logits: shape `[..., classes]`, floating.
      dim: the dimension of the classes.
      name: of TensorFlow's op; without effect here.
      axis: TensorFlow's other name of `dim`.

    Raises:
      ValueError: an argument has no name or is missing, or shapes differ.
    """
    labels, logits = _named_pair("softmax_cross_entropy_with_logits", _sentinel, labels, logits)
    labels = jax.lax.stop_gradient(labels)
    return optax.losses.softmax_cross_entropy(logits, labels, axis=dim if axis is None else axis)


def softmax_cross_entropy_with_logits_v2(
    _sentinel: None = None,
    labels: ArrayLike | None = None,
    logits: ArrayLike | None = None,
    axis: int = -1,
    name: str | None = None,
    dim: int | None = None,
) -> jax.Array:
    """The cross entropy of each row, as `softmax_cross_entropy_with_logits`, with gradients that flow to the labels.

    >>> print(softmax_cross_entropy_with_logits_v2(labels=jnp.eye(2), logits=jnp.zeros((2, 2))))
    [0.6931472 0.6931472]
    """
    labels, logits = _named_pair("softmax_cross_entropy_with_logits_v2", _sentinel, labels, logits)
    return optax.losses.softmax_cross_entropy(logits, labels, axis=axis if dim is None else dim)


def sparse_softmax_cross_entropy_with_logits(
    _sentinel: None = None, labels: ArrayLike | None = None, logits: ArrayLike | None = None, name: str | None = None
) -> jax.Array:
    """The cross entropy of each row with its right class, as `tf.nn.sparse_softmax_cross_entropy_with_logits`.

    >>> print(sparse_softmax_cross_entropy_with_logits(labels=jnp.array([1]), logits=jnp.zeros((1, 2))))
    [0.6931472]

    Args:
      labels: the right classes, integers of shape `[...]`; the loss of one out of range is NaN.
      logits: shape `[..., classes]`, floating.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: an argument has no name or is missing, or shapes do not fit.
      TypeError: the labels are not integers.
    """
    caller = "sparse_softmax_cross_entropy_with_logits"
    labels, logits = _check_named(caller, _sentinel, labels, logits)
    labels, logits = jnp.asarray(labels), widen(as_float(logits))
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`est.nn.{caller}` needs integers as `labels`; got {labels.dtype}.")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"`est.nn.{caller}` needs labels of shape {logits.shape[:-1]} for logits of shape {logits.shape}; got "
            f"shape {labels.shape}."
        )
    labels = widen_int(labels)
    known = jnp.where(labels < 0, logits.shape[-1], labels)  # a negative index would count from the end
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, known)


def weighted_cross_entropy_with_logits(
    targets: ArrayLike, logits: ArrayLike, pos_weight: ArrayLike, name: str | None = None
) -> jax.Array:
    """The sigmoid cross entropy of each element, its positive part weighted, as TensorFlow's.

    >>> print(weighted_cross_entropy_with_logits(jnp.ones(1), jnp.zeros(1), pos_weight=2.0))
    [1.3862944]

    Args:
      targets: from 0 to 1, in the shape of the logits.
      logits: any shape, floating.
      pos_weight: the weight of the positive part.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: shapes differ.
    """
    targets, logits = _pair("weighted_cross_entropy_with_logits", targets, logits)
    # `softplus(-x)` is `log(1 + exp(-x))` without an overflow.
    return (1 - targets) * logits + (1 + (pos_weight - 1) * targets) * jax.nn.softplus(-logits)


def log_poisson_loss(
    targets: ArrayLike, log_input: ArrayLike, compute_full_loss: bool = False, name: str | None = None
) -> jax.Array:
    """The loss of each count that is Poisson distributed, as `tf.nn.log_poisson_loss`.

    >>> log_poisson_loss(jnp.array([2.0]), jnp.zeros(1)).tolist()
    [1.0]

    Args:
      targets: the counts, in the shape of the predictions.
      log_input: the logarithms of the predictions, floating.
      compute_full_loss: whether Stirling's approximation of the part that depends only on the targets is added.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: shapes differ.
    """
    targets, log_input = _pair("log_poisson_loss", targets, log_input)
    loss = jnp.exp(log_input) - log_input * targets
    if not compute_full_loss:
        return loss
    small = (targets >= 0) & (targets <= 1)
    # As in TensorFlow, nothing is added from 0 to 1. There the logarithm gets a 1: at 0 its derivative is infinite.
    count = jnp.where(small, 1, targets)
    stirling = count * jnp.log(count) - count + 0.5 * jnp.log(2 * jnp.pi * count)
    return loss + jnp.where(small, 0, stirling)


def _pair(caller: str, labels: ArrayLike, logits: ArrayLike) -> tuple[jax.Array, jax.Array]:
    logits = widen(as_float(logits))
    labels = jnp.asarray(labels, logits.dtype)
    check_same_shape(f"est.nn.{caller}", labels, logits, "logits")
    return labels, logits


def _named_pair(caller: str, *given: Any) -> tuple[jax.Array, jax.Array]:
    return _pair(caller, *_check_named(caller, *given))


def _check_named(
    caller: str, sentinel: None, labels: ArrayLike | None, logits: ArrayLike | None
) -> tuple[ArrayLike, ArrayLike]:
    """Requires names, as TensorFlow does: which of two arrays comes first is easily mixed up. Returns both."""
    if sentinel is not None or labels is None or logits is None:
        raise ValueError(f"`est.nn.{caller}` takes named arguments: write `{caller}(labels=..., logits=...)`.")
    return labels, logits
