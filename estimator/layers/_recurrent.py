"""Recurrent layers: a cell that `jax.lax.scan` runs over the steps of a sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from estimator.core._rng import begin_loop
from estimator.core._typing import PyTree
from estimator.layers._cells import BasicLSTMCell, GatedCell, GRUCell, LSTMState, RNNCell, check_cells, select_rows
from estimator.layers._dropout import dropout
from estimator.layers._layer import Activation, Initializer, Regularizer, as_input, check_count, layer_scope, zeros
from estimator.variables._variable_scope import Reuse, VariableScope, variable_scope


def dynamic_rnn(
    cell: RNNCell,
    inputs: ArrayLike,
    sequence_length: ArrayLike | None = None,
    initial_state: PyTree = None,
    dtype: DTypeLike | None = None,
    parallel_iterations: Any = None,
    swap_memory: Any = None,
    time_major: bool = False,
    scope: str | VariableScope | None = None,
) -> tuple[jax.Array, PyTree]:
    """The outputs of a cell for all steps, and its last state, as `tf.nn.dynamic_rnn`.

    `est.layers.lstm` and `est.layers.gru` are it with one cell.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     layers = [est.layers.DropoutWrapper(est.layers.GRUCell(8), input_keep_prob=0.8) for _ in range(2)]
    ...     outputs, states = est.layers.dynamic_rnn(est.layers.MultiRNNCell(layers), features["x"], features["length"])
    ...     return est.EstimatorSpec(mode, predictions={"outputs": outputs, "last": states[-1]})
    >>> model, x = est.transform(model_fn), {"x": jnp.ones((2, 5, 3)), "length": jnp.array([5, 2])}
    >>> predictions = model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions
    >>> print(predictions["outputs"].shape, (predictions["outputs"][1, 1] == predictions["last"][1]).all())
    (2, 5, 8) True

    Args:
      cell: an `est.layers.RNNCell`.
      inputs: `[batch, steps, width]`, floating; with `time_major`, as the outputs then, `[steps, batch, width]`.
      sequence_length: how many steps each example has, `[batch]`; afterwards its outputs are zeros and its state stays.
        If None, all do.
      initial_state: of the form of the cell's `zero_state(batch)`, which is the default.
      dtype: of the state, if there is no `initial_state`; by default of the inputs.
      parallel_iterations, swap_memory: without effect.
      scope: of the cell's variables; "rnn" by default, made unique unless variables are reused.

    Raises:
      TypeError: the cell is something else, the inputs are not floating, or the lengths are not integers.
      ValueError: an argument is wrong, or there is a layer of that name already.
    """
    check_cells("dynamic_rnn", cell)
    with layer_scope("dynamic_rnn", scope, None, "rnn", shares=True):
        x, lengths = _inputs("dynamic_rnn", inputs, sequence_length, time_major)
        start = cell.zero_state(x.shape[1], dtype or x.dtype) if initial_state is None else initial_state
        outputs, state = _run(cell, x, start, lengths)
    return _as_given(outputs, time_major), state


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
    units = check_count("lstm", "units", units)
    cell = BasicLSTMCell(
        *(units, forget_bias, True, activation),
        kernel_initializer=kernel_initializer,
        bias_initializer=bias_initializer,
        kernel_regularizer=kernel_regularizer,
        trainable=trainable,
        name=cell_name,
        caller="lstm",
    )
    return _run_layer(cell, "lstm", inputs, sequence_length, initial_state, time_major, name, reuse)


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
    units = check_count("gru", "units", units)
    cell = GRUCell(
        *(units, activation, None, kernel_initializer, bias_initializer, cell_name),
        kernel_regularizer=kernel_regularizer,
        trainable=trainable,
        caller="gru",
    )
    return _run_layer(cell, "gru", inputs, sequence_length, initial_state, time_major, name, reuse)


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


def _run_layer(
    cell: GatedCell,
    layer: str,
    inputs: ArrayLike,
    sequence_length: ArrayLike | None,
    initial_state: PyTree,
    time_major: bool,
    name: str | None,
    reuse: Reuse,
) -> Any:
    with layer_scope(layer, name, reuse, "rnn", shares=True):
        x, lengths = _inputs(layer, inputs, sequence_length, time_major)
        start = cell.zero_state(x.shape[1], x.dtype)
        if initial_state is not None:
            leaves, shape = jax.tree.leaves(initial_state), (x.shape[1], cell.output_size)
            if any(jnp.shape(each) != shape for each in leaves):
                raise ValueError(
                    f"`est.layers.{layer}` needs an `initial_state` of shape {shape}; got "
                    f"{', '.join(str(jnp.shape(each)) for each in leaves)}."
                )
            start = jax.tree.unflatten(jax.tree.structure(start), [jnp.asarray(each, x.dtype) for each in leaves])
        outputs, state = _run(cell, x, start, lengths)
    return _as_given(outputs, time_major), state


def _run(cell: RNNCell, x: jax.Array, start: PyTree, lengths: jax.Array | None) -> tuple[jax.Array, PyTree]:
    """The outputs of all steps, and the state after an example's last one."""
    step: Callable[[Any, PyTree], tuple[jax.Array, PyTree]]
    if isinstance(cell, GatedCell):
        weights = cell.weights(x)
        # Of all steps, in one product of matrices.
        parts, step = cell.project(weights, x), functools.partial(cell.step, weights)
    else:
        parts, step = x, cell
        cell(x[0], start)  # makes the variables, which a loop cannot; XLA drops the rest
    iterate = begin_loop()

    def body(state: PyTree, at: tuple[jax.Array, Any]) -> tuple[PyTree, jax.Array]:
        number, part = at
        with iterate(number):
            output, after = step(part, state)
        # `scan` needs a carry of the same dtype before and after each step.
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)
        if lengths is None:
            return after, output
        # All steps run, masked: the length of `scan` is static and cannot depend on the longest example of a batch.
        runs = number < lengths
        return select_rows(runs, after, state), select_rows(runs, output, jnp.zeros_like(output))

    state, outputs = jax.lax.scan(body, jax.tree.map(jnp.asarray, start), (jnp.arange(x.shape[0]), parts))
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
