"""Warns about batches of many shapes: the step is compiled for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from absl import logging

_MANY = 10

Shape = tuple[int, ...]


class ShapeWatch:
    """Collects the shapes of the batches, and logs advice once when there are many."""

    def __init__(self) -> None:
        self._seen: set[tuple[Shape, ...]] | None = set()

    def note(self, shapes: tuple[Shape, ...], names: Callable[[], Iterable[str]]) -> None:
        """Notes the shapes of the leaves of a batch, whose names are asked for where they are shown."""
        if self._seen is None or shapes in self._seen:
            return
        self._seen.add(shapes)
        # It warns once and collects no more shapes.
        if len(self._seen) == _MANY:
            by_leaf = [sorted(set(of_leaf)) for of_leaf in zip(*self._seen, strict=False)]
            logging.warning("%s", _advice(dict(zip(names(), by_leaf, strict=False))))
            self._seen = None


def _advice(shapes: dict[str, list[Shape]]) -> str:
    several = {name: of_leaf for name, of_leaf in shapes.items() if len(of_leaf) > 1}
    padding = _padding({name: _changing_axes(of_leaf) for name, of_leaf in several.items()})
    if padding:
        fix = f"Pad them to few lengths: `est.inputs.pad_batches(input_fn, multiple_of=32, {padding})`."
    else:
        fix = "Let input_fn give all of them as many rows, but the last."
    listed = ", ".join(f"{name}: {', '.join(map(str, of_leaf))}" for name, of_leaf in several.items())
    return f"The batches came in {_MANY} different shapes, each of which is compiled on its own. {fix} Got {listed}."


def _changing_axes(shapes: list[Shape]) -> list[int]:
    """Lists the dimensions that differ, other than the number of rows."""
    return [i for i, sizes in enumerate(zip(*shapes, strict=False)) if i and len(set(sizes)) > 1]


def _padding(axes: dict[str, list[int]]) -> str:
    """The arguments of `pad_batches` that pad these leaves."""
    shown = {
        name: str(of_leaf[0] if len(of_leaf) == 1 else tuple(of_leaf)) for name, of_leaf in axes.items() if of_leaf
    }
    arguments = []
    for tree, argument in (("features", "axes"), ("labels", "label_axes")):
        by_key = [f"{name[len(tree) + 1 : -1]}: {axis}" for name, axis in shown.items() if name.startswith(f"{tree}[")]
        if by_key:
            arguments.append(f"{argument}={{{', '.join(by_key)}}}")
        elif tree in shown:
            arguments.append(f"{argument}={shown[tree]}")
    return ", ".join(arguments)
