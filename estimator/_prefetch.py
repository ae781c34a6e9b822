"""Batches made ready for the loops."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """Batches that were asked for together."""

    batches: Any
    size: int
    position: Any


class Prefetcher:
    """Gives pieces of an input, in the sizes asked for."""

    def __init__(self, pairs: Iterable[Any], make: Callable[[list[Any]], Any], ahead: int = 2) -> None:
        self._pairs, self._make = iter(pairs), make
        self._sizes: collections.deque[int] = collections.deque()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def request(self, size: int) -> None:
        self._sizes.append(size)

    def get(self) -> Piece:
        got = list(itertools.islice(self._pairs, self._sizes.popleft()))
        return Piece(self._make(got) if got else [], len(got), None)
