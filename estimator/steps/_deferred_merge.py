"""Values that a step leaves in parts, to be merged once after a program's last step instead of in each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deferred:
    """Stands for `merge(parts)`.

    Attributes:
      parts: pytree of arrays.
      merge: the same object (or an equal one) in every run of a model_fn, since it is part of the tree's structure.
    """

    parts: PyTree
    merge: Callable[[PyTree], PyTree] = dataclasses.field(metadata={"static": True})


def merge_deferred(tree: PyTree, stacked: bool = False) -> PyTree:
    """Merges every `Deferred` in a pytree; `stacked`: they are of several steps, which are their first dimension."""

    def merge(node: Any) -> Any:
        if not isinstance(node, Deferred):
            return node
        # `jax.vmap` needs an array to go over; without any, nothing differs from step to step.
        has_steps = stacked and jax.tree.leaves(node.parts)
        return (jax.vmap(node.merge) if has_steps else node.merge)(node.parts)

    return jax.tree.map(merge, tree, is_leaf=lambda node: isinstance(node, Deferred))


def _is_same(one: PyTree, other: PyTree) -> bool:
    """Says whether two pytrees hold the very same arrays."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    same = structure == other_structure  # type: ignore[operator]
    return same and all(x is y for x, y in zip(leaves, others, strict=True))


def defer_fields(spec: EstimatorSpec, fields: dict[str, tuple[PyTree, Deferred]]) -> EstimatorSpec:
    """Puts the parts into a spec instead of merged fields; a field that was changed since stays as it is.

    Args:
      fields: by name, what a replicated model_fn returned in it, and what that was merged from.
    """
    changes = {name: parts for name, (whole, parts) in fields.items() if _is_same(getattr(spec, name), whole)}
    return spec.replace_unchecked(**changes)
