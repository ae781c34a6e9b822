"""Cells: one step of a recurrent net as an object, as in `tf.nn.rnn_cell`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from estimator.core._typing import PyTree
from estimator.layers._dense import dense, multiply
from estimator.layers._dropout import dropout
from estimator.layers._layer import (
    Activation,
    Initializer,
    Regularizer,
    activate,
    as_input,
    check_count,
    ones,
    refuse,
    zeros,
)
from estimator.layers._objects import Layer
from estimator.variables._variable_scope import get_variable_scope, variable_scope
from estimator.variables._variables import get_variable


class LSTMState(NamedTuple):
    """The state of an LSTM, as TensorFlow's `LSTMStateTuple`.

    Attributes:
      c: the memory, `[batch, units]`.
      h: the output of the last step, `[batch, units]`.
    """

    c: jax.Array
    h: jax.Array


class RNNCell(Layer):
    """One step of a recurrent net, `output, state = cell(inputs, state)`, as `tf.nn.rnn_cell.RNNCell`.

    `est.layers.dynamic_rnn` runs a cell over the steps of a sequence; `est.seq2seq` decodes with it. A subclass defines
    `call(inputs, state)`, which gets its variables by `est.get_variable`, `output_size` and `zero_state`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> class Sum(est.layers.RNNCell):
    ...     output_size = 3
    ...
    ...     def zero_state(self, batch_size, dtype=jnp.float32):
    ...         return jnp.zeros((batch_size, 3), dtype)
    ...
    ...     def call(self, inputs, state):
    ...         return inputs + state, inputs + state
    >>> def model_fn(features, labels, mode):
    ...     outputs, last = est.layers.dynamic_rnn(Sum(), features)
    ...     return est.EstimatorSpec(mode, predictions=last)
    >>> model, x = est.transform(model_fn), jnp.ones((1, 4, 3))
    >>> print(model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions)
    [[4. 4. 4.]]

    Attributes:
      name: of the scope of the variables, made unique in the one around the first use; see `est.layers.Layer`.
      output_size: the width of the output.
    """

    output_size: int

    def __init__(self, name: str | None = None, default_name: str = "rnn_cell") -> None:
        super().__init__(name, default_name)

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> PyTree:
        """The state before the first step: zeros."""
        raise NotImplementedError(f"{type(self).__name__} defines no `zero_state(batch_size, dtype)`.")

    def call(self, inputs: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        raise NotImplementedError(f"{type(self).__name__} defines no `call(inputs, state)`.")

    def __call__(self, inputs: ArrayLike, state: PyTree) -> tuple[jax.Array, PyTree]:
        with self._open_scope():
            return self.call(jnp.asarray(inputs), state)


class GatedCell(RNNCell, abc.ABC):
    """Cell that multiplies its inputs by a part of its weights, which `est.layers` does for all steps at once."""

    def __init__(
        self,
        units: int,
        activation: Activation,
        kernel_initializer: Initializer,
        bias_initializer: Initializer,
        name: str | None,
        default_name: str,
        kernel_regularizer: Regularizer = None,
        trainable: bool = True,
        caller: str | None = None,
    ) -> None:
        super().__init__(name, default_name)
        self._caller = caller or type(self).__name__
        self.output_size = check_count(self._caller, "num_units" if caller is None else "units", units)
        self._activation = jnp.tanh if activation is None else activation
        self._options = kernel_initializer, bias_initializer, kernel_regularizer, trainable

    def weights(self, x: jax.Array) -> Any:
        """The variables, for inputs of the width of these."""
        with self._open_scope():
            return self._get_weights(x)

    @abc.abstractmethod
    def _get_weights(self, x: jax.Array) -> Any:
        """The variables, in the scope of the cell."""

    @abc.abstractmethod
    def project(self, weights: Any, x: jax.Array) -> Any:
        """The part of the work that needs no state."""

    @abc.abstractmethod
    def step(self, weights: Any, projected: Any, state: PyTree) -> tuple[jax.Array, PyTree]:
        """The rest of it: the output, and the next state."""

    def __call__(self, inputs: ArrayLike, state: PyTree) -> tuple[jax.Array, PyTree]:
        x = as_input(self._caller, inputs, at_least=2)
        weights = self.weights(x)
        return self.step(weights, self.project(weights, x), state)

    def _layer(self, x: jax.Array, width: int, bias_default: Initializer = zeros) -> tuple[jax.Array, jax.Array]:
        kernel_initializer, bias_initializer, regularizer, trainable = self._options
        shape = (x.shape[-1] + self.output_size, width)
        kernel = get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=regularizer)
        return kernel, get_variable("bias", (width,), x.dtype, bias_initializer or bias_default, trainable)

    def _split(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The kernel of the inputs, and of the state."""
        return kernel[: -self.output_size], kernel[-self.output_size :]

    def _apply_activation(self, x: jax.Array) -> jax.Array:
        return activate(self._caller, self._activation, x)


