"""Flax's NNX models. Imports Flax, so only `flax_module` imports this file.

An NNX model holds its arrays and updates them in place. Here each call creates a model from the variables, and assigns
the updated arrays to the variables. Only optimizers update parameters.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from estimator.core._rng import loop_around, next_key
from estimator.core._typing import PyTree
from estimator.interop._flax_base import FlaxModule, repeated_keys


def check_factory(factory: Any) -> None:
    """Raises a TypeError unless it is a function of `rngs`."""
    if isinstance(factory, nnx.Module):
        name = type(factory).__name__
        raise TypeError(
            f"`est.flax_module` got an NNX model, a {name}, which holds its own arrays instead of variables. "
            f"Give it a function that creates the model: `lambda rngs: {name}(..., rngs=rngs)`."
        )
    try:
        inspect.signature(factory).bind(rngs=None)
    except (TypeError, ValueError):
        raise TypeError(
            "`est.flax_module` takes a Linen module such as `nn.Dense(10)`, or a function with the one argument `rngs` "
            "that returns an NNX model, such as `lambda rngs: nnx.Linear(2, 1, rngs=rngs)`; "
            f"got {factory!r}. For models of other libraries use `est.get_variable`."
        ) from None


class NNXModule(FlaxModule):
    """An NNX model in one run of a model_fn."""

    _created = False

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any:
        if self._frame.initializing and not self._created:
            for name, value in _collections(nnx.state(self._make(self._initial_key()))).items():
                self._get(name, value)
            self._created = True
        graphs: list[Any] = []

        def make() -> nnx.State:
            graph, state = nnx.split(self._make(0))
            graphs.append(graph)
            return state

        # Abstractly, since making the model would compute its initial values, which the state already has. `make`
        # appends the graph to `graphs`.
        like = jax.eval_shape(make)
        values = {name: self._get(name) for name in _collections(like)}
        model = nnx.merge(graphs[0], _fill_state(like, values, next_key(self._frame, self._name)))
        loop = loop_around(self._frame)
        # Within a loop, a stream whose count changes has drawn from a key that is the same in each iteration.
        unused = _counts(model) if loop is not None else []
        if self._trains:
            model.train()
        else:
            model.eval()
        args, kwargs = self._cast_inputs((args, kwargs))
        output = (model if method is None else getattr(model, method))(*args, **kwargs)
        if loop is not None and any(a is not b for a, b in zip(unused, _counts(model), strict=True)):
            raise ValueError(repeated_keys(self._name, loop))
        if self._trains:
            for name, value in _collections(nnx.state(model)).items():
                if name != "params":
                    self._keep(name, values.get(name), value)
        return output

    def _make(self, key: Any) -> nnx.Module:
        model = self.module(rngs=nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"The function given to `est.flax_module` for {self._name!r} must return an NNX model; "
                f"it returned {model!r}."
            )
        self._follow_policy(_own_dtype(model), is_first=not self._created)
        if self._policy is not None:
            for _, module in nnx.iter_graph(model):
                if isinstance(module, nnx.Module) and hasattr(module, "dtype") and _own_dtype(module) is None:
                    module.dtype = self._policy.compute_dtype
        return model


def _own_dtype(module: nnx.Module) -> Any:
    own = getattr(module, "dtype", None)
    # An embedding that is given none takes the dtype of its parameters.
    return None if isinstance(module, nnx.Embed) and own == module.param_dtype else own


def _collection(leaf: Any) -> str | None:
    """The name of a leaf's collection; None for leaves that are not saved."""
    if not isinstance(leaf, nnx.Variable):
        return "arrays"
    if isinstance(leaf, nnx.RngState | nnx.Intermediate):
        return None
    if isinstance(leaf, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(type(leaf))
    except ValueError:  # a class of the user, not registered under another name
        return type(leaf).__name__


def _counts(model: nnx.Module) -> list[jax.Array]:
    """The number of draws from each random stream."""
    return [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.RngCount))]


def _collections(state: nnx.State) -> dict[str, PyTree]:
    """The arrays of a model, or their shapes, by collection, as nested dicts."""
    collections: dict[str, dict[Any, Any]] = {}
    for path, leaf in nnx.to_flat_state(state):
        name = _collection(leaf)
        if name is not None:
            value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            collections.setdefault(name, {})[path] = value
    return {name: unflatten_dict(flat) for name, flat in collections.items()}


def _fill_state(like: nnx.State, values: dict[str, PyTree], key: jax.Array) -> nnx.State:
    """Fills the state `like`, which has shapes, with the values of the variables and a key for each random stream."""
    flat = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(like)):
        name = _collection(leaf)
        if isinstance(leaf, nnx.RngKey):
            own = jax.random.fold_in(key, i)
            # A stream with a shape has one key for each copy of a vectorized module.
            value = jax.random.split(own, leaf.shape) if leaf.shape else own
        elif name is None:
            value = jnp.zeros(leaf.shape, leaf.dtype)  # the count of a stream
        else:
            value = values[name]
            for step in path:
                value = value[step]
        flat.append((path, leaf.replace(value) if isinstance(leaf, nnx.Variable) else value))
    return nnx.from_flat_state(flat)
