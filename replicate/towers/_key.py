"""The random key of a tower."""

from __future__ import annotations

import jax

from replicate.towers._map import tower_index


def tower_key(key: jax.Array, first: int | jax.Array = 0, parts: int = 1) -> jax.Array:
    """The random key of part `first` of this tower, if each has `parts`; `est.make_rng` draws from it."""
    return jax.random.fold_in(key, tower_index() * parts + first)
