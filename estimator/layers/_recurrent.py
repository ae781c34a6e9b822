"""Recurrent layers: a cell that `jax.lax.scan` runs over the steps of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.layers._dense import multiply
from estimator.layers._dropout import dropout
from estimator.layers._layer import (
    Activation,
    Initializer,
    Regularizer,
    activate,
    as_input,
    check_count,
    layer_scope,
    ones,
    zeros,
)
from estimator.variables._variable_scope import Reuse, variable_scope
from estimator.variables._variables import get_variable


class LSTMState(NamedTuple):
    """The state of an LSTM, as TensorFlow's `LSTMStateTuple`.

    Attributes:
      c: the memory, `[batch, units]`.
      h: the output of the last step, `[batch, units]`.
    """

    c: jax.Array
    h: jax.Array


Step = Callable[[Any, Any], Any]
"""Function of a state, and of the part of a step's inputs that a cell needs, which returns the next state."""


def lstm(
    inputs: ArrayLike,
    units: int,
    sequence_length: ArrayLike | None = None,
    initial_state: LSTMState | None = None,
    forget_bias: float = 1.0,
    activation: Activation = None,
    time_major: bool = False,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = zeros,
    kernel_regularizer: Regularizer = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
    *,
    cell_name: str = "basic_lstm_cell",
) -> tuple[jax.Array, LSTMState]:
    """The outputs of all steps and the last state, as `tf.nn.dynamic_rnn` with a `BasicLSTMCell`.

    Its variables are `rnn/basic_lstm_cell/kernel`, `[width + units, 4 * units]` with the gates i, j, f, o, and `bias`.
    A second layer without a name shares them in a scope that reuses variables, and is in `rnn_1` elsewhere, where
    TensorFlow raises an error.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     outputs, state = est.layers.lstm(features["x"], 8, sequence_length=features["length"])
    ...     return est.EstimatorSpec(mode, predictions={"outputs": outputs, "last": state.h})
    >>> model, x = est.transform(model_fn), {"x": jnp.ones((2, 5, 3)), "length": jnp.array([5, 2])}
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> predictions = model.predict_step(state, x).predictions
    >>> print(state.variables["rnn/basic_lstm_cell/kernel"].shape, predictions["outputs"].shape)
    (11, 32) (2, 5, 8)
    >>> print((predictions["outputs"][1, 1] == predictions["last"][1]).all(), predictions["outputs"][1, 2:].any())
    True False

    Args:
      inputs: `[batch, steps, width]`, floating; with `time_major`, as the outputs then, `[steps, batch, width]`.
      units: the width of the output.
      sequence_length: how many steps each example has, `[batch]`; afterwards its outputs are zeros and its state stays.
        If None, all do.
      initial_state: if None, zeros.
      forget_bias: added to the forget gate.
      activation: used instead of tanh.
      kernel_initializer, bias_initializer, kernel_regularizer, trainable, name, reuse: as in `dense`.
      cell_name: of the scope within; "lstm_cell" if the original has an `LSTMCell`.

    Raises:
      TypeError: the inputs are not floating, or the lengths are not integers.
      ValueError: an argument is wrong, or there is a layer of that name already.
    """
    with layer_scope("lstm", name, reuse, "rnn", shares=True):
        x, lengths = _inputs("lstm", inputs, sequence_length, time_major)
        width, units = x.shape[-1], check_count("lstm", "units", units)
        with variable_scope(cell_name):
            shape = (width + units, 4 * units)
            kernel = get_variable(
                "kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=kernel_regularizer
            )
            bias = get_variable("bias", (4 * units,), x.dtype, bias_initializer, trainable)
        activation = jnp.tanh if activation is None else activation

        def step(state: tuple[jax.Array, jax.Array], gates: jax.Array) -> tuple[jax.Array, jax.Array]:
            c, h = state
            # TensorFlow's order of the gates, so that its checkpoints fit; Keras and torch have the forget gate second.
            i, j, f, o = jnp.split(gates + h @ kernel[width:], 4, axis=-1)
            new = activate("lstm", activation, j) * jax.nn.sigmoid(i)
            # Added in each step, and not to the initial bias: in TensorFlow's checkpoints the bias does not include it.
            c = c * jax.nn.sigmoid(f + forget_bias) + new
            return c, activate("lstm", activation, c) * jax.nn.sigmoid(o)

        gates = multiply(x, kernel[:width]) + bias  # of all steps, in one product of matrices
        # `_inputs` has moved the steps first, whatever `time_major` is.
        zero = jnp.zeros((x.shape[1], units), x.dtype)
        start = (zero, zero) if initial_state is None else tuple(initial_state)
        outputs, state = _run("lstm", gates, step, start, lengths, units)
    return _as_given(outputs, time_major), LSTMState(*state)


