"""Layers as objects: made in one place, applied in others, with the variables of their first use."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, cast

import jax
from jax.typing import ArrayLike

from estimator.core._frame import current_frame
from estimator.layers._convolution import conv1d, conv2d, conv2d_transpose, separable_conv2d
from estimator.layers._dense import dense
from estimator.layers._dropout import dropout
from estimator.layers._flatten import flatten
from estimator.layers._normalization import batch_normalization
from estimator.layers._pooling import average_pooling1d, average_pooling2d, max_pooling1d, max_pooling2d
from estimator.variables._variable_scope import VariableScope, variable_scope

P = ParamSpec("P")


class _Scopes(dict["Layer", VariableScope]):
    """The scopes of the layers that one run of a model_fn has used."""


class Layer:
    """Object whose variables are made at its first use, in a scope named there, and shared by each later one.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> class Model:
    ...     def __init__(self):
    ...         self.conv1, self.conv2 = (est.layers.Conv2D(n, 3, activation=jax.nn.relu) for n in (8, 16))
    ...         self.logits = est.layers.Dense(10, name="logits")
    ...
    ...     def __call__(self, images):
    ...         return self.logits(est.layers.Flatten()(self.conv2(self.conv1(images))))
    >>> def model_fn(features, labels, mode):
    ...     model = Model()
    ...     return est.EstimatorSpec(mode, predictions=model(features) + model(-features))
    >>> state = est.transform(model_fn).init(jax.random.key(0), jnp.ones((2, 8, 8, 1)), mode="infer")
    >>> [name for name in sorted(state.variables) if "kernel" in name]
    ['conv2d/kernel', 'conv2d_1/kernel', 'logits/kernel']

    The classes `AveragePooling1D`, `AveragePooling2D`, `BatchNormalization`, `Conv1D`, `Conv2D`, `Conv2DTranspose`,
    `Dense`, `Dropout`, `Flatten`, `MaxPooling1D`, `MaxPooling2D` and `SeparableConv2D` are layers, as in `tf.layers`:
    made with the arguments of the function of that name, except for `inputs`, `training` and `reuse`; called with the
    inputs, and with `training` if the function has it. They compute what the function does. A wrong argument is its
    error, raised at the first use. The cells of recurrent nets are layers too.

    As in TensorFlow, the scope is in the one around the first use, and its name, which is a default one also where you
    give it, is made unique there: a second layer named `logits` is in `logits_1`. A layer may be made outside of the
    model_fn: each run of it counts its own first use.

    Attributes:
      name: what you gave it, or the kind of the layer, such as "conv2d".
    """

    def __init__(self, name: str | None, default_name: str) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"`{self._call}` needs a name that is a string, or none; got {name!r}.")
        self.name = name or default_name

    @property
    def _call(self) -> str:
        return f"est.layers.{type(self).__name__}"

    @contextlib.contextmanager
    def _open_scope(self) -> Iterator[VariableScope]:
        scopes = current_frame(self._call).notes.get(_Scopes)
        # By the layer itself and not by its id: an id may be of another one later, and a layer that nobody holds is
        # still to have its name.
        first = self not in scopes
        with variable_scope(None, self.name) if first else variable_scope(scopes[self], reuse=True) as scope:
            scopes.setdefault(self, scope)
            yield scope


class _FunctionLayer(Layer):
    _function: Callable[..., Any]
    _signature: inspect.Signature  # of the constructor

    def __init__(self, *args: Any, **arguments: Any) -> None:
        try:
            self._arguments = self._signature.bind(*args, **arguments).arguments
        except TypeError as error:
            known = ", ".join(self._signature.parameters)
            raise TypeError(f"`{self._call}` {error}; it has the arguments {known}.") from None
        super().__init__(self._arguments.pop("name", None), self._function.__name__)

    def __call__(self, inputs: ArrayLike, **training: bool | None) -> jax.Array:
        function, known = self._function, inspect.signature(self._function).parameters
        if not {"training"} & known.keys() >= training.keys():
            raise TypeError(
                f"`{self._call}` is called with its inputs{' and `training`' * ('training' in known)}; got "
                f"{', '.join(map(repr, training))} too. Other arguments are given where the layer is made."
            )
        if "reuse" not in known:
            return cast(jax.Array, function(inputs, **self._arguments, **training, name=self.name))
        with self._open_scope() as scope:
            return cast(jax.Array, function(inputs, **self._arguments, **training, name=scope))

    apply = __call__


def _make_class(name: str, function: Callable[Concatenate[ArrayLike, P], jax.Array]) -> Callable[P, _FunctionLayer]:
    """The class of a function's layers; of its arguments, those but the inputs make one."""
    _, *others = inspect.signature(function).parameters.values()
    signature = inspect.Signature([each for each in others if each.name not in ("training", "reuse")])
    doc = f"`est.layers.{function.__name__}` as an object; see `est.layers.Layer`."
    members = {"_function": staticmethod(function), "_signature": signature, "__signature__": signature, "__doc__": doc}
    return cast(Callable[P, _FunctionLayer], type(name, (_FunctionLayer,), members))


AveragePooling1D = _make_class("AveragePooling1D", average_pooling1d)
"""`est.layers.average_pooling1d` as an object; see `est.layers.Layer`."""

AveragePooling2D = _make_class("AveragePooling2D", average_pooling2d)
"""`est.layers.average_pooling2d` as an object; see `est.layers.Layer`."""

BatchNormalization = _make_class("BatchNormalization", batch_normalization)
"""`est.layers.batch_normalization` as an object; see `est.layers.Layer`."""

Conv1D = _make_class("Conv1D", conv1d)
"""`est.layers.conv1d` as an object; see `est.layers.Layer`."""

Conv2D = _make_class("Conv2D", conv2d)
"""`est.layers.conv2d` as an object; see `est.layers.Layer`."""

Conv2DTranspose = _make_class("Conv2DTranspose", conv2d_transpose)
"""`est.layers.conv2d_transpose` as an object; see `est.layers.Layer`."""

Dense = _make_class("Dense", dense)
"""`est.layers.dense` as an object; see `est.layers.Layer`."""

Dropout = _make_class("Dropout", dropout)
"""`est.layers.dropout` as an object; see `est.layers.Layer`."""

Flatten = _make_class("Flatten", flatten)
"""`est.layers.flatten` as an object; see `est.layers.Layer`."""

MaxPooling1D = _make_class("MaxPooling1D", max_pooling1d)
"""`est.layers.max_pooling1d` as an object; see `est.layers.Layer`."""

MaxPooling2D = _make_class("MaxPooling2D", max_pooling2d)
"""`est.layers.max_pooling2d` as an object; see `est.layers.Layer`."""

SeparableConv2D = _make_class("SeparableConv2D", separable_conv2d)
"""`est.layers.separable_conv2d` as an object; see `est.layers.Layer`."""
