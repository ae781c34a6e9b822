"""The structure of a batch without its values, which processes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from estimator.core._batch import check_batch, named_leaves
from estimator.core._bcoo import has_sparse
from estimator.core._typing import PyTree

Pair = tuple[PyTree, PyTree]
Json: TypeAlias = "list[Json] | str | int | None"


class BatchShape(NamedTuple):
    """The arrays of a batch and their containers, as values that JSON knows.

    Attributes:
      rows: the number of examples.
      arrays: of each array its name, its dtype and its shape without the examples.
      containers: features and labels with the number of an array in its place, as `_encode` writes them.
    """

    rows: int
    arrays: Sequence[tuple[str, str, Sequence[int]]]
    containers: Json

    @classmethod
    def of(cls, pair: Pair) -> BatchShape:
        """
        Raises:
          TypeError, ValueError: it is sparse, or not a batch.
        """
        if has_sparse(pair):
            raise TypeError(
                "Sparse features and labels cannot be trained on by several processes. Give dense ones, or ids and "
                "weights in dense arrays for `est.embedding_lookup`."
            )
        arrays = [(name, str(x.dtype), x.shape[1:]) for name, x in named_leaves(*pair).items()]
        numbers = jax.tree.unflatten(jax.tree.structure(pair), range(len(arrays)))
        return cls(check_batch(*pair), arrays, _encode(numbers))

    def zeros(self, rows: int) -> Pair:
        """A batch like this one.

        Raises:
          TypeError: it is in containers of the user's own, which are not known here.
        """
        arrays = [np.broadcast_to(np.zeros((), dtype), (rows, *shape)) for _, dtype, shape in self.arrays]
        return jax.tree.map(lambda i: arrays[i], _decode(self.containers))


def check_alike(shapes: Sequence[BatchShape], with_rows: bool) -> None:
    """
    Raises:
      ValueError: the batches of the processes do not fit together.
    """
    described = [_describe(shape, with_rows) for shape in shapes]
    for i, other in enumerate(described):
        if other != described[0]:
            names = [name for name in {**described[0], **other} if described[0].get(name) != other.get(name)]
            raise ValueError(
                f"The processes gave batches that do not fit together: {names[0]} is "
                f"{described[0].get(names[0], 'missing')} in process 0, {other.get(names[0], 'missing')} in process "
                f"{i}. Each has to give arrays of the same names, dtypes and shapes"
                + (", and as many rows (`drop_remainder=True`)." if with_rows else ", but for the number of rows.")
            )


def _describe(shape: BatchShape, with_rows: bool) -> dict[str, str]:
    first = str(shape.rows) if with_rows else "rows"
    return {name: f"{dtype}[{','.join([first, *map(str, rest)])}]" for name, dtype, rest in shape.arrays}


def _encode(tree: PyTree) -> Json:
    """Dicts, lists and tuples as lists that begin with their kind: JSON has no tuples, nor numbers as keys."""
    # Exact types: a named tuple or an OrderedDict that came back as a plain one would be another structure for jax.
    if type(tree) is dict:
        return ["dict", [[key, _encode(value)] for key, value in tree.items()]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_encode(value) for value in tree]]
    return tree if tree is None or isinstance(tree, int) else [type(tree).__name__]


def _decode(code: Any) -> PyTree:
    match code:
        case ["dict", items]:
            return {key: _decode(value) for key, value in items}
        case ["list", values]:
            return [_decode(value) for value in values]
        case ["tuple", values]:
            return tuple(_decode(value) for value in values)
        case [kind]:
            raise TypeError(
                f"This process has no batch where others have some, and cannot make one of a {kind}. Give features and "
                "labels in dicts, lists and tuples, or a batch in every process."
            )
    return code