class BasicLSTMCell(GatedCell):
    """LSTM's step, as `tf.nn.rnn_cell.BasicLSTMCell`; `est.layers.lstm` says what its variables are.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     cell = est.layers.MultiRNNCell([est.layers.BasicLSTMCell(n) for n in (8, 4)])
    ...     outputs, state = est.layers.dynamic_rnn(cell, features)
    ...     return est.EstimatorSpec(mode, predictions={"outputs": outputs, "top": state[1].h})
    >>> model, x = est.transform(model_fn), jnp.ones((2, 5, 3))
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(sorted(state.variables)[1::2], model.predict_step(state, x).predictions["top"].shape)
    ['rnn/multi_rnn_cell/cell_0/basic_lstm_cell/kernel', 'rnn/multi_rnn_cell/cell_1/basic_lstm_cell/kernel'] (2, 4)

    Args:
      num_units: the width of the output.
      forget_bias: added to the forget gate.
      state_is_tuple: must be True: a state is an `est.layers.LSTMState`.
      activation: used instead of tanh.
      reuse: without effect: a cell shares its variables by being used again, and in a scope that reuses them.
      name: of the scope of the variables.
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        state_is_tuple: bool = True,
        activation: Activation = None,
        reuse: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        default_name = options.pop("default_name", "basic_lstm_cell")
        options = {"kernel_initializer": None, "bias_initializer": zeros} | options
        super().__init__(num_units, activation, name=name, default_name=default_name, **options)
        refuse(self._caller, state_is_tuple=None if state_is_tuple else "False")
        self._forget_bias = forget_bias

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> LSTMState:
        zero = jnp.zeros((batch_size, self.output_size), dtype)
        return LSTMState(zero, zero)

    def _get_weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._layer(x, 4 * self.output_size)

    def project(self, weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        kernel, bias = weights
        return multiply(x, self._split(kernel)[0]) + bias

    def step(self, weights: Any, projected: jax.Array, state: PyTree) -> tuple[jax.Array, LSTMState]:
        c, h = state
        # TensorFlow's order of the gates, so that its checkpoints fit; Keras and torch have the forget gate second.
        i, j, f, o = jnp.split(projected + h @ self._split(weights[0])[1], 4, axis=-1)
        new = self._apply_activation(j) * jax.nn.sigmoid(i)
        # Added in each step, and not to the initial bias: in TensorFlow's checkpoints the bias does not include it.
        c = c * jax.nn.sigmoid(f + self._forget_bias) + new
        h = self._apply_activation(c) * jax.nn.sigmoid(o)
        return h, LSTMState(c, h)


class LSTMCell(BasicLSTMCell):
    """`est.layers.BasicLSTMCell` by the names of `tf.nn.rnn_cell.LSTMCell`: its variables are in `lstm_cell`.

    >>> print(LSTMCell(8, initializer=jax.nn.initializers.normal()).zero_state(2).h.shape)
    (2, 8)

    Args:
      num_units, forget_bias, state_is_tuple, activation, reuse, name: as in `BasicLSTMCell`.
      use_peepholes, cell_clip, num_proj, proj_clip, num_unit_shards, num_proj_shards: must be left out.
      initializer: of the kernel; if None, as the scope says, or else glorot uniform.
    """

    def __init__(
        self,
        num_units: int,
        use_peepholes: bool = False,
        cell_clip: float | None = None,
        initializer: Initializer = None,
        num_proj: int | None = None,
        proj_clip: float | None = None,
        num_unit_shards: int | None = None,
        num_proj_shards: int | None = None,
        forget_bias: float = 1.0,
        state_is_tuple: bool = True,
        activation: Activation = None,
        reuse: Any = None,
        name: str | None = None,
    ) -> None:
        refuse("LSTMCell", use_peepholes=use_peepholes, cell_clip=cell_clip, num_proj=num_proj, proj_clip=proj_clip)
        refuse("LSTMCell", num_unit_shards=num_unit_shards, num_proj_shards=num_proj_shards)
        options = {"kernel_initializer": initializer, "default_name": "lstm_cell"}
        super().__init__(num_units, forget_bias, state_is_tuple, activation, reuse, name, **options)


class GRUCell(GatedCell):
    """GRU's step, as `tf.nn.rnn_cell.GRUCell`; `est.layers.gru` says what its variables are.

    >>> print(GRUCell(8).zero_state(2).shape)
    (2, 8)

    Args:
      num_units, activation, reuse, name: as in `BasicLSTMCell`.
      kernel_initializer: if None, as the scope says, or else glorot uniform.
      bias_initializer: if None, ones for the gates, zeros for the candidate.
    """

    def __init__(
        self,
        num_units: int,
        activation: Activation = None,
        reuse: Any = None,
        kernel_initializer: Initializer = None,
        bias_initializer: Initializer = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_units, activation, kernel_initializer, bias_initializer, name, "gru_cell", **options)

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.zeros((batch_size, self.output_size), dtype)

    def _get_weights(self, x: jax.Array) -> Any:
        with variable_scope("gates"):
            # Ones, TensorFlow's default: at first the gates are open, and most of the state is kept.
            gates = self._layer(x, 2 * self.output_size, ones)
        with variable_scope("candidate"):
            return gates, self._layer(x, self.output_size)

    def project(self, weights: Any, x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(multiply(x, self._split(kernel)[0]) + bias for kernel, bias in weights)

    def step(self, weights: Any, projected: Any, state: PyTree) -> tuple[jax.Array, jax.Array]:
        gates, candidate = (self._split(kernel)[1] for kernel, _ in weights)
        r, u = jnp.split(jax.nn.sigmoid(projected[0] + state @ gates), 2, axis=-1)
        # `r` is applied to the state before the product, as in TensorFlow's cell; torch's and cuDNN's apply it
        # afterwards.
        state = u * state + (1 - u) * self._apply_activation(projected[1] + (r * state) @ candidate)
        return state, state


class MultiRNNCell(RNNCell):
    """Cells on top of each other, each of which gets the outputs of the one below; as `tf.nn.rnn_cell.MultiRNNCell`.

    The state is the tuple of the cells' states. The variables are in `multi_rnn_cell/cell_0`, `cell_1` and so on.

    >>> cell = MultiRNNCell([GRUCell(8), BasicLSTMCell(4)])
    >>> print(jax.tree.map(jnp.shape, cell.zero_state(2)), cell.output_size)
    ((2, 8), LSTMState(c=(2, 4), h=(2, 4))) 4

    Args:
      cells: from the bottom to the top. The same object twice has its variables once, as in TensorFlow.
      state_is_tuple: must be True.
    """

    def __init__(self, cells: Sequence[RNNCell], state_is_tuple: bool = True, name: str | None = None) -> None:
        super().__init__(name, "multi_rnn_cell")
        self._cells = check_cells("MultiRNNCell", *(cells if isinstance(cells, Sequence) else [cells]))
        refuse("MultiRNNCell", state_is_tuple=None if state_is_tuple else "False")
        self.output_size = self._cells[-1].output_size

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> tuple[PyTree, ...]:
        return tuple(cell.zero_state(batch_size, dtype) for cell in self._cells)

    def call(self, inputs: jax.Array, state: PyTree) -> tuple[jax.Array, tuple[PyTree, ...]]:
        if not isinstance(state, tuple) or len(state) != len(self._cells):
            raise ValueError(
                f"`est.layers.MultiRNNCell` of {len(self._cells)} cells needs a tuple of as many states; got "
                f"{jax.tree.map(jnp.shape, state)}."
            )
        states = []
        for number, (cell, each) in enumerate(zip(self._cells, state, strict=True)):
            with variable_scope(f"cell_{number}"):
                inputs, each = cell(inputs, each)
            states.append(each)
        return inputs, tuple(states)


class DropoutWrapper(RNNCell):
    """Cell with dropout of its inputs, outputs or state, as `tf.nn.rnn_cell.DropoutWrapper`: other ones in each step.

    As `est.layers.dropout` it acts in TRAIN, where TensorFlow's acts in all modes.

    >>> print(DropoutWrapper(GRUCell(8), output_keep_prob=0.7).output_size)
    8

    Args:
      cell: whose variables keep their names.
      input_keep_prob, output_keep_prob, state_keep_prob: the part that stays. A state of an LSTM has dropout in `h`.
      variational_recurrent: must be False.
      input_size, dtype: without effect.
      seed: as in `est.layers.dropout`.
    """

    def __init__(
        self,
        cell: RNNCell,
        input_keep_prob: float = 1.0,
        output_keep_prob: float = 1.0,
        state_keep_prob: float = 1.0,
        variational_recurrent: bool = False,
        input_size: Any = None,
        dtype: Any = None,
        seed: int | None = None,
    ) -> None:
        (self._cell,) = check_cells("DropoutWrapper", cell)
        super().__init__(cell.name)
        refuse("DropoutWrapper", variational_recurrent=variational_recurrent)
        self.output_size = cell.output_size
        self._keep_probs, self._seed = (input_keep_prob, output_keep_prob, state_keep_prob), seed

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> PyTree:
        return self._cell.zero_state(batch_size, dtype)

    # No scope of its own, as in TensorFlow: the cell within it is where it would be without.
    def __call__(self, inputs: ArrayLike, state: PyTree) -> tuple[jax.Array, PyTree]:
        for_inputs, for_output, for_state = (1 - each for each in self._keep_probs)
        output, state = self._cell(dropout(inputs, for_inputs, seed=self._seed), state)
        if for_state:
            state = jax.tree.map(
                lambda x: x._replace(h=self._drop(x.h, for_state)) if _is_lstm(x) else self._drop(x, for_state),
                state,
                is_leaf=_is_lstm,
            )
        return self._drop(output, for_output), state

    def _drop(self, x: jax.Array, rate: float) -> jax.Array:
        return dropout(x, rate, seed=self._seed)


class OutputProjectionWrapper(RNNCell):
    """Cell with a dense layer on its outputs, as `tf.contrib.rnn.OutputProjectionWrapper`.

    >>> print(OutputProjectionWrapper(GRUCell(8), 3).output_size)
    3

    Args:
      cell: whose outputs the layer gets; its variables are in `output_projection_wrapper`, beside `kernel` and `bias`.
      output_size: the width of the layer.
      activation: of the layer.
      reuse: as in `BasicLSTMCell`.
    """

    def __init__(self, cell: RNNCell, output_size: int, activation: Activation = None, reuse: Any = None) -> None:
        super().__init__(None, "output_projection_wrapper")
        (self._cell,) = check_cells("OutputProjectionWrapper", cell)
        self.output_size, self._activation = output_size, activation

    def zero_state(self, batch_size: int, dtype: DTypeLike = jnp.float32) -> PyTree:
        return self._cell.zero_state(batch_size, dtype)

    def call(self, inputs: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        output, state = self._cell(inputs, state)
        return dense(output, self.output_size, self._activation, name=cast(Any, get_variable_scope())), state


def _is_lstm(state: Any) -> bool:
    return isinstance(state, LSTMState)


def check_cells(caller: str, *cells: Any) -> tuple[RNNCell, ...]:
    for cell in cells or (cells,):
        if not isinstance(cell, RNNCell):
            raise TypeError(
                f"`est.layers.{caller}` needs cells, such as `est.layers.GRUCell(64)`; got {cell!r}. A class of your "
                "own is to be a subclass of `est.layers.RNNCell`."
            )
    return cells


def select_rows(rows: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Takes the rows of one tree of arrays where `rows` is True, and of another elsewhere."""
    # The where-branch that is not taken has no gradient; a product with a mask would pass NaN on.
    return jax.tree.map(
        lambda x, y: jnp.where(rows.reshape(rows.shape + (1,) * (jnp.ndim(x) - rows.ndim)), x, y), on_true, on_false
    )
