"""Variables of a model_fn: created once, read by name, written in training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._frame import Frame, check_is_known_outside, current_frame
from estimator.core._typing import PyTree
from estimator.runtime._transformations import differentiates, stages
from estimator.variables._aggregation import VariableAggregation
from estimator.variables._initial_value import as_dtype, as_shape, check_declared, initial_value, is_trainable
from estimator.variables._lookups import Lookups
from estimator.variables._partitioning import Partition, apply_partition
from estimator.variables._policy import innermost_policy


class Regularizers(dict[str, Callable[[Any], Any]]):
    """The regularizers that `get_variable` was given in one run, by full name."""


def get_variable(
    name: str,
    shape: int | Sequence[int] | Callable[..., PyTree] | None = None,
    dtype: Any = None,
    initializer: Callable[..., PyTree] | PyTree = None,
    trainable: bool = True,
    aggregation: VariableAggregation = VariableAggregation.MEAN,
    partition: Partition = None,
    regularizer: Callable[[PyTree], jax.Array] | None = None,
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
      shape: of an array variable; an integer is a shape of one dimension. May be left out: see `initializer`.
      dtype: of an array variable; float32 by default, and instead of half precision under an `est.Policy`. Without a
        `shape`, what every array of the initial value is cast to; by default each keeps its own (64 bits become 32
        without x64), and Python numbers are float32.
      initializer: with a `shape`, `fn(key, shape, dtype)` as in `jax.nn.initializers`; by default, as in TensorFlow,
        glorot uniform, and zeros for integers and booleans. Without a `shape`, `fn(key) -> pytree`, or a concrete
        pytree of arrays: the way to take in the parameters of a Flax, Haiku or Equinox model whole. Such a function,
        and no value, may also be given as the second argument, instead of a `shape`.
      trainable: whether optimizers change it by default. Integers have no gradient and are never trainable.
      aggregation: what becomes of the values that several towers assign.
      partition: how the variable is sharded over the devices of a tower, if towers have several
        (`replicate_model_fn(..., devices_per_tower=k)`): None or "part" for each dimension, at most one "part", such as
        `(None, "part")`. For a pytree, a function of each of its arrays that returns this, or None. Its gradient and
        slots are cut as it is. If towers have one device, or there are none, it has no effect.
      regularizer: `fn(value) -> scalar`, such as `est.regularizers.l2(1e-4)`, for
        `est.losses.get_regularization_loss`. This, `initializer` and what gets the variable may come from a
        `variable_scope` for all variables in it.

    Raises:
      TypeError: the shape holds something else than integers; `trainable` is neither True nor False; or the partition
        is neither a tuple nor a function that returns one.
      ValueError: the name was got already in this run (and no scope says `reuse`), the state has no such variable,
        or has it with another shape or dtype; it is got for the first time in a loop, a branch or another function
        that jax traces apart; the initial value does not fit into the dtype; or the partition does not suit the shape.
    """
    frame = current_frame("est.get_variable")
    if not isinstance(name, str) or not name:
        raise ValueError(f"`est.get_variable` needs a non-empty name; got {name!r}.")
    full = "/".join((*frame.scope, name))
    # `get_variable(name, initializer)`: the initial value has the shape.
    if initializer is None and callable(shape):
        shape, initializer = None, shape
    defaults, policy = frame.scope_defaults, innermost_policy()
    dtype = as_dtype(f"`est.get_variable({full!r})`", dtype)
    options = {
        "shape": shape,
        "dtype": dtype if policy is None else policy.storage_dtype(dtype),
        "initializer": defaults.initializer if initializer is None else initializer,
        "trainable": trainable,
        "aggregation": aggregation,
        "partition": partition,
        "regularizer": defaults.regularizer if regularizer is None and trainable else regularizer,
    }
    value = _get(full, **options) if defaults.custom_getter is None else defaults.custom_getter(_get, full, **options)
    return value if policy is None else policy.cast_variable(value, dtype, trainable)


