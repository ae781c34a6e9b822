"""Calls an input_fn, and turns whatever it returns into an iterator over `(features, labels)`."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
from jax.tree_util import tree_leaves

from estimator.core._batch import named_leaves
from estimator.core._bcoo import has_sparse, pad_sparse
from estimator.core._placement import Placement
from estimator.core._typing import PyTree
from estimator.inputs._array_iterator import RowBatches
from estimator.inputs._batch_values import Stack, bring_near, copy_batch, default_devices
from estimator.inputs._shape_watch import ShapeWatch
from estimator.porting._missing_names import explain_missing_key

_IN_MEMORY: tuple[type, ...] = type(iter([])), type(iter(())), itertools.repeat, RowBatches
_ACCEPTED = (
    "an iterable of batches (a generator, list, tf.data dataset or data loader), a tuple "
    "(features, labels), or one batch of features (an array or a dict of arrays)"
)


def call_input_fn(input_fn: Callable[..., Any], mode: object, params: object, config: object) -> Any:
    """Calls `input_fn` with `mode`, `params` and `config`, as far as it has these parameters.

    >>> call_input_fn(lambda params: [params["n"]], "train", {"n": 3}, None)
    [3]
    """
    if not callable(input_fn):
        raise TypeError(
            "`input_fn` must be callable: a function that returns the batches, say "
            f"`lambda: batches`; got {reprlib.repr(input_fn)} of type {type(input_fn).__name__}."
        )
    arguments = {"mode": mode, "params": params, "config": config}
    # These are still in the signature, but the user has bound them: the Estimator must not override them.
    bound = input_fn.keywords.keys() if isinstance(input_fn, functools.partial) else ()
    parameters = {name: p for name, p in inspect.signature(input_fn).parameters.items() if name not in bound}
    unknown = [name for name, p in parameters.items() if name not in arguments and _is_required(p)]
    if unknown:
        raise TypeError(
            f"`input_fn` may take mode, params and config, and nothing else without a default; got {input_fn!r}, which "
            f"takes {unknown}. Bind what it needs: `functools.partial(input_fn, {unknown[0]}=...)`."
        )
    try:
        return input_fn(**{name: value for name, value in arguments.items() if name in parameters})
    except Exception as error:
        explain_missing_key(error, params=params)
        raise


def _is_required(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not several


class Batches(Iterator[tuple[PyTree, PyTree]]):
    """An iterator over the batches of an input_fn, as `(features, labels)`, that can peek, skip and resume.

    Batches are copies of what the input yields, see `_batch_values.py`. Only one thread may use it at a time.

    >>> source = Batches(iter([(1, 2), (3, 4), (5, 6)]))
    >>> source.peek(), source.skip(1), next(source)
    ((1, 2), 1, (3, 4))

    Args:
      elements: an iterator over features or pairs `(features, labels)`.
      is_one_batch: whether the input_fn returned one batch instead of an iterable of batches; also an attribute.
      is_elastic: whether its position is the same in all processes, and holds for any number; also an attribute.
    """

    def __init__(self, elements: Iterator[Any], is_one_batch: bool = False, is_elastic: bool = False) -> None:
        self._elements = elements
        self.is_one_batch = is_one_batch
        self.is_elastic = is_elastic
        self._has_sparse: bool | None = None  # in the first batch: checking each takes as long as a small step
        self._devices: Set[jax.Device] | None = None
        self._stack: Stack | None = None
        self._shapes = ShapeWatch()
        self._peeked: tuple[PyTree, PyTree] | None = None
        self._before_peek: Any = None

    def __next__(self) -> tuple[PyTree, PyTree]:
        if self._peeked is not None:
            pair, self._peeked = self._peeked, None
            return pair
        try:
            element = next(self._elements)
        except (KeyError, AttributeError) as error:  # of a generator, which runs only now
            explain_missing_key(error)
            raise
        pair = copy_batch(*pair_of(element), self._devices, self._stack)
        if self._has_sparse is None:
            self._has_sparse = has_sparse(pair)
        if self._has_sparse:
            pair = pad_sparse(pair)
        # A list is faster than a generator for the few leaves of most batches.
        shapes = tuple([getattr(leaf, "shape", ()) for leaf in tree_leaves(pair)])
        self._shapes.note(shapes, lambda: named_leaves(*pair))
        return pair

    def expect(self, n: int) -> None:
        """Announces that one program takes the next `n` batches, which then are copied into one stack."""
        self._stack = Stack(n) if n > 1 else None
        if self._stack and self._peeked is not None:  # the first of them
            self._peeked = copy_batch(*self._peeked, self._devices, self._stack)

    def place(self, placement: Placement) -> None:
        """Makes arrays that are not on the devices of `placement` numpy arrays, from now on and in a peeked batch."""
        sharding = placement.batch(1)
        self._devices = devices = default_devices() if sharding is None else sharding.device_set
        self._peeked = jax.tree.map(lambda leaf: bring_near(leaf, devices), self._peeked)

    def peek(self) -> tuple[PyTree, PyTree] | None:
        """The batch that `next` will return, or None at the end. The position does not change."""
        if self._peeked is None:
            self._before_peek = self.get_state()
            self._peeked = next(self, None)
        return self._peeked

    def skip(self, n: int) -> int:
        """Skips the next `n` batches; returns how many there were. They are read, but not copied."""
        peeked = int(n > 0 and self._peeked is not None)
        if peeked:
            self._peeked = None
        return peeked + sum(1 for _ in itertools.islice(self._elements, n - peeked))

    @property
    def is_in_memory(self) -> bool:
        """True if the user's iterator is of a list, a tuple, `itertools.repeat` or the arrays of `est.inputs`, so that
        the next batch never has to be waited for."""
        return type(self._elements) in _IN_MEMORY

    @property
    def has_position(self) -> bool:
        """True if the user's iterator has `get_state` and `set_state`, as grain's and the ones of `est.inputs` do."""
        return hasattr(self._elements, "get_state") and hasattr(self._elements, "set_state")

    def get_state(self) -> Any:
        """A copy of the position of the user's iterator; None if it has none."""
        if not self.has_position:
            return None
        if self._peeked is not None:
            # A peeked batch was not used yet: a run that resumes must get it.
            return self._before_peek
        # An iterator may return its own dict and change it later.
        return copy.deepcopy(self._elements.get_state())  # type: ignore[attr-defined]

    def set_state(self, state: Any) -> None:
        """Moves to a position of `get_state`, of this or another process."""
        if not self.has_position:
            raise ValueError(
                "`set_state` needs an iterator with `get_state` and `set_state`, as grain's loaders have; this "
                f"input_fn has a {type(self._elements).__name__}, which lacks them. Skip its batches by count instead."
            )
        self._peeked = None
        self._elements.set_state(state)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Drops the reference to the user's iterator. If it is the last one, a generator is closed: its `finally:`
        runs. A generator that the user keeps stays open."""
        self._elements, self._peeked = iter(()), None


def batches(result: Any) -> Batches:
    """Returns an iterator over `(features, labels)` for the `result` of an input_fn.

    As in TensorFlow, a tuple is `(features, labels)`, and features by themselves have the labels None.
    Unlike there, any Python iterable of batches is accepted, and arrays are one batch,
    not an endless repetition. Leaves that can become arrays (torch and TensorFlow tensors) become
    numpy arrays. Sparse arrays are padded to a power of two of entries, if the first batch has any.
    Nothing is read before the first batch is requested.

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
      TypeError: `result` is none of these.
    """
    if is_one_batch(result):
        return Batches(iter([result]), is_one_batch=True)
    elastic = getattr(sys.modules.get("grain.experimental"), "ElasticIterator", ())
    return Batches(iter(result), is_elastic=isinstance(result, elastic))


def is_one_batch(result: object) -> bool:
    """Returns whether the result of an input_fn is one batch; otherwise it is an iterable of batches."""
    if isinstance(result, (tuple, Mapping)) or hasattr(result, "shape"):
        return True
    if not isinstance(result, (str, bytes)):
        if hasattr(result, "__iter__") or hasattr(result, "__getitem__"):
            return False
        if result is not None and not jax.tree_util.all_leaves([result]):
            return True  # a pytree of the user's own class
    raise TypeError(f"input_fn should return {_ACCEPTED}; got {result!r}.")


def pair_of(element: Any) -> tuple[PyTree, PyTree]:
    """The features and labels of a batch; only a tuple or a list has labels."""
    if not isinstance(element, (tuple, list)):
        return element, None
    if len(element) != 2:
        raise ValueError(
            "input_fn should return (features, labels) as a len 2 tuple. "
            "Put several features into a dict, and several batches into a list; "
            f"got a {type(element).__name__} of len {len(element)}."
        )
    return element[0], element[1]
