"""What an input_fn may take and return, and the one form in which the loops see its batches."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from estimator._sparse import has_sparse, padded

PyTree = Any

_ACCEPTED = (
    "an iterable of batches (a generator, list, tf.data dataset or data loader), a tuple "
    "(features, labels), or one batch of features (an array or a dict of arrays)"
)
_READY = (np.ndarray, np.generic, jax.Array, bool, int, float, complex)


def call_input_fn(input_fn: Callable[..., Any], mode: Any, params: Any, config: Any) -> Any:
    """Returns what `input_fn` returns, called with what it names of `mode`, `params`, `config`.

    >>> call_input_fn(lambda params: [params["n"]], "train", {"n": 3}, None)
    [3]

    Args:
      input_fn: a function of no argument, or of any of `mode`, `params` and `config`.
      mode: what the batches are for, of `est.ModeKeys`.
      params: the Estimator's params.
      config: the Estimator's `RunConfig`.

    Raises:
      TypeError: `input_fn` cannot be called.
    """
    if not callable(input_fn):
        raise TypeError(
            "`input_fn` must be callable: a function that returns the batches, say "
            f"`lambda: batches`; got {input_fn!r}."
        )
    taken = set(inspect.signature(input_fn).parameters)
    if isinstance(input_fn, functools.partial):
        taken -= input_fn.keywords.keys()  # The user has bound these.
    given = {"mode": mode, "params": params, "config": config}
    return input_fn(**{name: value for name, value in given.items() if name in taken})


def batches(result: Any) -> Iterator[tuple[PyTree, PyTree]]:
    """Returns an iterator over `(features, labels)`, whatever form the input_fn's `result` has.

    As in TensorFlow, a tuple is `(features, labels)` and features alone have the labels None.
    Unlike there, any Python iterable of batches will do, and arrays given directly are one batch,
    not an endless repetition. Leaves that are no arrays but can become one (torch and TensorFlow
    tensors) arrive as numpy arrays, if the first batch holds any; likewise sparse arrays are padded to
    a power of two of entries.

    >>> list(batches([(1, 2), (3, 4)]))
    [(1, 2), (3, 4)]
    >>> list(batches({"x": 1}))
    [({'x': 1}, None)]

    Args:
      result: a dict or an array (one batch of features), a tuple `(features, labels)` (one batch),
        or an iterable of features or of pairs `(features, labels)`, each a tuple or a list. Arrays
        have shape `(batch, ...)`.

    Raises:
      ValueError: a tuple, or a batch that is a tuple or a list, has another length than 2.
      TypeError: `result` is nothing of the above.
    """
    rest = map(_pair, _elements(result))
    first = next(rest, None)
    if first is None:
        return rest
    pairs = itertools.chain([first], rest)
    # Decided once: looking at every leaf of every batch would cost as much as a small step.
    converted = map(_to_numpy, pairs) if _needs_conversion(first) else pairs
    return map(padded, converted) if has_sparse(first) else converted


def _elements(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, Mapping)) or hasattr(result, "shape"):
        return iter([result])
    if not isinstance(result, (str, bytes)):
        if hasattr(result, "__iter__") or hasattr(result, "__getitem__"):
            return iter(result)
        if result is not None and not jax.tree_util.all_leaves([result]):
            return iter([result])  # A pytree of the user's own class.
    raise TypeError(f"input_fn should return {_ACCEPTED}; got {result!r}.")


def _pair(element: Any) -> tuple[PyTree, PyTree]:
    if not isinstance(element, (tuple, list)):
        return element, None
    if len(element) != 2:
        raise ValueError(
            "input_fn should return (features, labels) as a len 2 tuple. "
            "Put several features into a dict; "
            f"got a {type(element).__name__} of len {len(element)}."
        )
    return element[0], element[1]


def _is_foreign(leaf: Any) -> bool:
    return not isinstance(leaf, _READY) and hasattr(leaf, "__array__")


def _needs_conversion(pair: tuple[PyTree, PyTree]) -> bool:
    return any(map(_is_foreign, jax.tree.leaves(pair)))


def _to_numpy(pair: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if _is_foreign(leaf) else leaf, pair)