def gru(
    inputs: ArrayLike,
    units: int,
    sequence_length: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    activation: Activation = None,
    time_major: bool = False,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = None,
    kernel_regularizer: Regularizer = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Reuse = None,
    *,
    cell_name: str = "gru_cell",
) -> tuple[jax.Array, jax.Array]:
    """The outputs of all steps and the last state, as `tf.nn.dynamic_rnn` with a `GRUCell`.

    Its variables are `rnn/gru_cell/gates/kernel`, `[width + units, 2 * units]` with the gates r, u, `gates/bias`,
    `candidate/kernel` and `candidate/bias`. The arguments are as in `lstm`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     outputs, state = est.layers.gru(features, 8)
    ...     return est.EstimatorSpec(mode, predictions=state)
    >>> model, x = est.transform(model_fn), jnp.ones((2, 5, 3))
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(state.variables["rnn/gru_cell/gates/kernel"].shape, model.predict_step(state, x).predictions.shape)
    (11, 16) (2, 8)

    Args:
      bias_initializer: if None, ones for the gates, zeros for the candidate.
    """
    with layer_scope("gru", name, reuse, "rnn", shares=True):
        x, lengths = _inputs("gru", inputs, sequence_length, time_major)
        width, units = x.shape[-1], check_count("gru", "units", units)
        activation = jnp.tanh if activation is None else activation

        def variables(name: str, size: int, bias_default: Initializer) -> tuple[jax.Array, jax.Array]:
            shape, regularizer = (width + units, size), kernel_regularizer
            with variable_scope(name):
                return (
                    get_variable("kernel", shape, x.dtype, kernel_initializer, trainable, regularizer=regularizer),
                    get_variable("bias", (size,), x.dtype, bias_initializer or bias_default, trainable),
                )

        with variable_scope(cell_name):
            # Ones, TensorFlow's default: at first the gates are open, and most of the state is kept.
            gates_kernel, gates_bias = variables("gates", 2 * units, ones)
            kernel, bias = variables("candidate", units, zeros)

        def step(state: tuple[jax.Array], inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
            (h,) = state
            r, u = jnp.split(jax.nn.sigmoid(inputs[0] + h @ gates_kernel[width:]), 2, axis=-1)
            # `r` is applied to the state before the product, as in TensorFlow's cell; torch's and cuDNN's apply it
            # afterwards.
            candidate = activate("gru", activation, inputs[1] + (r * h) @ kernel[width:])
            return (u * h + (1 - u) * candidate,)

        parts = (multiply(x, gates_kernel[:width]) + gates_bias, multiply(x, kernel[:width]) + bias)  # as in `lstm`
        start = jnp.zeros((x.shape[1], units), x.dtype) if initial_state is None else jnp.asarray(initial_state)
        outputs, (state,) = _run("gru", parts, step, (start,), lengths, units)
    return _as_given(outputs, time_major), state


def bidirectional_lstm(
    inputs: ArrayLike,
    units: int,
    sequence_length: ArrayLike | None = None,
    time_major: bool = False,
    name: str | None = None,
    reuse: Reuse = None,
    *,
    cell_name: str = "basic_lstm_cell",
    **options: Any,
) -> tuple[tuple[jax.Array, jax.Array], tuple[LSTMState, LSTMState]]:
    """Two LSTMs, the second backwards through each sequence, as `tf.nn.bidirectional_dynamic_rnn`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     outputs, states = est.layers.bidirectional_lstm(features, 8)
    ...     return est.EstimatorSpec(mode, predictions=jnp.concatenate(outputs, -1))
    >>> model, x = est.transform(model_fn), jnp.ones((2, 5, 3))
    >>> state = model.init(jax.random.key(0), x, mode="infer")
    >>> print(model.predict_step(state, x).predictions.shape, *sorted(state.variables)[1::2])
    (2, 5, 16) bidirectional_rnn/bw/basic_lstm_cell/kernel bidirectional_rnn/fw/basic_lstm_cell/kernel

    Args:
      options: other arguments of `lstm`, for both, but for `initial_state`.
      inputs, units, sequence_length, time_major, name, reuse, cell_name: as in `lstm`.

    Returns:
      `((forwards, backwards), (state_forwards, state_backwards))`; each output is where its input is.
    """
    return _both_ways(lstm, inputs, units, sequence_length, time_major, name, reuse, cell_name, options)


def bidirectional_gru(
    inputs: ArrayLike,
    units: int,
    sequence_length: ArrayLike | None = None,
    time_major: bool = False,
    name: str | None = None,
    reuse: Reuse = None,
    *,
    cell_name: str = "gru_cell",
    **options: Any,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Two GRUs, the second backwards through each sequence; as `bidirectional_lstm`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     outputs, states = est.layers.bidirectional_gru(features, 8)
    ...     return est.EstimatorSpec(mode, predictions=jnp.concatenate(states, -1))
    >>> model, x = est.transform(model_fn), jnp.ones((2, 5, 3))
    >>> print(model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions.shape)
    (2, 16)
    """
    return _both_ways(gru, inputs, units, sequence_length, time_major, name, reuse, cell_name, options)


def stack_bidirectional_rnn(
    inputs: ArrayLike,
    units: Sequence[int],
    sequence_length: ArrayLike | None = None,
    cell: str = "lstm",
    time_major: bool = False,
    name: str | None = None,
    reuse: Reuse = None,
    *,
    dropout_rate: float = 0.0,
    **options: Any,
) -> tuple[jax.Array, tuple[Any, ...], tuple[Any, ...]]:
    """Bidirectional layers on top of each other, as `tf.contrib.rnn.stack_bidirectional_dynamic_rnn`.

    Each layer gets the outputs of both directions of the one below. Its variables are in `stack_bidirectional_rnn/
    cell_0/bidirectional_rnn`, `cell_1` and so on.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     outputs, forwards, backwards = est.layers.stack_bidirectional_rnn(features, [8, 4], dropout_rate=0.3)
    ...     return est.EstimatorSpec(mode, predictions=outputs)
    >>> model, x = est.transform(model_fn), jnp.ones((2, 5, 3))
    >>> print(model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions.shape)
    (2, 5, 8)

    Args:
      inputs, sequence_length, time_major, name, reuse: as in `lstm`.
      units: of each layer, the width of one direction.
      cell: "lstm" or "gru".
      dropout_rate: the part of each layer's inputs, but the first one's, that is set to zero in training: another one
        in each step, as with a `DropoutWrapper` whose `input_keep_prob` is `1 - dropout_rate`.
      options: other arguments of `bidirectional_lstm` or `bidirectional_gru`.

    Returns:
      The outputs of the last layer, of both directions side by side; the states of all layers forwards; and backwards.

    Raises:
      ValueError: there is no layer, or the cell is another one; or as `lstm` does.
    """
    if cell not in ("lstm", "gru") or isinstance(units, int) or not len(units):
        raise ValueError(
            "`est.layers.stack_bidirectional_rnn` needs the units of each layer, such as [64, 64], and 'lstm' or 'gru' "
            f"as `cell`; got {units!r} and {cell!r}."
        )
    layer = bidirectional_lstm if cell == "lstm" else bidirectional_gru
    outputs, states = jnp.asarray(inputs), []
    with layer_scope("stack_bidirectional_rnn", name, reuse, shares=True):
        for number, count in enumerate(units):
            with variable_scope(f"cell_{number}"):
                if number:
                    outputs = dropout(outputs, dropout_rate)
                both, state = layer(outputs, count, sequence_length, time_major, name="bidirectional_rnn", **options)
            outputs = jnp.concatenate(both, -1)
            states.append(state)
    forwards, backwards = zip(*states, strict=True)
    return outputs, forwards, backwards


def _both_ways(
    layer: Callable[..., Any],
    inputs: ArrayLike,
    units: int,
    sequence_length: ArrayLike | None,
    time_major: bool,
    name: str | None,
    reuse: Reuse,
    cell_name: str,
    options: dict[str, Any],
) -> Any:
    caller = f"bidirectional_{layer.__name__}"
    with layer_scope(caller, name, reuse, "bidirectional_rnn", shares=True):
        x, lengths = _inputs(caller, inputs, sequence_length, time_major)
        # Time-major, so that both directions share one transposition.
        options = {**options, "sequence_length": lengths, "time_major": True, "cell_name": cell_name}
        forwards, state_forwards = layer(x, units, name="fw", **options)
        backwards, state_backwards = layer(_reverse_steps(x, lengths), units, name="bw", **options)
    outputs = forwards, _reverse_steps(backwards, lengths)
    return tuple(_as_given(x, time_major) for x in outputs), (state_forwards, state_backwards)


def _run(
    layer: str, inputs: Any, step: Step, start: tuple[jax.Array, ...], lengths: jax.Array | None, units: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The outputs of all steps, and the state after an example's last one."""
    first = jax.tree.leaves(inputs)[0]
    steps, batch, dtype = first.shape[0], first.shape[1], first.dtype
    if any(jnp.shape(x) != (batch, units) for x in start):
        raise ValueError(
            f"`est.layers.{layer}` needs an `initial_state` of shape {(batch, units)}; got "
            f"{', '.join(str(jnp.shape(x)) for x in start)}."
        )

    def body(state: tuple[jax.Array, ...], at: tuple[jax.Array, Any]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        number, inputs = at
        after = step(state, inputs)
        if lengths is None:
            return after, after[-1]
        # All steps run, masked: the length of `scan` is static and cannot depend on the longest example of a batch.
        runs = (number < lengths)[:, None]
        output = jnp.where(runs, after[-1], 0)
        return tuple(jnp.where(runs, new, old) for new, old in zip(after, state, strict=True)), output

    # `scan` needs a carry of the same dtype before and after each step.
    start = tuple(jnp.asarray(x, dtype) for x in start)
    state, outputs = jax.lax.scan(body, start, (jnp.arange(steps), inputs))
    return outputs, state


def _inputs(
    layer: str, inputs: ArrayLike, sequence_length: ArrayLike | None, time_major: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The inputs, steps first, and the checked lengths."""
    x = as_input(layer, inputs, 3)
    x = x if time_major else jnp.swapaxes(x, 0, 1)
    if sequence_length is None:
        return x, None
    lengths = jnp.asarray(sequence_length)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"`est.layers.{layer}` needs integers as `sequence_length`; got {lengths.dtype}.")
    if lengths.shape != x.shape[1:2]:
        raise ValueError(
            f"`est.layers.{layer}` needs one `sequence_length` for each of the {x.shape[1]} examples; got shape "
            f"{lengths.shape}."
        )
    return x, lengths.astype(jnp.arange(0).dtype)


def _as_given(outputs: jax.Array, time_major: bool) -> jax.Array:
    return outputs if time_major else jnp.swapaxes(outputs, 0, 1)


def _reverse_steps(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Reverses the steps of each example; those after its last one stay where they are."""
    if lengths is None:
        return x[::-1]
    steps = jnp.arange(x.shape[0])[:, None]
    # A plain flip would put the padding first, and the state would include it.
    order = jnp.where(steps < lengths, lengths - 1 - steps, steps)
    return jnp.take_along_axis(x, order[:, :, None], axis=0)
