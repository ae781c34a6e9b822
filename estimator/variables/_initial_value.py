"""Initial values of variables, their shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._batch import unknown_dtype
from estimator.core._frame import Frame
from estimator.core._rng import name_hash
from estimator.core._typing import PyTree, Variables
from estimator.runtime._program import keep_together

DRAW = "draw_initial_value"
"""The name of the functions that draw the values of a variable: `steps/_init_programs.py` finds them by it."""


class InitialValues(list[Any]):
    """Sources of initial values beside initializers, which a model_fn has chosen; the later ones count more.

    Each has a method `read(variables)`: values by the names of their arrays, in the dtypes of `variables`.
    """

    def update(self, others: InitialValues) -> None:
        self.extend(others)

    def read(self, variables: Variables) -> Variables:
        values: Variables = {}
        for source in self:
            values |= source.read(variables)
        return values


def initial_value(call: str, frame: Frame, full: str, shape: Any, dtype: Any, initializer: Any) -> PyTree:
    # By the name and not by a count: a new variable does not change the initial values of the others.
    number = np.uint32(name_hash(full))
    if shape is None:
        key = jax.random.fold_in(frame.key, number)
        if initializer is None:
            raise ValueError(f"{call} needs a `shape` or an `initializer`; got neither.")
        try:
            value = initializer(key) if callable(initializer) else initializer
        except TypeError as error:
            error.add_note(f"Without a shape, {call} calls `initializer(key)`. One of jax.nn needs a shape: give it.")
            raise
        return _as_arrays(call, value, dtype)
    dtype = jnp.float32 if dtype is None else dtype
    _check_storable(call, jax.ShapeDtypeStruct(shape, dtype))
    if initializer is None:
        initializer = _default_initializer
    elif not callable(initializer):
        raise ValueError(
            f"{call} got the shape {shape} and an initializer that is a value, {initializer!r}. "
            "Leave out the shape, or write `jax.nn.initializers.constant(value)`."
        )

    def draw(key: jax.Array, number: jax.Array) -> jax.Array:
        value = initializer(jax.random.fold_in(key, number), shape, dtype)
        if not hasattr(value, "shape") or value.shape != shape:
            raise ValueError(
                f"{call}: the initializer must return an array of shape {shape}; got {value!r}. "
                "Some initializers of jax.nn are factories: write `glorot_uniform()`, but `zeros`."
            )
        return jnp.asarray(value, dtype)

    return keep_together(draw, DRAW)(frame.key, number)


def _check_storable(call: str, array: Any, where: str = "") -> None:
    """Raises an error for an array that a checkpoint or a compiled program cannot hold."""
    if 0 in array.shape:
        raise ValueError(
            f"{call} got the shape {array.shape}{where}, which has no elements. Check what it is computed from, and "
            "keep empty arrays out of the variable."
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return
    # XLA packs dtypes of less than a byte in some programs only; TensorStore has no float8_e4m3.
    if jax.dtypes.itemsize_bits(array.dtype) < 8 or array.dtype == jnp.float8_e4m3:
        raise TypeError(
            f"{call} got the dtype {array.dtype}{where}, which a variable cannot have. Use one of 8 bits, such as "
            "jnp.int8 or jnp.float8_e4m3fn, and cast its value where you use it."
        )


def _default_initializer(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    if len(shape) < 2:  # TensorFlow's fans of a vector are its length; jax has none for it.
        limit = math.sqrt(3 / max(1, *shape, 1))
        return jax.random.uniform(key, shape, dtype, -limit, limit)
    return jax.nn.initializers.glorot_uniform()(key, shape, dtype)


def _as_arrays(call: str, tree: PyTree, dtype: Any) -> PyTree:
    def as_array(path: Any, leaf: Any) -> jax.Array:
        where = jax.tree_util.keystr(path) or "the top"
        is_number = isinstance(leaf, bool | int | float | complex)
        if not is_number and not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise ValueError(
                f"{call}: every leaf of the initial value must be an array; got {leaf!r} at {where}. Keep what is not "
                "an array out of the variable (for Equinox, `eqx.filter(model, eqx.is_array)`)."
            )
        if not is_number and (fix := unknown_dtype(leaf.dtype)):
            raise TypeError(
                f"{call}: every leaf of the initial value must have a dtype of jax; got one at {where} {fix}"
            )
        # Python's numbers, also integers, become float32, the default of `get_variable`.
        own = jnp.float32 if is_number else jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        array = cast(f"{call}: the initial value at {where}", leaf, own if dtype is None else dtype)
        _check_storable(call, array, f" at {where}")
        return array

    return jax.tree_util.tree_map_with_path(as_array, tree)


def cast(what: str, value: Any, dtype: Any) -> jax.Array:
    """An array of the dtype. Floats may be rounded; what is lost besides is an error."""
    if isinstance(value, jax.Array) and value.dtype == dtype:
        return value
    exact = not jnp.issubdtype(dtype, jnp.inexact)
    # Of a traced value only the dtype is known.
    if isinstance(value, jax.core.Tracer):
        if exact and jnp.issubdtype(value.dtype, jnp.inexact):
            raise ValueError(f"{what} is {value.dtype}, and the dtype {jnp.dtype(dtype)}. Round it, or change one.")
        return value.astype(dtype)
    given = np.asarray(value)
    if given.dtype.kind == "c" and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(f"{what} is complex, and the dtype {jnp.dtype(dtype)}. Take a part of it, or change one.")
    with np.errstate(all="ignore"):
        array = given.astype(dtype)
    # A float may be rounded, but not become infinite; an integer must not change.
    lost = array != given if exact else np.isfinite(given) & ~np.isfinite(array)
    if lost.any():
        raise ValueError(
            f"{what} holds {given[lost].ravel()[0]!s}, which the dtype {jnp.dtype(dtype)} does not. Change the value, "
            'or give another `dtype`; 64 bits need `jax.config.update("jax_enable_x64", True)`.'
        )
    return jnp.asarray(array)


def is_trainable(call: str, value: PyTree, trainable: bool) -> bool:
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value)]
    if trainable and any(inexact) and not all(inexact):
        raise ValueError(
            f"{call}: a trainable variable must not mix floating and integer arrays, which have no gradient. "
            "Put the integers in a variable of their own with `trainable=False`."
        )
    return trainable and all(inexact)


def check_declared(call: str, shape: tuple[int, ...] | None, dtype: Any, value: PyTree, where: str) -> None:
    have = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)]
    if shape is not None:
        wanted = [(shape, jnp.dtype(jnp.float32 if dtype is None else dtype))]
    else:  # of any shapes
        wanted = [(shape, own if dtype is None else jnp.dtype(dtype)) for shape, own in have]
    if have != wanted:

        def describe(arrays: Sequence[Any]) -> str:
            return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in arrays)

        raise ValueError(
            f"{call} asks for {describe(wanted)}, but in {where} the variable is {describe(have)}. "
            "Change one of them, or initialize a new state."
        )


def as_shape(call: str, shape: Any) -> tuple[int, ...] | None:
    """A shape as a tuple of integers."""
    if shape is None:
        return None
    sizes = shape if isinstance(shape, tuple | list) else (shape,)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            inside = f"{size!r} in " if sizes is shape else ""
            raise TypeError(
                f"{call} takes a shape as its second argument, an integer or a tuple of integers; got {inside}{shape!r}"
                f", of type {type(size).__name__}. {_shape_fix(size, sizes is shape)}"
            )
        if size < 0:
            raise ValueError(f"{call} got the shape {shape!r}, of which {size} is negative. Give every dimension.")
    return tuple(int(size) for size in sizes)


def _shape_fix(size: Any, inside: bool) -> str:
    if inside and isinstance(size, float | np.floating):
        return "Divide sizes by `//`, which gives an integer. An initial value goes by `initializer=`."
    if inside and size is None:
        return "A variable has no unknown dimension: give its size."
    return "An initial value goes by `initializer=`, without a shape."


def as_dtype(call: str, dtype: Any) -> Any:
    """A dtype as jax has it; None is left to the callee."""
    if dtype is None:
        return None
    try:
        known = jax.dtypes.canonicalize_dtype(dtype)
        if unknown_dtype(known):
            raise TypeError
        # Python's types mean jax's default dtype of each kind; `np.float64` means 64 bits, which must not be lost
        # silently.
        if any(dtype is python for python in (bool, int, float, complex)) or jnp.dtype(dtype) == known:
            return known
    except TypeError:
        raise TypeError(f"{call} needs a dtype such as `jnp.float32`; got {dtype!r}.") from None
    raise ValueError(
        f"{call} got the dtype {jnp.dtype(dtype)}, for which jax needs "
        f'`jax.config.update("jax_enable_x64", True)`. Call that first, or use {known}.'
    )
