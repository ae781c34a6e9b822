"""Variables of a model_fn: created once, read by name, written in training."""

from __future__ import annotations

import contextlib
import enum
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from estimator._frame import Frame, PyTree, current_frame
from estimator._spread import Partition, partitioned


class VariableAggregation(enum.StrEnum):
    """How the values that several towers `assign` to one variable become one value."""

    MEAN = "mean"
    SUM = "sum"
    ONLY_FIRST_TOWER = "only_first_tower"


class _AutoReuse(enum.Enum):
    AUTO_REUSE = "auto_reuse"


AUTO_REUSE: Final = _AutoReuse.AUTO_REUSE
"""For `variable_scope(reuse=...)`: create a variable the first time, return it from then on."""


@contextlib.contextmanager
def variable_scope(name: str, reuse: bool | _AutoReuse | None = None) -> Iterator[None]:
    """Prefixes the names of the variables got in the block with `name` and a "/".

    Args:
      name: the prefix; scopes nest.
      reuse: True: variables must exist in this run already; `AUTO_REUSE`: they may. None: as the enclosing scope.
        As in TensorFlow, an inner scope does not end an outer one's reuse.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     with est.variable_scope("layer"):
    ...         w = est.get_variable("w", (1, 2))
    ...     return est.EstimatorSpec(mode, predictions=features @ w)
    >>> model = est.transform(model_fn)
    >>> list(model.init(jax.random.key(0), jnp.ones((3, 1)), mode="infer").variables)
    ['layer/w']
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"`est.variable_scope` needs a non-empty name; got {name!r}.")
    frame = current_frame("est.variable_scope")
    scope, outer_reuse = frame.scope, frame.reuse
    frame.scope, frame.reuse = (*scope, name), reuse or outer_reuse
    try:
        yield
    finally:
        frame.scope, frame.reuse = scope, outer_reuse


def get_variable(
    name: str,
    shape: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
    initializer: Callable[..., PyTree] | PyTree = None,
    trainable: bool = True,
    aggregation: VariableAggregation = VariableAggregation.MEAN,
    partition: Partition = None,
) -> PyTree:
    """The value of a variable: a plain array, or a pytree of arrays.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (2,), initializer=jax.nn.initializers.ones)
    ...     net = est.get_variable("net", lambda key: {"b": jnp.zeros(2)})
    ...     return est.EstimatorSpec(mode, predictions=features * w + net["b"])
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones((1, 2)), mode="infer")
    >>> print(model.predict_step(state, jnp.ones((1, 2))).predictions)
    [[1. 1.]]

    Args:
      name: prefixed by the scopes around the call.
      shape: of an array variable. May be left out: see `initializer`.
      dtype: of an array variable.
      initializer: with a `shape`, `fn(key, shape, dtype)` as in `jax.nn.initializers`; by default, as in TensorFlow,
        glorot uniform, and zeros for integers and booleans. Without a `shape`, `fn(key) -> pytree`, or a concrete
        pytree of arrays: the way to take in the parameters of a Flax, Haiku or Equinox model whole. It may then
        stand in the place of `shape`.
      trainable: whether optimizers change it by default. Integers have no gradient and are never trainable.
      aggregation: what becomes of the values that several towers assign.
      partition: how the variable is cut over the devices of a tower, where towers have several
        (`replicate_model_fn(..., devices_per_tower=k)`): None or "part" for each dimension, at most one "part", such as
        `(None, "part")`. For a pytree, a function of each of its arrays that returns this, or None. Its gradient and
        slots are cut as it is. Where towers have one device, or there are none, it has no effect.

    Raises:
      TypeError: the partition is neither a tuple nor a function that returns one.
      ValueError: the name was got already in this run (and no scope says `reuse`), the state has no such variable,
        or has it with another shape or dtype; or the partition does not suit the shape.
    """
    frame = current_frame("est.get_variable")
    if not isinstance(name, str) or not name:
        raise ValueError(f"`est.get_variable` needs a non-empty name; got {name!r}.")
    if initializer is None and shape is not None and not is_shape(shape):
        shape, initializer = None, shape
    full = "/".join((*frame.scope, name))
    call = f"`est.get_variable({full!r})`"
    if full in frame.trainable:
        if not frame.reuse:
            raise ValueError(
                f"{call} was called twice in one run of the model_fn. To share the variable, call it in "
                "`with est.variable_scope(..., reuse=True)` (or `reuse=est.AUTO_REUSE`); "
                "otherwise give it another name."
            )
        check_declared(call, shape, dtype, frame.variables[full], "the first call")
        return read(frame, full)
    if frame.reuse is True:
        raise ValueError(
            f"{call} is in a scope with `reuse=True`, but no such variable was created in this run, only "
            f"{listed(frame.trainable)}. Create it first, or use `reuse=est.AUTO_REUSE`."
        )
    if frame.initializing:
        frame.variables[full] = _initial_value(call, frame, full, shape, dtype, initializer)
    elif full not in frame.variables:
        raise ValueError(
            f"{call} found no such variable in the state, which has {listed(frame.variables)}. "
            "A model_fn must create every variable in the mode that the state was initialized in."
        )
    else:
        check_declared(call, shape, dtype, frame.variables[full], "the state")
    if partition is not None:
        partitioned(call, frame, full, partition)
    frame.trainable[full] = _is_trainable(call, frame.variables[full], trainable)
    frame.aggregation[full] = VariableAggregation(aggregation)
    return read(frame, full)


def read_variable(name: str) -> PyTree:
    """The value of a variable got earlier in this run, with what the run has assigned to it since."""
    frame = current_frame("est.read_variable")
    return read(frame, resolve("est.read_variable", frame, name))


def assign(name: str, value: PyTree) -> None:
    """Gives a non-trainable variable a new value, from the end of this training step on.

    Later `get_variable` and `read_variable` calls in the same run see it. Across towers the values are merged by the
    variable's `aggregation`. Like an update op in TensorFlow, it has no effect in EVAL and PREDICT.

    Args:
      name: of a variable got earlier in this run; looked up in the current scope, then as a full name.
      value: of the variable's structure, shapes and dtypes. No gradient flows through it.

    Raises:
      ValueError: there is no such variable, it is trainable, or the value does not fit it.
    """
    frame, full, value = _checked_write("est.assign", name, value)
    if frame.mode == "train":
        frame.assigned[full] = value
        frame.added.pop(full, None)


def assign_add(name: str, delta: PyTree) -> None:
    """Adds to a non-trainable variable; across towers the deltas are summed. Otherwise as `assign`."""
    frame, full, delta = _checked_write("est.assign_add", name, delta)
    if frame.mode == "train":
        before = frame.added.get(full)
        frame.added[full] = delta if before is None else jax.tree.map(jnp.add, before, delta)


def read(frame: Frame, full: str) -> PyTree:
    frame.handed_out.add(full)
    value = frame.assigned.get(full, frame.variables[full])
    if full in frame.added:
        value = jax.tree.map(jnp.add, value, frame.added[full])
    return value if frame.trainable[full] else jax.lax.stop_gradient(value)


def name_hash(name: str) -> np.uint32:
    """The same number for a name in every process, to make a key of its own from one PRNG key."""
    return np.uint32(zlib.crc32(name.encode()))


def is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(isinstance(n, int | np.integer) for n in shape)


def listed(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def _initial_value(call: str, frame: Frame, full: str, shape: Any, dtype: Any, initializer: Any) -> PyTree:
    key = jax.random.fold_in(frame.key, name_hash(full))
    if shape is None:
        if initializer is None:
            raise ValueError(f"{call} needs a `shape` or an `initializer`; got neither.")
        return _as_arrays(call, initializer(key) if callable(initializer) else initializer, dtype)
    if 0 in shape:
        raise ValueError(f"{call} got the shape {tuple(shape)}, which has no elements. Check what it is computed from.")
    if initializer is None:
        initializer = _default_initializer
    elif not callable(initializer):
        raise ValueError(
            f"{call} got the shape {tuple(shape)} and an initializer that is a value, {initializer!r}. "
            "Leave out the shape, or write `jax.nn.initializers.constant(value)`."
        )
    value = initializer(key, tuple(shape), dtype)
    if not hasattr(value, "shape") or value.shape != tuple(shape):
        raise ValueError(
            f"{call}: the initializer must return an array of shape {tuple(shape)}; got {value!r}. "
            "Some initializers of jax.nn are factories: write `glorot_uniform()`, but `zeros`."
        )
    return jnp.asarray(value, dtype)


def _default_initializer(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    if len(shape) < 2:  # TensorFlow's fans of a vector are its length; jax has none for it.
        limit = math.sqrt(3 / max(1, *shape, 1))
        return jax.random.uniform(key, shape, dtype, -limit, limit)
    return jax.nn.initializers.glorot_uniform()(key, shape, dtype)


def _as_arrays(call: str, tree: PyTree, dtype: Any) -> PyTree:
    def as_array(path: Any, leaf: Any) -> jax.Array:
        if isinstance(leaf, bool | int | float | complex):
            return jnp.asarray(leaf, dtype)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise ValueError(
                f"{call}: every leaf of the initial value must be an array; got {leaf!r} at "
                f"{jax.tree_util.keystr(path) or 'the top'}. Keep what is no array out of the variable "
                "(for Equinox, `eqx.filter(model, eqx.is_array)`)."
            )
        return jnp.asarray(leaf, leaf.dtype)

    return jax.tree_util.tree_map_with_path(as_array, tree)


def _is_trainable(call: str, value: PyTree, trainable: bool) -> bool:
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value)]
    if trainable and any(inexact) and not all(inexact):
        raise ValueError(
            f"{call}: a trainable variable must not mix floating and integer arrays, which have no gradient. "
            "Put the integers in a variable of their own with `trainable=False`."
        )
    return trainable and all(inexact)


def check_declared(call: str, shape: Any, dtype: Any, value: PyTree, where: str) -> None:
    if shape is None:
        return
    have = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)]
    if have != [(tuple(shape), jnp.dtype(dtype))]:
        found = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in have)
        raise ValueError(
            f"{call} asks for {jnp.dtype(dtype)}{list(shape)}, but in {where} the variable is {found}. "
            "Change one of them, or initialize a new state."
        )


def resolve(caller: str, frame: Frame, name: str) -> str:
    scoped = "/".join((*frame.scope, str(name)))
    for full in (scoped, name):
        if full in frame.trainable:
            return full
    raise ValueError(
        f"`{caller}({name!r})` names no variable of this run, which has got {listed(frame.trainable)} so far. "
        "Get it with `est.get_variable` first."
    )


def _checked_write(caller: str, name: str, value: PyTree) -> tuple[Frame, str, PyTree]:
    frame = current_frame(caller)
    full = resolve(caller, frame, name)
    if frame.trainable[full]:
        raise ValueError(
            f"`{caller}({full!r})`: the variable is trainable, so its optimizer writes it. "
            "Create it with `trainable=False` to write it yourself."
        )
    current = frame.variables[full]
    if jax.tree.structure(value) != jax.tree.structure(current):  # type: ignore[operator]
        raise ValueError(
            f"`{caller}({full!r})` got a value of structure {jax.tree.structure(value)}, "
            f"but the variable has {jax.tree.structure(current)}."
        )

    def fit(leaf: Any, like: jax.Array) -> jax.Array:
        array = jnp.asarray(leaf)
        if array.shape != like.shape or (array.dtype != like.dtype and not array.weak_type):
            raise ValueError(
                f"`{caller}({full!r})` got {array.dtype}{list(array.shape)}, "
                f"but the variable is {like.dtype}{list(like.shape)}."
            )
        return jax.lax.stop_gradient(array.astype(like.dtype))

    return frame, full, jax.tree.map(fit, value, current)
