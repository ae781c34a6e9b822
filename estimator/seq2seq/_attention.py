"""Attention over a memory, and a cell with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from estimator.core._typing import PyTree
from estimator.layers import Dense, Layer, RNNCell
from estimator.layers._cells import check_cells
from estimator.variables._variables import get_variable


class _Attention(Layer):
    """The common part of attention mechanisms: the memory, its keys, and the mask of its lengths."""

    def __init__(
        self,
        default_name: str,
        num_units: int,
        memory: ArrayLike,
        memory_sequence_length: ArrayLike | None,
        probability_fn: Callable[[jax.Array], jax.Array] | None,
        score_mask_value: float | None,
    ) -> None:
        # TensorFlow's `name` is of its ops; the variables have the names of the class.
        super().__init__(None, default_name)
        values = jnp.asarray(memory)
        if values.ndim != 3:
            raise ValueError(f"`{self._call}` needs a memory of shape [batch, steps, width]; got {values.shape}.")
        self._mask = None
        if memory_sequence_length is not None:
            lengths = jnp.asarray(memory_sequence_length)
            if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != values.shape[:1]:
                raise ValueError(
                    f"`{self._call}` needs {values.shape[0]} integers as `memory_sequence_length`; got {lengths.dtype}"
                    f"{list(lengths.shape)}."
                )
            self._mask = jnp.arange(values.shape[1]) < lengths[:, None]
            values = jnp.where(self._mask[..., None], values, 0)
        self._num_units = num_units
        self._probability_fn = jax.nn.softmax if probability_fn is None else probability_fn
        # Not TensorFlow's -inf: the probabilities are the same, and a row without any memory, such as one that fills
        # a batch up, has no NaN.
        self._score_mask_value = -3e38 if score_mask_value is None else score_mask_value
        self.values = values
        self.keys = Dense(num_units, name="memory_layer", use_bias=False)(values)

    @property
    def _call(self) -> str:
        return f"est.seq2seq.{type(self).__name__}"

    def __call__(self, query: jax.Array) -> jax.Array:
        """The alignments, `[batch, memory steps]`."""
        with self._open_scope():
            score = self._score(query)
        if self._mask is not None:
            score = jnp.where(self._mask, score, jnp.asarray(self._score_mask_value, score.dtype))
        return self._probability_fn(score)

    def _score(self, query: jax.Array) -> jax.Array:
        raise NotImplementedError


class BahdanauAttention(_Attention):
    """Additive attention, as `tf.contrib.seq2seq.BahdanauAttention`; `est.seq2seq.AttentionWrapper` shows it.

    Its variables are `memory_layer/kernel`, in the scope where it is made, and where it is first applied
    `bahdanau_attention/query_layer/kernel`, `attention_v`, and of the normalized form `attention_g` and `attention_b`.

    Args:
      num_units: the width of keys and queries.
      memory: the outputs of an encoder, `[batch, steps, width]`.
      memory_sequence_length: how many steps of the memory each example has, `[batch]`: others are zeros, and get no
        attention. If None, all do.
      normalize: whether the score is normalized, with a trained scale and bias.
      probability_fn: makes alignments of scores, `[batch, steps]`; softmax by default.
      score_mask_value: the score of steps after the last one. By default such that their probability is 0.
      dtype, name: without effect.

    Raises:
      ValueError: the memory or the lengths have another shape.
    """

    def __init__(
        self,
        num_units: int,
        memory: ArrayLike,
        memory_sequence_length: ArrayLike | None = None,
        normalize: bool = False,
        probability_fn: Callable[[jax.Array], jax.Array] | None = None,
        score_mask_value: float | None = None,
        dtype: Any = None,
        name: str = "BahdanauAttention",
    ) -> None:
        options = memory_sequence_length, probability_fn, score_mask_value
        super().__init__("bahdanau_attention", num_units, memory, *options)
        self._query_layer, self._normalize = Dense(num_units, name="query_layer", use_bias=False), normalize

    def _score(self, query: jax.Array) -> jax.Array:
        projected, units = self._query_layer(query)[:, None], self._num_units
        v = get_variable("attention_v", (units,), projected.dtype)
        if self._normalize:
            scale = jax.nn.initializers.constant(math.sqrt(1 / units))
            v *= get_variable("attention_g", (), projected.dtype, scale) * jax.lax.rsqrt(jnp.sum(v**2))
            projected += get_variable("attention_b", (units,), projected.dtype, jax.nn.initializers.zeros)
        return jnp.sum(v * jnp.tanh(self.keys + projected), -1)


class LuongAttention(_Attention):
    """Multiplicative attention, as `tf.contrib.seq2seq.LuongAttention`.

    Its variables are `memory_layer/kernel`, in the scope where it is made, and of the scaled form
    `luong_attention/attention_g`.

    Args:
      num_units: the width of keys, which is to be the one of the queries, the outputs of the decoder's cell.
      scale: whether the score is multiplied by a trained number.
      memory, memory_sequence_length, probability_fn, score_mask_value, dtype, name: as in `BahdanauAttention`.

    Raises:
      ValueError: as in `BahdanauAttention`; or queries have another width.
    """

    def __init__(
        self,
        num_units: int,
        memory: ArrayLike,
        memory_sequence_length: ArrayLike | None = None,
        scale: bool = False,
        probability_fn: Callable[[jax.Array], jax.Array] | None = None,
        score_mask_value: float | None = None,
        dtype: Any = None,
        name: str = "LuongAttention",
    ) -> None:
        options = memory_sequence_length, probability_fn, score_mask_value
        super().__init__("luong_attention", num_units, memory, *options)
        self._scale = scale

    def _score(self, query: jax.Array) -> jax.Array:
        if query.shape[-1] != self._num_units:
            raise ValueError(
                f"`{self._call}` has keys of width {self._num_units}, and got a query of width {query.shape[-1]}. Give "
                "it the units of the decoder's cell as `num_units`."
            )
        score = jnp.einsum("bu,btu->bt", query, self.keys)
        return score * get_variable("attention_g", (), score.dtype, jax.nn.initializers.ones) if self._scale else score


class AttentionWrapperState(NamedTuple):
    """The state of an `AttentionWrapper`.

    Attributes:
      cell_state: of the cell within.
      attention: the output of the attention, `[batch, width]`.
      time: the number of steps so far.
      alignments: the probabilities of the memory's steps, `[batch, memory steps]`; a tuple of several mechanisms.
      alignment_history: the alignments of all steps, `[steps, batch, memory steps]`, after `dynamic_decode`, if they
        are asked for; else ().
    """

    cell_state: PyTree
    attention: jax.Array
    time: jax.Array
    alignments: PyTree
    alignment_history: PyTree

    def clone(self, **changes: Any) -> AttentionWrapperState:
        """The state with other values of some fields, as `clone(cell_state=encoder_state)`."""
        return self._replace(**changes)


class AttentionWrapper(RNNCell):
    """Cell with attention, as `tf.contrib.seq2seq.AttentionWrapper`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     memory, state = est.layers.dynamic_rnn(est.layers.GRUCell(8), features["x"], features["length"])
    ...     attention = est.seq2seq.BahdanauAttention(8, memory, features["length"])
    ...     cell = est.seq2seq.AttentionWrapper(est.layers.GRUCell(8), attention, attention_layer_size=4)
    ...     start = cell.zero_state(features["x"].shape[0]).clone(cell_state=state)
    ...     table = est.get_variable("table", (10, 3))
    ...     helper = est.seq2seq.GreedyEmbeddingHelper(table, jnp.zeros(features["x"].shape[0], int), end_token=1)
    ...     decoder = est.seq2seq.BasicDecoder(cell, helper, start, output_layer=est.layers.Dense(10))
    ...     outputs, _, lengths = est.seq2seq.dynamic_decode(decoder, maximum_iterations=6)
    ...     return est.EstimatorSpec(mode, predictions={"ids": outputs.sample_id, "lengths": lengths})
    >>> model, x = est.transform(model_fn), {"x": jnp.ones((2, 5, 3)), "length": jnp.array([5, 2])}
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(model.predict_step(state, x).predictions["ids"].shape)
    (2, 6)
    >>> [name for name in sorted(state.variables) if "attention/" in name or "memory" in name]
    ['decoder/attention_wrapper/bahdanau_attention/attention_v', \
'decoder/attention_wrapper/bahdanau_attention/query_layer/kernel', 'memory_layer/kernel']

    Args:
      cell: what is wrapped.
      attention_mechanism: a `BahdanauAttention` or `LuongAttention`, or several.
      attention_layer_size: the width of a dense layer of the cell's output and the context, `attention_layer/kernel`,
        which is the attention; of several mechanisms, of each. If None, the attention is the context.
      alignment_history: whether the last state has the alignments of all steps.
      cell_input_fn: of the inputs and the attention of the step before; both side by side by default.
      output_attention: whether the output is the attention (Luong's way) or the cell's (Bahdanau's).
      initial_cell_state: of the cell in `zero_state`.
      name: of the scope of the variables, "attention_wrapper" by default.

    Raises:
      ValueError: there are not as many sizes as mechanisms.
    """

    def __init__(
        self,
        cell: RNNCell,
        attention_mechanism: Any,
        attention_layer_size: int | Sequence[int] | None = None,
        alignment_history: bool = False,
        cell_input_fn: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        output_attention: bool = True,
        initial_cell_state: PyTree = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name, "attention_wrapper")
        (self._cell,) = check_cells("AttentionWrapper", cell)
        self._is_multi = isinstance(attention_mechanism, Sequence)
        self._mechanisms: tuple[_Attention, ...] = tuple(
            attention_mechanism if self._is_multi else [attention_mechanism]
        )
        for each in self._mechanisms:
            if not isinstance(each, _Attention):
                raise TypeError(
                    "`est.seq2seq.AttentionWrapper` needs an attention mechanism, such as "
                    f"`est.seq2seq.BahdanauAttention(units, memory)`; got {each!r}."
                )
        sizes: Sequence[int | None] = [None] * len(self._mechanisms)
        if attention_layer_size is not None:
            sizes = attention_layer_size if isinstance(attention_layer_size, Sequence) else [attention_layer_size]
        if len(sizes) != len(self._mechanisms):
            raise ValueError(
                f"`est.seq2seq.AttentionWrapper` needs one `attention_layer_size` for each of {len(self._mechanisms)} "
                f"mechanisms; got {attention_layer_size!r}."
            )
        self._layers = [size and Dense(size, name="attention_layer", use_bias=False) for size in sizes]
        self._width = sum(size or each.values.shape[-1] for size, each in zip(sizes, self._mechanisms, strict=True))
        self._has_history = alignment_history
        self._cell_input_fn = cell_input_fn or (lambda inputs, attention: jnp.concatenate([inputs, attention], -1))
        self._output_attention, self._initial_cell_state = output_attention, initial_cell_state
        self.output_size = self._width if output_attention else cell.output_size

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> AttentionWrapperState:
        """The state before the first step, with the `initial_cell_state` if there is one."""
        cell_state = self._initial_cell_state
        if cell_state is None:
            cell_state = self._cell.zero_state(batch_size, dtype)
        rows = {
            batch_size,
            *(each.values.shape[0] for each in self._mechanisms),
            *(x.shape[0] for x in jax.tree.leaves(cell_state)),
        }
        if len(rows) > 1:
            raise ValueError(
                f"`est.seq2seq.AttentionWrapper` has a memory, a state and a batch size of {sorted(rows)} rows. For a "
                "BeamSearchDecoder apply `est.seq2seq.tile_batch(x, beam_width)` to the memory, to its lengths and to "
                "the encoder's state, and give `batch_size * beam_width`."
            )
        alignments = self._one_or_all([jnp.zeros(each.values.shape[:2], dtype) for each in self._mechanisms])
        return AttentionWrapperState(
            cell_state=cell_state,
            attention=jnp.zeros((batch_size, self._width), dtype),
            time=jnp.zeros((), jnp.int32),
            alignments=alignments,
            # [batch, steps, memory steps] while decoding, so that beams take it along as any state.
            alignment_history=jax.tree.map(lambda x: x[:, None][:, :0], alignments) if self._has_history else (),
        )

    def call(self, inputs: jax.Array, state: PyTree) -> tuple[jax.Array, AttentionWrapperState]:
        if not isinstance(state, AttentionWrapperState):
            raise TypeError(
                "`est.seq2seq.AttentionWrapper` needs a state of its own: write "
                f"`cell.zero_state(batch_size).clone(cell_state=encoder_state)`; got {jax.tree.map(jnp.shape, state)}."
            )
        output, cell_state = self._cell(self._cell_input_fn(inputs, state.attention), state.cell_state)
        all_alignments, attentions = [], []
        for mechanism, layer in zip(self._mechanisms, self._layers, strict=True):
            alignments = mechanism(output)
            context = jnp.einsum("bt,btw->bw", alignments, mechanism.values)
            all_alignments.append(alignments)
            attentions.append(layer(jnp.concatenate([output, context], -1)) if layer else context)
        attention, alignments = jnp.concatenate(attentions, -1), self._one_or_all(all_alignments)
        history = state.alignment_history
        if self._has_history:
            # Not `.at[:, time].set`, since there is no room before `dynamic_decode` makes it.
            history = jax.tree.map(
                lambda steps, now: jnp.where((jnp.arange(steps.shape[1]) == state.time)[:, None], now[:, None], steps),
                *(history, alignments),
            )
        after = AttentionWrapperState(cell_state, attention, state.time + 1, alignments, history)
        return attention if self._output_attention else output, after

    def _one_or_all(self, values: list[Any]) -> Any:
        return tuple(values) if self._is_multi else values[0]


def map_histories(change: Callable[[jax.Array], jax.Array], state: PyTree) -> PyTree:
    """Changes the alignment histories in a decoder's state."""

    def is_attention(node: Any) -> bool:
        return isinstance(node, AttentionWrapperState)

    def change_one(node: Any) -> Any:
        if not is_attention(node):
            return node
        inner = map_histories(change, node.cell_state)
        return node._replace(cell_state=inner, alignment_history=jax.tree.map(change, node.alignment_history))

    return jax.tree.map(change_one, state, is_leaf=is_attention)
