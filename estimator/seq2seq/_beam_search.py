"""Beam search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._typing import PyTree
from estimator.layers import RNNCell
from estimator.layers._cells import check_cells
from estimator.seq2seq._attention import AttentionWrapperState, map_histories
from estimator.seq2seq._decoder import Embedding, check_tokens, embedding_fn


class BeamSearchDecoderState(NamedTuple):
    """The state of a `BeamSearchDecoder`; each field has an entry for each beam, `[batch, beam_width, ...]`.

    Attributes:
      cell_state: of the cell.
      log_probs: of the whole sequence.
      finished: whether it has its end token.
      lengths: with the end token, int32.
      accumulated_attention_probs: the sum of the alignments, for the coverage penalty; else ().
    """

    cell_state: PyTree
    log_probs: jax.Array
    finished: jax.Array
    lengths: jax.Array
    accumulated_attention_probs: Any


class BeamSearchDecoderOutput(NamedTuple):
    """What each step of a beam search chose, `[batch, steps, beam_width]`.

    Attributes:
      scores: log probabilities of the sequences so far, divided by the length penalty.
      predicted_ids: the symbols, int32.
      parent_ids: the beams of the step before that they continue, int32.
    """

    scores: jax.Array
    predicted_ids: jax.Array
    parent_ids: jax.Array


class FinalBeamSearchDecoderOutput(NamedTuple):
    """The outputs of a `BeamSearchDecoder`.

    Attributes:
      predicted_ids: the sequences, the best first, int32 `[batch, steps, beam_width]`; filled up by the end token.
      beam_search_decoder_output: what each step chose.
    """

    predicted_ids: jax.Array
    beam_search_decoder_output: BeamSearchDecoderOutput


class BeamSearchDecoder:
    """Decoder that keeps the best `beam_width` sequences, as `tf.contrib.seq2seq.BeamSearchDecoder`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     cell = est.layers.OutputProjectionWrapper(est.layers.GRUCell(8), 10)
    ...     state = est.seq2seq.tile_batch(features, 3)
    ...     start, table = jnp.zeros(features.shape[0], int), est.get_variable("table", (10, 4))
    ...     decoder = est.seq2seq.BeamSearchDecoder(cell, table, start, 1, state, beam_width=3)
    ...     outputs, _, _ = est.seq2seq.dynamic_decode(decoder, maximum_iterations=6)
    ...     return est.EstimatorSpec(mode, predictions=outputs.predicted_ids)
    >>> model, x = est.transform(model_fn), jnp.ones((2, 8))
    >>> print(model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions.shape)
    (2, 6, 3)

    As in TensorFlow, a sequence is ranked by its log probability divided by `((5 + length) / 6) **
    length_penalty_weight`; one that has finished stays among the beams, followed by end tokens, until
    `beam_width` others are better.

    Args:
      cell: an `est.layers.RNNCell` whose outputs are logits, or become logits in the output layer.
      embedding, start_tokens, end_token: as in `GreedyEmbeddingHelper`.
      initial_state: of `batch * beam_width` rows; see `tile_batch`.
      beam_width: how many sequences are kept.
      output_layer: as in `BasicDecoder`.
      length_penalty_weight: 0 for none.
      coverage_penalty_weight: of the logarithms of the attention that the steps of the memory got, 0 for none; the cell
        is to be an `AttentionWrapper` then.

    Raises:
      ValueError: the state has another number of rows, or no attention.
    """

    tracks_own_finished = True
    maximum_iterations: int | None = None

    def __init__(
        self,
        cell: RNNCell,
        embedding: Embedding,
        start_tokens: ArrayLike,
        end_token: int,
        initial_state: PyTree,
        beam_width: int,
        output_layer: Callable[[jax.Array], jax.Array] | None = None,
        length_penalty_weight: float = 0.0,
        coverage_penalty_weight: float = 0.0,
    ) -> None:
        (self._cell,) = check_cells("BeamSearchDecoder", cell)
        self._embed, self._end_token = embedding_fn(embedding), end_token
        self._start_tokens, self._beams = check_tokens("BeamSearchDecoder", start_tokens), beam_width
        self._output_layer = output_layer or (lambda outputs: outputs)
        self._length_weight, self._coverage_weight = length_penalty_weight, coverage_penalty_weight
        self._rows = self._start_tokens.shape[0]
        wrong = {x.shape[0] for x in jax.tree.leaves(initial_state) if jnp.ndim(x)} - {self._rows * beam_width}
        if wrong:
            raise ValueError(
                f"`est.seq2seq.BeamSearchDecoder` of {self._rows} examples and {beam_width} beams needs an "
                f"`initial_state` of {self._rows * beam_width} rows; got {wrong.pop()}. Write "
                "`est.seq2seq.tile_batch(state, beam_width)`."
            )
        self._initial_state = initial_state

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(self._rows, self._beams, *x.shape[1:]) if x.ndim else x

    def _merge(self, x: jax.Array) -> jax.Array:
        return x.reshape(self._rows * self._beams, *x.shape[2:]) if x.ndim else x

    def initialize(self) -> tuple[jax.Array, PyTree, PyTree]:
        cell_state = jax.tree.map(self._split, self._initial_state)
        # All beams begin alike: the first one alone counts in the first step.
        is_first = jnp.broadcast_to(jnp.arange(self._beams) == 0, (self._rows, self._beams))
        log_probs = jnp.where(is_first, 0.0, -jnp.inf)
        attention = jnp.zeros_like(self._attention(cell_state)) if self._coverage_weight else ()
        state = BeamSearchDecoderState(cell_state, log_probs, ~is_first, jnp.zeros_like(is_first, jnp.int32), attention)
        tokens = jnp.repeat(self._start_tokens[:, None], self._beams, 1)
        return ~is_first, self._embed(tokens), state

    def step(
        self, time: Any, inputs: PyTree, state: BeamSearchDecoderState
    ) -> tuple[BeamSearchDecoderOutput, BeamSearchDecoderState, PyTree, jax.Array]:
        outputs, cell_state = self._cell(self._merge(inputs), jax.tree.map(self._merge, state.cell_state))
        logits = self._split(self._output_layer(outputs)).astype(state.log_probs.dtype)
        cell_state = jax.tree.map(self._split, cell_state)
        vocabulary = logits.shape[-1]
        is_end = jnp.arange(vocabulary) == self._end_token
        # A finished sequence is followed by end tokens, which cost it nothing.
        of_finished = jnp.where(is_end, 0, jnp.finfo(logits.dtype).min)
        steps = jnp.where(state.finished[..., None], of_finished, jax.nn.log_softmax(logits))
        log_probs = state.log_probs[..., None] + steps
        # As in TensorFlow, the penalty counts an end token from the step after on.
        runs = ~state.finished
        lengths = state.lengths[..., None] + (runs[..., None] & ~is_end).astype(jnp.int32)
        scores = log_probs / ((5.0 + lengths.astype(log_probs.dtype)) / 6.0) ** self._length_weight
        attention = state.accumulated_attention_probs
        if self._coverage_weight:
            attention = attention + jnp.where(runs[..., None], self._attention(cell_state), 0)
            covered = jnp.log(jnp.minimum(jnp.where(attention == 0, 1, attention), 1)).sum(-1)
            scores += self._coverage_weight * jnp.where(state.finished, covered, 0)[..., None]
        best, places = jax.lax.top_k(scores.reshape(self._rows, -1), self._beams)
        parents, ids = places // vocabulary, (places % vocabulary).astype(jnp.int32)

        def choose(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, parents.reshape(parents.shape + (1,) * (x.ndim - 2)), 1) if x.ndim else x

        was_finished = choose(state.finished)
        after = BeamSearchDecoderState(
            cell_state=jax.tree.map(choose, cell_state),
            log_probs=jnp.take_along_axis(log_probs.reshape(self._rows, -1), places, 1),
            finished=was_finished | (ids == self._end_token),
            lengths=choose(state.lengths) + (~was_finished).astype(jnp.int32),
            accumulated_attention_probs=jax.tree.map(choose, attention),
        )
        return BeamSearchDecoderOutput(best, ids, parents), after, self._embed(ids), after.finished

    def finalize(
        self, outputs: BeamSearchDecoderOutput, state: BeamSearchDecoderState, lengths: jax.Array
    ) -> tuple[FinalBeamSearchDecoderOutput, BeamSearchDecoderState, jax.Array]:
        def follow(beam: jax.Array, chosen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            ids, parents = (jnp.take_along_axis(x, beam, 1) for x in chosen)
            return parents, ids

        last = jnp.broadcast_to(jnp.arange(self._beams), state.lengths.shape)
        _, ids = jax.lax.scan(follow, last, (outputs.predicted_ids, outputs.parent_ids), reverse=True)
        is_end = ids == self._end_token
        ids = jnp.where(jnp.cumsum(is_end, 0) > is_end.astype(jnp.int32), self._end_token, ids)

        def mask(history: jax.Array) -> jax.Array:
            history = jnp.where((jnp.arange(history.shape[2]) < state.lengths[..., None])[..., None], history, 0)
            return self._merge(history)

        state = state._replace(cell_state=map_histories(mask, state.cell_state))
        return FinalBeamSearchDecoderOutput(ids, outputs), state, state.lengths

    def _attention(self, cell_state: PyTree) -> jax.Array:
        """The mean of the alignments of all mechanisms."""
        states = cell_state if type(cell_state) is tuple else (cell_state,)
        each = [jax.tree.leaves(one.alignments) for one in states if isinstance(one, AttentionWrapperState)]
        if not each:
            raise ValueError(
                "`est.seq2seq.BeamSearchDecoder` with a `coverage_penalty_weight` needs an `AttentionWrapper` as its "
                "cell. Leave the weight out."
            )
        means = [jnp.mean(jnp.stack(alignments), 0) for alignments in each]
        return jnp.mean(jnp.stack(means), 0)


def tile_batch(t: PyTree, multiplier: int, name: str | None = None) -> PyTree:
    """Repeats each row, for the beams of a `BeamSearchDecoder`, as `tf.contrib.seq2seq.tile_batch`.

    >>> tile_batch(jnp.array([1, 2]), 3).tolist()
    [1, 1, 1, 2, 2, 2]

    Args:
      t: a tree of arrays `[batch, ...]`.
      multiplier: how often, the beam width.
      name: without effect.
    """
    return jax.tree.map(lambda x: jnp.repeat(x, multiplier, 0), t)
