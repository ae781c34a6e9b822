"""Masks and losses of sequences of several lengths."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from estimator.core._argument_checks import as_float, hide_absent, widen
from estimator.core._frame import average_denominator
from estimator.nn._cross_entropy import sparse_softmax_cross_entropy_with_logits


def sequence_mask(
    lengths: ArrayLike, maxlen: int | None = None, dtype: DTypeLike = bool, name: str | None = None
) -> jax.Array:
    """A mask: True for the first `lengths` of `maxlen` steps, as `tf.sequence_mask`.

    >>> sequence_mask(jnp.array([1, 3]), maxlen=3).tolist()
    [[True, False, False], [True, True, True]]

    Args:
      lengths: integers of any shape.
      maxlen: the size of the mask's last dimension, an int. If None, the largest length, known only outside of a
        compiled function.
      dtype: of the mask.
      name: of TensorFlow's op; without effect here.

    Raises:
      ValueError: there is no `maxlen` in a compiled function, such as a model_fn.
      TypeError: `maxlen` is a value of the model, or the lengths are not integers.
    """
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"`est.nn.sequence_mask` needs integers as `lengths`; got {lengths.dtype}.")
    if maxlen is None:
        if isinstance(lengths, jax.core.Tracer):
            raise ValueError(
                "`est.nn.sequence_mask` needs `maxlen` here: the shapes of a compiled program do not depend on values. "
                "Write `maxlen=x.shape[1]`, where x has the steps."
            )
        maxlen = int(lengths.max(initial=0))
    if isinstance(maxlen, jax.core.Tracer):
        raise TypeError(
            "`est.nn.sequence_mask` needs an int as `maxlen`; got a value of the model. Write `x.shape[1]`, where x "
            "has the steps."
        )
    steps = jnp.arange(maxlen)
    return (steps < lengths[..., None].astype(steps.dtype)).astype(dtype)


def sequence_loss(
    logits: ArrayLike,
    targets: ArrayLike,
    weights: ArrayLike,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Callable[..., jax.Array] | None = None,
    name: str | None = None,
) -> jax.Array:
    """The weighted cross entropy of a batch of sequences, as `tf.contrib.seq2seq.sequence_loss`.

    On towers an average over the batch is over all rows: each tower divides by the towers' average of the weights.

    >>> logits, targets = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), int)
    >>> round(sequence_loss(logits, targets, sequence_mask(jnp.array([1, 3]), 3, jnp.float32)).item(), 4)
    1.3863

    Args:
      logits: shape `[batch, steps, classes]`.
      targets: the right classes, integers of shape `[batch, steps]`.
      weights: shape `[batch, steps]`. A step of weight 0 counts as absent, whatever its logits and its target are.
      average_across_timesteps: whether steps are reduced to their weighted mean.
      average_across_batch: whether examples are.
      softmax_loss_function: `fn(labels=, logits=)`, instead of the sparse softmax cross entropy; it gets targets of
        shape `[batch * steps]` and logits of shape `[batch * steps, classes]`.
      name: of TensorFlow's op; without effect here.

    Returns:
      A scalar; `[batch]` or `[steps]` with one of the two; `[batch, steps]` with none.

    Raises:
      ValueError: shapes do not fit.
    """
    logits, targets, weights = widen(as_float(logits)), jnp.asarray(targets), widen(as_float(weights))
    if logits.ndim != 3 or not logits.shape[:2] == targets.shape == weights.shape:
        raise ValueError(
            "`est.nn.sequence_loss` needs logits of shape [batch, steps, classes], and targets and weights of shape "
            f"[batch, steps]; got shapes {logits.shape}, {targets.shape} and {weights.shape}."
        )
    loss_of = softmax_loss_function or sparse_softmax_cross_entropy_with_logits
    logits = hide_absent(weights[..., None], logits)
    losses = loss_of(labels=targets.reshape(-1), logits=logits.reshape(-1, logits.shape[-1]))
    losses = hide_absent(weights, losses.reshape(targets.shape)) * weights
    axes = (0,) * average_across_batch + (1,) * average_across_timesteps
    if not axes:
        return losses
    total = weights.sum(axes)
    # The denominator is averaged over towers only where the batch is: then the scaled losses of the towers add up to
    # the loss of the whole batch. 1e-12, as in TensorFlow, is for weights that are all zero.
    return losses.sum(axes) / ((average_denominator(total) if average_across_batch else total) + 1e-12)
