"""Says that batches come in many shapes, each of which has programs of its own."""

from __future__ import annotations

from typing import Any

import jax
from absl import logging

from estimator._batch import named_leaves
from estimator._frame import PyTree

_MANY = 10

Shape = tuple[int, ...]


class ShapeWatch:
    """The shapes of the batches so far; when they are many, a log line tells it, once, and what to do."""

    def __init__(self) -> None:
        self._seen: set[tuple[Shape, ...]] | None = set()

    def note(self, pair: tuple[PyTree, PyTree]) -> None:
        if self._seen is None:
            return
        shapes = tuple([getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(pair)])
        if shapes in self._seen:
            return
        self._seen.add(shapes)
        if len(self._seen) == _MANY:
            by_leaf = [sorted(set(of_leaf)) for of_leaf in zip(*self._seen, strict=False)]
            logging.warning("%s", _advice(dict(zip(named_leaves(*pair), by_leaf, strict=False))))
            self._seen = None


def _advice(shapes: dict[str, list[Any]]) -> str:
    several = {name: of_leaf for name, of_leaf in shapes.items() if len(of_leaf) > 1}
    if any(len({shape[1:] for shape in of_leaf}) > 1 for of_leaf in several.values()):
        fix = "Pad them to few lengths: `est.inputs.pad_batches(input_fn, multiple_of=32)`."
    else:
        fix = "Let input_fn give all of them as many rows, but the last."
    listed = ", ".join(f"{name}: {', '.join(map(str, of_leaf))}" for name, of_leaf in several.items())
    return f"The batches came in {_MANY} different shapes, each of which is compiled on its own. {fix} Got {listed}."
