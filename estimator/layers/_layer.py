"""The common part of layers: the scope of their variables, activations, and checks of arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from estimator.core._frame import current_frame
from estimator.core._mode_keys import ModeKeys
from estimator.variables._policy import cast_to_compute
from estimator.variables._variable_scope import Reuse, VariableScope, variable_scope

Activation = Callable[[jax.Array], jax.Array] | str | None
Initializer = Callable[..., jax.Array] | None
Regularizer = Callable[[jax.Array], jax.Array] | None

zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "softmax": jax.nn.softmax,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "tanh": jnp.tanh,
}


@contextlib.contextmanager
def layer_scope(
    layer: str, name: str | VariableScope | None, reuse: Reuse, default_name: str | None = None, shares: bool = False
) -> Iterator[None]:
    """The scope of a layer's variables: its name, or the default one, which may be the layer's, made unique.

    The name of a layer that is an object is the scope of its first use.

    `shares`: whether the default name is not made unique in a scope that reuses variables.
    """
    default_name = default_name or layer
    frame = current_frame(f"est.layers.{layer}")  # or raises an error that names the layer
    if name is not None and (not isinstance(name, str | VariableScope) or not name):
        raise TypeError(f"`est.layers.{layer}` needs a name that is a string, or none; got {name!r}.")
    # The first call has the plain default name; made unique, it would be the name of a new layer.
    if name is None and (reuse or (shares and frame.reuse)):
        name = default_name
    with variable_scope(name, default_name, reuse=reuse):
        yield


def is_training(layer: str, training: bool | None) -> bool:
    """Decides whether a layer acts as in training: by its argument, or else by the mode."""
    frame = current_frame(f"est.layers.{layer}")
    if training is None:
        return frame.mode == ModeKeys.TRAIN
    # TensorFlow takes a tensor, too; here a traced value cannot choose a branch while the step is compiled.
    if not isinstance(training, bool | int | np.bool_) or training not in (0, 1):
        raise TypeError(
            f"`est.layers.{layer}` needs True or False as `training`; got {training!r}. Leave it out: by default it is "
            "True in TRAIN."
        )
    return bool(training)


def as_input(layer: str, inputs: ArrayLike, ndim: int | None = None, at_least: int = 1) -> jax.Array:
    """The inputs as a floating array of as many dimensions as the layer takes, in the dtype of an `est.Policy`."""
    array = jnp.asarray(inputs)
    # An error rather than a cast: integers are often ids, or pixels that are not scaled yet.
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"`est.layers.{layer}` needs floating inputs; got {array.dtype}{list(array.shape)}. Write "
            "`inputs.astype(jnp.float32)`."
        )
    if ndim is not None and array.ndim != ndim:
        shapes = {3: "[batch, steps, channels]", 4: "[batch, height, width, channels]"}
        raise ValueError(
            f"`est.layers.{layer}` needs inputs of {ndim} dimensions, {shapes[ndim]}; got {array.dtype}"
            f"{list(array.shape)}."
        )
    if array.ndim < at_least:
        raise ValueError(
            f"`est.layers.{layer}` needs inputs of at least {at_least} dimensions; got {array.dtype}"
            f"{list(array.shape)}."
        )
    return cast_to_compute(array)


def check_not_empty(layer: str, argument: str, size: object, inputs: jax.Array, output: jax.Array) -> None:
    """Raises a ValueError if a window of that size fits nowhere into the inputs, so that nothing is left of them."""
    # The output of an empty batch is empty, whatever the window is.
    if 0 in output.shape and 0 not in inputs.shape:
        raise ValueError(
            f"`est.layers.{layer}` got {argument}={size}, which is larger than the inputs, of shape {inputs.shape}. "
            "Write `padding='same'`, or make it smaller."
        )


def activate(layer: str, activation: Activation, x: jax.Array) -> jax.Array:
    if activation is None:
        return x
    if isinstance(activation, str) and activation in _ACTIVATIONS:
        return _ACTIVATIONS[activation](x)
    if not callable(activation):
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(
            f"`est.layers.{layer}` needs a function as its activation, such as `jax.nn.relu`, or one of {known}; got "
            f"{activation!r}."
        )
    return activation(x)


def refuse(layer: str, **arguments: Any) -> None:
    """Raises a ValueError for the first argument of TensorFlow's that was passed and that a layer does not support."""
    for name, value in arguments.items():
        # None and False, TensorFlow's defaults, pass: ported code may write them.
        if value is not None and value is not False:
            fix = "Leave it out."
            if name == "activity_regularizer":
                fix = "Leave it out, and write `est.losses.add_loss(regularizer(output))`."
            elif name.endswith("_constraint"):
                fix = (
                    "Leave it out, and project the variables in the optimizer, as `optax.keep_params_nonnegative` does."
                )
            raise ValueError(f"`est.layers.{layer}` does not support `{name}`; got {value!r}. {fix}")


def refuse_constraints(layer: str, activity_regularizer: Any, kernel_constraint: Any, bias_constraint: Any) -> None:
    """Refuses what Keras' layers with a kernel and a bias have and these do not."""
    refuse(
        layer,
        activity_regularizer=activity_regularizer,
        kernel_constraint=kernel_constraint,
        bias_constraint=bias_constraint,
    )


def check_count(layer: str, name: str, value: Any) -> int:
    """A positive integer, such as the number of units."""
    try:
        # numpy's integers count too; a float such as 64.0 does not, as it would not for a shape.
        count = value.__index__()
    except AttributeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise ValueError(f"`est.layers.{layer}` needs a positive integer as `{name}`; got {value!r}.")
    return int(count)


def sizes(layer: str, name: str, value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """One positive integer for each spatial dimension; a single one stands for all."""
    values: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,) * ndim
    if len(values) != ndim or any(isinstance(each, bool) or not hasattr(each, "__index__") for each in values):
        raise ValueError(f"`est.layers.{layer}` needs an integer or {ndim} of them as `{name}`; got {value!r}.")
    if any(each < 1 for each in values):
        raise ValueError(f"`est.layers.{layer}` needs positive integers as `{name}`; got {value!r}.")
    return tuple(int(each) for each in values)


def padding_of(layer: str, padding: str) -> str:
    """ "VALID" or "SAME"."""
    known = str(padding).upper()
    if known not in ("VALID", "SAME"):
        raise ValueError(f"`est.layers.{layer}` needs 'valid' or 'same' as `padding`; got {padding!r}.")
    return known


def channels_are_last(layer: str, data_format: str) -> bool:
    if data_format not in ("channels_last", "channels_first"):
        raise ValueError(
            f"`est.layers.{layer}` needs 'channels_last' or 'channels_first' as `data_format`; got {data_format!r}."
        )
    return data_format == "channels_last"
