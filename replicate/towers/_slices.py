"""Sparse gradients, `est.IndexedSlices`: a sum of them is the slices of all, one after the other."""

from __future__ import annotations

from typing import TypeGuard

import jax

from estimator import IndexedSlices


def is_slices(x: object) -> TypeGuard[IndexedSlices]:
    """Says whether a node of a pytree is a sparse gradient."""
    return isinstance(x, IndexedSlices)


def join_slices(stacked: IndexedSlices) -> IndexedSlices:
    """Joins the slices of several parts of a batch, arrays of shape `[parts, n, ...]`: that is their sum."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)
