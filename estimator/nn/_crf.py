"""Conditional random fields over the tags of a sequence, as in `tf.contrib.crf`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, widen, widen_int
from estimator.nn._sequence import sequence_mask
from estimator.variables._variables import get_variable


def crf_log_likelihood(
    inputs: ArrayLike, tag_indices: ArrayLike, sequence_lengths: ArrayLike, transition_params: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """The log likelihood of each sequence of tags, and the transitions, as `tf.contrib.crf.crf_log_likelihood`.

    >>> likelihood, _ = crf_log_likelihood(jnp.zeros((1, 3, 2)), jnp.zeros((1, 3), int), jnp.array([3]),
    ...                                    jnp.zeros((2, 2)))
    >>> round(likelihood.item(), 4)  # one of 8 sequences that are all alike
    -2.0794

    Args:
      inputs: the scores of the tags, shape `[batch, steps, tags]`.
      tag_indices: the right tags, integers of shape `[batch, steps]`; the likelihood of one out of range is NaN.
      sequence_lengths: integers, shape `[batch]`.
      transition_params: shape `[tags, tags]`, from a row's tag to a column's. If None, the variable `transitions`, in
        the scope around.

    Returns:
      The log likelihoods, shape `[batch]`, in float32 at least, and the transitions.

    Raises:
      ValueError: shapes do not fit.
      TypeError: the tags or the lengths are not integers.
    """
    inputs, tags, lengths = widen(as_float(inputs)), jnp.asarray(tag_indices), jnp.asarray(sequence_lengths)
    _check("crf_log_likelihood", inputs, lengths, tags=tags)
    if tags.shape != inputs.shape[:2]:
        raise ValueError(
            f"`est.nn.crf_log_likelihood` needs tags of shape {inputs.shape[:2]} for inputs of shape {inputs.shape}; "
            f"got shape {tags.shape}."
        )
    if transition_params is None:
        transition_params = get_variable("transitions", (inputs.shape[-1],) * 2)
    transitions = jnp.asarray(transition_params)
    wide = _check_transitions("crf_log_likelihood", inputs, transitions)
    if not tags.shape[1]:
        return jnp.zeros(lengths.shape, inputs.dtype), transitions
    runs = sequence_mask(lengths, inputs.shape[1])
    # What is behind the end may be anything, and has no gradient.
    inputs, tags = jnp.where(runs[..., None], inputs, 0), widen_int(tags)
    tags = jnp.where(tags < 0, inputs.shape[2], tags)  # a negative index would count from the end
    unary = jnp.take_along_axis(inputs, tags[..., None], 2, mode="fill")[..., 0]
    binary = wide.at[tags[:, :-1], tags[:, 1:]].get(mode="fill")
    score = jnp.where(runs, unary, 0).sum(1) + jnp.where(runs[:, 1:], binary, 0).sum(1)

    # The forward algorithm, in logarithms. After the end of a sequence the sums do not change, so that the last ones
    # are the sums of each sequence.
    def step(alphas: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, runs = at
        after = x + jax.nn.logsumexp(alphas[:, :, None] + wide, axis=1)
        return jnp.where(runs[:, None], after, alphas), None

    alphas, _ = jax.lax.scan(step, inputs[:, 0], (inputs[:, 1:].swapaxes(0, 1), runs[:, 1:].T))
    # As in TensorFlow, an empty sequence has the likelihood 1.
    norm = jnp.where(lengths > 0, jax.nn.logsumexp(alphas, axis=1), 0)
    return score - norm, transitions


def crf_decode(
    potentials: ArrayLike, transition_params: ArrayLike, sequence_length: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The most likely tags of each sequence, and their scores, as `tf.contrib.crf.crf_decode`.

    >>> scores = jnp.array([[[0.0, 2.0], [3.0, 0.0], [9.0, 0.0]]])
    >>> tags, score = crf_decode(scores, jnp.zeros((2, 2)), jnp.array([2]))
    >>> tags.tolist(), score.tolist()
    ([[1, 0, 0]], [5.0])

    Args:
      potentials: the scores of the tags, shape `[batch, steps, tags]`.
      transition_params: shape `[tags, tags]`, from a row's tag to a column's.
      sequence_length: integers, shape `[batch]`.

    Returns:
      The tags, int32 of shape `[batch, steps]`, zero behind the end of a sequence; and the scores, shape `[batch]`, in
      float32 at least. An empty sequence has the score 0.

    Raises:
      ValueError: shapes do not fit.
      TypeError: the lengths are not integers.
    """
    potentials, lengths = widen(as_float(potentials)), jnp.asarray(sequence_length)
    _check("crf_decode", potentials, lengths)
    transitions = _check_transitions("crf_decode", potentials, transition_params)
    if not potentials.shape[1]:
        return jnp.zeros(potentials.shape[:2], jnp.int32), jnp.zeros(lengths.shape, potentials.dtype)
    runs = sequence_mask(lengths, potentials.shape[1]).T

    # Viterbi's algorithm: the best score for each tag, and the tag before it on the best path. After the end of a
    # sequence the scores do not change, and the way back stays at the last tag until it reaches the end.
    def forwards(state: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, runs = at
        scores = state[:, :, None] + transitions
        return jnp.where(runs[:, None], x + scores.max(1), state), scores.argmax(1)

    def backwards(tag: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pointers, runs = at
        before = jnp.take_along_axis(pointers, tag[:, None], 1)[:, 0]
        return jnp.where(runs, before, tag), tag

    state, pointers = jax.lax.scan(forwards, potentials[:, 0], (potentials[:, 1:].swapaxes(0, 1), runs[1:]))
    first, others = jax.lax.scan(backwards, state.argmax(1), (pointers, runs[1:]), reverse=True)
    tags = jnp.where(runs, jnp.concatenate([first[None], others]), 0).T.astype(jnp.int32)
    return tags, jnp.where(lengths > 0, state.max(1), 0)


def _check(caller: str, inputs: jax.Array, lengths: jax.Array, **others: jax.Array) -> None:
    if inputs.ndim != 3 or lengths.shape != inputs.shape[:1]:
        raise ValueError(
            f"`est.nn.{caller}` needs scores of shape [batch, steps, tags] and lengths of shape [batch]; got shapes "
            f"{inputs.shape} and {lengths.shape}."
        )
    for name, array in {"lengths": lengths, **others}.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"`est.nn.{caller}` needs integers as {name}; got {array.dtype}.")


def _check_transitions(caller: str, inputs: jax.Array, transitions: ArrayLike) -> jax.Array:
    """The transitions, in float32 at least."""
    wide, shape = widen(as_float(transitions)), inputs.shape[2:] * 2
    if wide.shape != shape:
        raise ValueError(
            f"`est.nn.{caller}` needs transitions of shape {shape} for scores of shape {inputs.shape}; got shape "
            f"{wide.shape}."
        )
    return wide
