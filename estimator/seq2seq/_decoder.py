"""Decoding of sequences, step by step, with inputs that are known or chosen greedily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._frame import current_frame
from estimator.core._rng import begin_loop
from estimator.core._typing import PyTree
from estimator.layers import RNNCell
from estimator.layers._cells import check_cells, select_rows
from estimator.seq2seq._attention import map_histories
from estimator.variables._variable_scope import VariableScope, variable_scope

Embedding = Callable[[jax.Array], jax.Array] | ArrayLike


class TrainingHelper:
    """Inputs that are known, as `tf.contrib.seq2seq.TrainingHelper`.

    >>> helper = TrainingHelper(jnp.ones((2, 5, 3)), jnp.array([5, 2]))
    >>> print(helper.initialize()[1].shape)
    (2, 3)

    Args:
      inputs: `[batch, steps, ...]`, or with `time_major` `[steps, batch, ...]`; or a tree of such.
      sequence_length: how many steps each example has, `[batch]`.
      time_major: whether steps come first.
      name: without effect.
    """

    def __init__(
        self, inputs: PyTree, sequence_length: ArrayLike, time_major: bool = False, name: str | None = None
    ) -> None:
        inputs = jax.tree.map(jnp.asarray, inputs)
        self._inputs = inputs if time_major else jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), inputs)
        self._lengths = jnp.asarray(sequence_length)
        self.maximum_iterations, rows = jax.tree.leaves(self._inputs)[0].shape[:2]
        if self._lengths.shape != (rows,):
            raise ValueError(
                f"`est.seq2seq.TrainingHelper` needs one `sequence_length` for each of the {rows} examples; got shape "
                f"{self._lengths.shape}."
            )

    def initialize(self) -> tuple[jax.Array, PyTree]:
        return self._lengths == 0, self._read(0)

    def sample(self, time: Any, outputs: jax.Array, state: PyTree) -> jax.Array:
        return jnp.argmax(outputs, -1).astype(jnp.int32)

    def next_inputs(
        self, time: Any, outputs: jax.Array, state: PyTree, sample_ids: jax.Array
    ) -> tuple[jax.Array, PyTree, PyTree]:
        return time + 1 >= self._lengths, self._read(time + 1), state

    def _read(self, time: Any) -> PyTree:
        # After the last step all examples have finished, and whatever it reads is dropped.
        return jax.tree.map(lambda x: x[jnp.minimum(time, self.maximum_iterations - 1)], self._inputs)


class GreedyEmbeddingHelper:
    """Inputs that are the step before's most likely symbols, as `tf.contrib.seq2seq.GreedyEmbeddingHelper`.

    >>> helper = GreedyEmbeddingHelper(jnp.eye(4), start_tokens=jnp.array([0, 0]), end_token=1)
    >>> print(helper.sample(0, jnp.array([[0.1, 0.2, 0.9, 0.3]]), None))
    [2]

    Args:
      embedding: the table, `[vocabulary, width]`, or a function of ids.
      start_tokens: the first symbols, integers `[batch]`.
      end_token: the symbol after which an example has finished.
    """

    maximum_iterations: int | None = None

    def __init__(self, embedding: Embedding, start_tokens: ArrayLike, end_token: int) -> None:
        self._embed = embedding_fn(embedding)
        self._start_tokens, self._end_token = check_tokens("GreedyEmbeddingHelper", start_tokens), end_token

    def initialize(self) -> tuple[jax.Array, PyTree]:
        return jnp.zeros(self._start_tokens.shape, bool), self._embed(self._start_tokens)

    def sample(self, time: Any, outputs: jax.Array, state: PyTree) -> jax.Array:
        return jnp.argmax(outputs, -1).astype(jnp.int32)

    def next_inputs(
        self, time: Any, outputs: jax.Array, state: PyTree, sample_ids: jax.Array
    ) -> tuple[jax.Array, PyTree, PyTree]:
        return sample_ids == self._end_token, self._embed(sample_ids), state


def embedding_fn(embedding: Embedding) -> Callable[[jax.Array], jax.Array]:
    if callable(embedding):
        return embedding
    table = jnp.asarray(embedding)
    return lambda ids: table[ids]


def check_tokens(caller: str, start_tokens: ArrayLike) -> jax.Array:
    tokens = jnp.asarray(start_tokens)
    if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`est.seq2seq.{caller}` needs one integer for each example as `start_tokens`; got {tokens.dtype}"
            f"{list(tokens.shape)}. Write `jnp.full(batch_size, start_token)`."
        )
    return tokens.astype(jnp.int32)


class BasicDecoderOutput(NamedTuple):
    """The outputs of a `BasicDecoder`.

    Attributes:
      rnn_output: of the cell, or of the output layer: the logits, `[batch, steps, vocabulary]`.
      sample_id: the symbols, int32 `[batch, steps]`.
    """

    rnn_output: jax.Array
    sample_id: jax.Array


class BasicDecoder:
    """Decoder that asks a helper for each step's inputs, as `tf.contrib.seq2seq.BasicDecoder`.

    `est.seq2seq.AttentionWrapper` shows it.

    Args:
      cell: an `est.layers.RNNCell`.
      helper: a `TrainingHelper` or `GreedyEmbeddingHelper`, or one of your own: `initialize()` returns who has finished
        and the first inputs; `sample(time, outputs, state)` the symbols; and `next_inputs(time, outputs, state,
        sample_ids)` who has finished, the next inputs and the state.
      initial_state: of the cell.
      output_layer: of the cell's outputs, such as `est.layers.Dense(vocab_size)`.
    """

    tracks_own_finished = False

    def __init__(
        self,
        cell: RNNCell,
        helper: Any,
        initial_state: PyTree,
        output_layer: Callable[[jax.Array], jax.Array] | None = None,
    ) -> None:
        (self._cell,) = check_cells("BasicDecoder", cell)
        self._helper, self._initial_state, self._output_layer = helper, initial_state, output_layer
        self.maximum_iterations: int | None = getattr(helper, "maximum_iterations", None)

    def initialize(self) -> tuple[jax.Array, PyTree, PyTree]:
        return *self._helper.initialize(), self._initial_state

    def step(self, time: Any, inputs: PyTree, state: PyTree) -> tuple[BasicDecoderOutput, PyTree, PyTree, jax.Array]:
        outputs, state = self._cell(inputs, state)
        if self._output_layer is not None:
            outputs = self._output_layer(outputs)
        sample_ids = self._helper.sample(time=time, outputs=outputs, state=state)
        finished, inputs, state = self._helper.next_inputs(
            time=time, outputs=outputs, state=state, sample_ids=sample_ids
        )
        return BasicDecoderOutput(outputs, sample_ids), state, inputs, finished

    def finalize(self, outputs: PyTree, state: PyTree, lengths: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
        return outputs, state, lengths


def dynamic_decode(
    decoder: Any,
    output_time_major: bool = False,
    impute_finished: bool = False,
    maximum_iterations: int | None = None,
    parallel_iterations: Any = None,
    swap_memory: Any = None,
    scope: str | VariableScope | None = None,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Runs a decoder, as `tf.contrib.seq2seq.dynamic_decode`; `est.seq2seq.AttentionWrapper` shows it.

    There are always `maximum_iterations` steps, while TensorFlow ends where all examples of a batch have finished, so
    that an example's outputs do not depend on others, nor on the number of towers. What comes after its end is what
    the decoder says then; with `impute_finished`, zeros.

    Args:
      decoder: a `BasicDecoder` or `BeamSearchDecoder`, or one of your own with their methods.
      output_time_major: whether the outputs have steps first.
      impute_finished: whether outputs after the end are zeros, and the state stays.
      maximum_iterations: an int. It may be left out with a `TrainingHelper`, which has as many steps as its inputs.
      parallel_iterations, swap_memory: without effect.
      scope: of the variables that the steps get; "decoder", made unique, by default.

    Returns:
      The outputs, `[batch, steps, ...]`; the last state; and how many steps each example has, with the end token.

    Raises:
      TypeError: `maximum_iterations` is a value of the model.
      ValueError: there is none, or `impute_finished` with a beam search.
    """
    current_frame("est.seq2seq.dynamic_decode")
    own = getattr(decoder, "maximum_iterations", None)
    if maximum_iterations is None and own is None:
        raise ValueError(
            "`est.seq2seq.dynamic_decode` needs `maximum_iterations`, an int: the number of steps of a compiled "
            "program does not depend on what is decoded."
        )
    if isinstance(maximum_iterations, jax.core.Tracer) or not hasattr(maximum_iterations or 0, "__index__"):
        raise TypeError(
            "`est.seq2seq.dynamic_decode` needs an int as `maximum_iterations`; got "
            f"{type(maximum_iterations).__name__}. Write a number, or one of a shape, such as `2 * inputs.shape[1]`."
        )
    steps = min(each for each in (maximum_iterations, own) if each is not None)
    if impute_finished and decoder.tracks_own_finished:
        raise ValueError(
            "`est.seq2seq.dynamic_decode` got `impute_finished=True` for a decoder whose beams change places. Leave it "
            "out: finished beams are followed by end tokens."
        )
    with variable_scope(scope, "decoder"):
        finished, inputs, state = decoder.initialize()
        decoder.step(0, inputs, state)  # makes the variables, which a loop cannot; XLA drops the rest
        state = map_histories(lambda x: jnp.zeros((*x.shape[:-2], steps, x.shape[-1]), x.dtype), state)
        iterate = begin_loop()

        def body(carry: PyTree, time: jax.Array) -> tuple[PyTree, PyTree]:
            inputs, state, finished, lengths = carry
            with iterate(time):
                outputs, next_state, next_inputs, next_finished = decoder.step(time, inputs, state)
            if impute_finished:
                outputs = select_rows(finished, jax.tree.map(jnp.zeros_like, outputs), outputs)
                next_state = jax.tree.map(
                    lambda new, old: select_rows(finished, old, new) if jnp.ndim(new) else new, next_state, state
                )
            lengths = jnp.where(finished, lengths, time + 1)
            if not decoder.tracks_own_finished:
                next_finished = next_finished | finished
            after = next_inputs, next_state, next_finished, lengths
            return jax.tree.map(lambda new, old: new.astype(old.dtype), after, carry), outputs

        start = jax.tree.map(jnp.asarray, (inputs, state, finished, jnp.zeros_like(finished, jnp.int32)))
        (_, state, _, lengths), outputs = jax.lax.scan(body, start, jnp.arange(steps, dtype=jnp.int32))
        outputs, state, lengths = decoder.finalize(outputs, state, lengths)
    if not output_time_major:
        outputs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), outputs)
    return outputs, map_histories(lambda x: jnp.swapaxes(x, 0, 1), state), lengths