def _get(
    name: str,
    shape: Any = None,
    dtype: Any = None,
    initializer: Any = None,
    trainable: bool = True,
    aggregation: VariableAggregation = VariableAggregation.MEAN,
    partition: Partition = None,
    regularizer: Callable[[PyTree], jax.Array] | None = None,
) -> PyTree:
    """`get_variable` by full name, with no defaults of scopes."""
    frame, full = current_frame("est.get_variable"), name
    call = f"`est.get_variable({full!r})`"
    shape, dtype = as_shape(call, shape), as_dtype(call, dtype)
    if regularizer is not None and not callable(regularizer):
        raise TypeError(
            f"{call} needs a regularizer that is a function of the value, such as `est.regularizers.l2(1e-4)`; got "
            f"{regularizer!r}."
        )
    if not isinstance(trainable, bool | np.bool_):
        raise TypeError(
            f"{call} needs True or False as `trainable`, its fifth argument; got {trainable!r}. A regularizer, the "
            "fifth in TensorFlow, goes by its name: `regularizer=`."
        )
    # This dict has each variable that the run got, in the order of the first calls.
    if full in frame.declared.trainable:
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
            f"{list_names(frame.declared.trainable)}. Create it first, or use `reuse=est.AUTO_REUSE`."
        )
    # Not in `jax.vmap` or the body of a loop: the variable would be a tracer of that function.
    check_is_known_outside(
        call,
        frame,
        "outside of which the variable would not exist. Get it before, outside of the function",
        unless=lambda names: not stages(names),
    )
    if frame.initializing:
        # The initializer always runs: values of a checkpoint must have its shapes and dtypes.
        made = initial_value(call, frame, full, shape, dtype, initializer)
        policy = innermost_policy()
        # Some models make their weights in the dtype of their inputs.
        if trainable and policy is not None:
            made = jax.tree.map(lambda x: x.astype(policy.storage_dtype(x.dtype)), made)
        frame.variables[full] = map_named(lambda name, leaf: frame.initial_values.get(name, leaf), {full: made})[full]
    elif full not in frame.variables:
        raise ValueError(
            f"{call}: the state has no such variable, only {list_names(frame.variables)}. "
            "A model_fn must create every variable in the mode that the state was initialized in."
        )
    else:
        check_declared(call, shape, dtype, frame.variables[full], "the state")
    if partition is not None:
        apply_partition(call, frame, full, partition)
    frame.declared.trainable[full] = is_trainable(call, frame.variables[full], trainable)
    frame.declared.aggregation[full] = VariableAggregation(aggregation)
    floating = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(frame.variables[full]))
    # The regularizer of a scope is not for counters and other integers.
    if regularizer is not None and floating:
        frame.notes.get(Regularizers)[full] = regularizer
    return read(frame, full)


