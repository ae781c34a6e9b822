"""A Flax module in a model_fn, of either API: its collections as variables."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from estimator.core._frame import Frame, current_frame, current_trace
from estimator.core._mode_keys import ModeKeys
from estimator.core._rng import name_hash
from estimator.core._typing import PyTree
from estimator.variables._aggregation import VariableAggregation
from estimator.variables._partitioning import Partition
from estimator.variables._policy import Policy, cast_to_compute, innermost_policy
from estimator.variables._variables import assign, get_variable, read


class FlaxModule(abc.ABC):
    """A module in one run of a model_fn; call it like the module itself.

    Its collections are variables: "params" by the name of the module, others by their own names within it. Under an
    `est.Policy` its parameters and inputs are cast, and layers of Flax that say no `dtype` get the policy's.
    """

    _policy: Policy | None = None  # that the current call follows

    def __init__(
        self,
        frame: Frame,
        module: Any,
        name: str,
        aggregation: VariableAggregation | None,
        partition: Partition,
        rngs: Sequence[str] = (),
    ) -> None:
        self.module = module
        self._frame = frame
        self._name = name
        self._partition = partition
        self._rngs = tuple(rngs)
        self._aggregation = None if aggregation is None else VariableAggregation(aggregation)

    def __call__(self, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
        """Calls the module, or another of its methods."""
        if current_frame(f"the module {self._name!r}") is not self._frame:
            raise RuntimeError(
                f"The module {self._name!r} was called in another run of the model_fn than the one that created it. "
                "Call `est.flax_module` in the model_fn, so that each run creates its own."
            )
        return self._run(args, kwargs, method)

    @abc.abstractmethod
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any: ...

    @property
    def _trains(self) -> bool:
        return self._frame.mode == ModeKeys.TRAIN

    def _follow_policy(self, own: Any, is_first: bool = False) -> None:
        """Finds the policy of a call. A module that has a dtype computes in that, and the log says so at first."""
        self._policy = policy = innermost_policy()
        if policy is None or own is None:
            return
        self._policy = None
        if is_first and self._trains and self._frame.initializing and jnp.dtype(own) != policy.compute_dtype:
            logging.warning(
                "The module %r computes in %s, since its `dtype` says so, and not in %s, as the `est.Policy` around "
                "it: write `dtype=None`, or `with est.Policy(%r):` around its call.",
                *(self._name, jnp.dtype(own).name, policy.compute_dtype.name, jnp.dtype(own).name),
            )

    def _cast_inputs(self, inputs: Any) -> Any:
        return inputs if self._policy is None else jax.tree.map(cast_to_compute, inputs)

    def _initial_key(self) -> jax.Array:
        """The key that `get_variable` would give to an initializer."""
        self._check_trace("is initialized")
        return jax.random.fold_in(self._frame.key, name_hash(self._name))

    def _variable(self, collection: str) -> str:
        return self._name if collection == "params" else f"{self._name}/{collection}"

    def _get(self, collection: str, initial: PyTree = None) -> PyTree:
        """The value of a collection; the first call gets the variable from the state, or creates it."""
        name, policy = self._variable(collection), self._policy if collection == "params" else None
        if name not in self._frame.declared.trainable or initial is not None:
            values = jax.tree.leaves(self._frame.variables.get(name) if initial is None else initial)
            # Statistics of batch normalization are averaged over towers; counters and keys have no mean.
            is_mean = any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in values)
            default = VariableAggregation.MEAN if is_mean else VariableAggregation.ONLY_FIRST_TOWER
            with _without_scope(self._frame):
                get_variable(
                    name,
                    initializer=initial,
                    trainable=collection == "params",
                    aggregation=self._aggregation or default,
                    partition=self._partition if collection == "params" else None,
                )
        value = read(self._frame, name)
        return value if policy is None else _cast_parameters(policy, value)

    def _keep(self, collection: str, old: PyTree, new: PyTree) -> None:
        """Assigns the new value of a collection, if a call has changed it."""
        same = jax.tree.structure(old) == jax.tree.structure(new)  # type: ignore[operator]
        # By identity: a collection that a call does not change keeps its arrays, and tracers have no values to compare.
        if same and all(a is b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)):
            return
        if not same:
            raise ValueError(
                f"A call of the module {self._name!r} has changed the structure of its collection {collection!r}, from "
                f"{jax.tree.structure(old)} to {jax.tree.structure(new)}. A variable keeps its structure: if the "
                "module `sow`s these values, let it return them instead."
            )
        self._check_trace(f"changes its collection {collection!r}")
        with _without_scope(self._frame):
            assign(self._variable(collection), new)

    def _check_trace(self, what: str) -> None:
        if self._frame.tracing.trace != current_trace():
            raise ValueError(
                f"The module {self._name!r} {what} within a function that jax traces apart (`jax.checkpoint`, "
                "`jax.vmap`, `jax.lax.scan`, `jax.grad` ...), from which no variable gets out. If it only needs "
                "to be initialized, call it once outside before; otherwise use Flax's own `remat`, `vmap`, `scan` in "
                "the module."
            )


def _cast_parameters(policy: Policy, values: PyTree) -> PyTree:
    if not isinstance(values, Mapping):
        return policy.cast_variable(values, None, trainable=True)
    # A norm: in half precision, too, Flax multiplies by its scale, and adds its bias, in float32.
    return values if "scale" in values else {name: _cast_parameters(policy, each) for name, each in values.items()}


def repeated_keys(name: str, loop: str) -> str:
    """The error message for a module that draws random numbers in the body of a loop."""
    return (
        f"The module {name!r} draws random numbers (dropout, say) in a function that `{loop}` runs many times, each "
        "time with the same key. Put the loop into the module, by Flax's own `nn.scan`, `nn.vmap` or `nn.RNN` with "
        "`split_rngs`, or by `nnx.scan`; or turn the randomness off (`deterministic=True`)."
    )


@contextlib.contextmanager
def _without_scope(frame: Frame) -> Iterator[None]:
    """Lets variables have full names: a module may be called in another scope than the one that created it."""
    # `reuse` of the enclosing scope is for the user's variables, not for the module's.
    scope, reuse = frame.scope, frame.reuse
    frame.scope, frame.reuse = (), None
    try:
        yield
    finally:
        frame.scope, frame.reuse = scope, reuse
