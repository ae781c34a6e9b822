"""The loss of connectionist temporal classification: labels of unknown places in a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, widen, widen_int
from estimator.core._bcoo import is_sparse
from estimator.nn._sequence import sequence_mask

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO


def ctc_loss(
    labels: ArrayLike | BCOO,
    inputs: ArrayLike,
    sequence_length: ArrayLike,
    preprocess_collapse_repeated: bool = False,
    ctc_merge_repeated: bool = True,
    ignore_longer_outputs_than_inputs: bool = False,
    time_major: bool = True,
) -> jax.Array:
    """The negative log likelihood of each row's labels, as `tf.nn.ctc_loss`; `optax.ctc_loss` computes it.

    The last class is the blank one. What `inputs` hold behind the end of a sequence has no effect.

    >>> logits = jnp.log(jnp.array([[[0.5, 0.5]], [[0.2, 0.8]]]))  # of two steps, one row, one class and the blank
    >>> likelihood = jnp.exp(-ctc_loss(jnp.array([[0]]), logits, jnp.array([2])))
    >>> round(likelihood.item(), 6)  # 0.5 * 0.2 + 0.5 * 0.8 + 0.5 * 0.2
    0.6

    Args:
      labels: integers of shape `[batch, most labels]`, of which negative ones are left out; or, as TensorFlow's
        `SparseTensor`, a `jax.experimental.sparse.BCOO` of that shape, whose stored entries are the labels.
      inputs: logits of shape `[steps, batch, classes + 1]`.
      sequence_length: the number of steps of each row, integers of shape `[batch]`.
      preprocess_collapse_repeated: whether equal labels that follow each other are made one first.
      ctc_merge_repeated: must be True. TensorFlow's other loss is of labels that repeat without a blank between them.
      ignore_longer_outputs_than_inputs: whether the loss of a row whose labels do not fit into its steps, with a blank
        between equal ones, is 0. If not, it is NaN, at which training ends; TensorFlow raises an error.
      time_major: whether steps are the first dimension of `inputs`, as by default, or the second one.

    Returns:
      Shape `[batch]`, in float32 at least. A row with a label that is not a class has NaN.

    Raises:
      ValueError: shapes do not fit, or `ctc_merge_repeated` is False.
      TypeError: labels or lengths are not integers.
    """
    if not ctc_merge_repeated:
        raise ValueError(
            "`est.nn.ctc_loss` needs `ctc_merge_repeated=True`; got False, for which there is no loss here."
        )
    if is_sparse(labels):
        # What lies out of bounds is padding of the stored entries.
        empty = jnp.full(labels.shape, -1, widen_int(labels.data).dtype)
        labels = empty.at[tuple(labels.indices.T)].set(labels.data, mode="drop")
    labels, logits, lengths = jnp.asarray(labels), widen(as_float(inputs)), jnp.asarray(sequence_length)
    for what, array in (("labels", labels), ("sequence_length", lengths)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"`est.nn.ctc_loss` needs integers as `{what}`; got {array.dtype}.")
    if time_major and logits.ndim == 3:
        logits = logits.swapaxes(0, 1)
    if logits.ndim != 3 or labels.ndim != 2 or lengths.shape != labels.shape[:1] or lengths.shape != logits.shape[:1]:
        raise ValueError(
            f"`est.nn.ctc_loss` needs labels of shape [batch, most labels], inputs of shape "
            f"{'[steps, batch, classes + 1]' if time_major else '[batch, steps, classes + 1]'} and lengths of shape "
            f"[batch]; got shapes {labels.shape}, {jnp.shape(inputs)} and {lengths.shape}. "
            f"`time_major={not time_major}` is for the other order."
        )
    steps, blank = logits.shape[1], logits.shape[2] - 1
    labels = _to_the_left(widen_int(labels))
    if preprocess_collapse_repeated:
        labels = _to_the_left(labels.at[:, 1:].set(jnp.where(labels[:, 1:] == labels[:, :-1], -1, labels[:, 1:])))
    there = labels >= 0
    # A blank has to stand between equal labels.
    repeated = (there[:, 1:] & (labels[:, 1:] == labels[:, :-1])).sum(1)
    runs = sequence_mask(lengths, steps)
    fits = there.sum(1) + repeated <= runs.sum(1)
    known = (labels < blank).all(1)
    # In full float32: by default a GPU rounds the products by which optax chooses the logits of labels.
    with jax.default_matmul_precision("highest"):
        losses = optax.ctc_loss(
            jnp.where(runs[..., None], logits, 0),
            (~runs).astype(logits.dtype),
            labels,
            (~there).astype(logits.dtype),
            blank_id=blank,
            # Far below the log likelihood of any path, of thousands of steps too.
            log_epsilon=-1e30,
        )
    losses = jnp.where(fits, losses, 0 if ignore_longer_outputs_than_inputs else jnp.nan)
    return jnp.where(known, losses, jnp.nan)


def _to_the_left(labels: jax.Array) -> jax.Array:
    """Each row's labels in their order, and behind them what is negative."""
    return jnp.take_along_axis(labels, jnp.argsort(labels < 0, axis=1, stable=True), 1)