class VariablesByName(Mapping[str, PyTree]):
    """Full names and values of variables; a value is read when it is asked for. A pytree, of the values."""

    def __init__(self, frame: Frame, names: Sequence[str]) -> None:
        self._frame = frame
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> PyTree:
        if name not in self._names:
            raise KeyError(name)
        return read(self._frame, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"VariablesByName({list(self)})"


def _flatten(view: VariablesByName) -> tuple[list[tuple[Any, PyTree]], tuple[str, ...]]:
    return [(jax.tree_util.DictKey(name), value) for name, value in view.items()], tuple(view)


def _unflatten(names: tuple[str, ...], values: Iterable[PyTree]) -> Any:
    return dict(zip(names, values, strict=True))


jax.tree_util.register_pytree_with_keys(VariablesByName, _flatten, _unflatten)


def trainable_variables(scope: str | None = None) -> Mapping[str, PyTree]:
    """The trainable variables that this run has got so far, by full name, in the order in which it got them.

    Functions with a `var_list` take it as it is; `jax.tree.map` and the like return a dict. A variable is read when its
    value is asked for, so the gradient of a table stays sparse if only its name was used.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     hidden = est.layers.dense(features, 4, jnp.tanh, name="hidden")
    ...     output = est.layers.dense(hidden, 1, name="output")
    ...     decay = sum(jnp.sum(v**2) for name, v in est.trainable_variables().items() if "bias" not in name)
    ...     loss = est.losses.mean_squared_error(labels, output) + 1e-4 * decay
    ...     train_op = est.Optimizer(optax.sgd(0.1)).minimize(loss, var_list=est.trainable_variables("output"))
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model, x = est.transform(model_fn), jnp.ones((2, 3))
    >>> state = model.init(jax.random.key(0), x, jnp.ones((2, 1)))
    >>> after, _ = model.train_step(state, x, jnp.ones((2, 1)))
    >>> [name for name in state.variables if (after.variables[name] != state.variables[name]).any()]
    ['output/bias', 'output/kernel']

    Args:
      scope: a regular expression that the beginning of the full name matches, as in TensorFlow. All if None.

    Raises:
      TypeError: the scope is not a string.
      RuntimeError: no model_fn is running.
    """
    frame = current_frame("est.trainable_variables")
    if scope is not None and not isinstance(scope, str):
        raise TypeError(f"`est.trainable_variables` needs the beginning of names, a string; got {scope!r}.")
    names = frame.declared.trainable_names
    return VariablesByName(frame, [name for name in names if scope is None or re.match(scope, name)])


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
      ValueError: there is no such variable, it is trainable, the value does not fit it, or is not known outside of a
        function that jax traces apart, such as the body of a loop.
    """
    frame, full, value = _checked_write("est.assign", name, value)
    # In other modes a write is only checked: evaluation changes no variable.
    if frame.mode == "train":
        frame.writes.assigned[full] = value
        # The new value replaces what was added before.
        frame.writes.added.pop(full, None)


def assign_add(name: str, delta: PyTree) -> None:
    """Adds to a non-trainable variable; across towers the deltas are summed. Otherwise as `assign`."""
    frame, full, delta = _checked_write("est.assign_add", name, delta)
    if frame.mode == "train":
        # Deltas are separate from assigned values: over towers they are summed, whatever the variable's aggregation is.
        before = frame.writes.added.get(full)
        frame.writes.added[full] = delta if before is None else jax.tree.map(jnp.add, before, delta)


def read(frame: Frame, full: str) -> PyTree:
    # The caller may use any row of the value, so that the gradient of a table is dense from now on.
    frame.notes.get(Lookups).read_whole.add(full)
    value = frame.writes.assigned.get(full, frame.variables[full])
    if full in frame.writes.added:
        value = jax.tree.map(jnp.add, value, frame.writes.added[full])
    # A variable that is not trainable is a constant in the loss, also in the user's `jax.grad`.
    return value if frame.declared.trainable[full] else jax.lax.stop_gradient(value)


def map_named(fn: Callable[[str, Any], Any], variables: PyTree) -> Any:
    """Variables, with each array replaced by `fn(name, array)`; the name is that in a checkpoint."""

    def of_path(path: Any, leaf: Any) -> Any:
        return fn(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)

    return jax.tree_util.tree_map_with_path(of_path, variables)


def list_names(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def resolve(caller: str, frame: Frame, name: str) -> str:
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(
            f"`{caller}` takes the name of a variable first, a string; got {name!r} of type {kind}. A variable is its "
            f"value here, and known by its name: write `{caller}('name', ...)`."
        )
    scoped = "/".join((*frame.scope, name))
    # First the name within the scope, as in the call that created it; a full name works anywhere.
    for full in (scoped, name):
        if full in frame.declared.trainable:
            return full
    raise ValueError(
        f"`{caller}({name!r})` names no variable of this run, which has got {list_names(frame.declared.trainable)} so "
        "far. Get it with `est.get_variable` first."
    )


def _checked_write(caller: str, name: str, value: PyTree) -> tuple[Frame, str, PyTree]:
    frame = current_frame(caller)
    full = resolve(caller, frame, name)
    check_is_known_outside(
        f"`{caller}({full!r})`",
        frame,
        "outside of which the value is not known. Return it, and write it outside",
        unless=differentiates,
    )
    if frame.declared.trainable[full]:
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
        # A Python number, which has a weak type, takes the variable's dtype. A cast from another dtype might round
        # silently.
        if array.shape != like.shape or (array.dtype != like.dtype and not array.weak_type):
            raise ValueError(
                f"`{caller}({full!r})` got {array.dtype}{list(array.shape)}, "
                f"but the variable is {like.dtype}{list(like.shape)}."
            )
        return jax.lax.stop_gradient(array.astype(like.dtype))

    return frame, full, jax.tree.map(fit, value, current)
