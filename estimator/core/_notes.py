"""Notes: objects in which the features of a step keep what they learn while a model_fn runs."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Notes:
    """One object of each class that is asked for, made at the first request.

    A feature has a class for what it notes, in its own file, so that the frame knows no feature by name:

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Frozen:
    ...     names: list[str] = dataclasses.field(default_factory=list)
    >>> notes = Notes()
    >>> notes.get(Frozen).names.append("embeddings")
    >>> notes.get(Frozen)
    Frozen(names=['embeddings'])

    A class for what is known of the model (`Frame.declared.notes`) is one with a method `update(other)`, as a dict has
    it: a run around this one adds what is noted here to its own.
    """

    def __init__(self) -> None:
        self._by_class: dict[type[Any], Any] = {}

    def get(self, kind: type[T]) -> T:
        """The object of this class; `kind()` at the first call."""
        if kind not in self._by_class:
            self._by_class[kind] = kind()
        return self._by_class[kind]

    def update(self, other: Notes) -> None:
        """Adds the notes of a run within this one."""
        for kind, note in other._by_class.items():
            self.get(kind).update(note)
