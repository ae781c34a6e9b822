"""Notes about tables that a model_fn reads by rows, and about those that it reads whole."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass
class Lookups:
    """Reads of tables in one run, by full name (see `sparse/_embedding.py`).

    Attributes:
      taps: what `embedding_lookup` adds to the rows of each lookup.
      needs_taps: whether a lookup without a tap leaves the run.
      rows: the rows of each lookup, a flat array; an id outside of the table is negative or too large.
      read_whole: the variables that the model_fn has seen whole, not only by their rows.
      by_getter: tables as the `custom_getter` of a scope gives them.
    """

    taps: dict[str, list[jax.Array]] = dataclasses.field(default_factory=dict)
    needs_taps: bool = False
    rows: dict[str, list[jax.Array]] = dataclasses.field(default_factory=dict)
    read_whole: set[str] = dataclasses.field(default_factory=set)
    by_getter: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
