"""Variables without a gradient, which an optimizer is to leave as they are, with their slots.

It gets an `optax.MaskedNode` for such a variable, its gradient and its slots, as from `optax.masked`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import optax

from estimator.core._train_op import Update
from estimator.core._typing import PyTree, Variables


def names_in_slots(update: Update, slots: optax.OptState, gradients: Collection[str], variables: Variables) -> set[str]:
    """The names of the variables that the slots of an update are about, whether they have a gradient or not."""
    nodes = jax.tree.leaves(slots, is_leaf=lambda node: _is_by_variable(node, gradients, variables))
    found = {name for node in nodes if _is_by_variable(node, gradients, variables) for name in node}
    return found.union(update.var_list, gradients)


def hide(tree: PyTree, absent: Collection[str], names: Collection[str]) -> PyTree:
    """A tree with a `MaskedNode` for each absent variable, in each dict by the names of all variables."""

    def is_by_variable(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {*names}

    def hide_in(node: Any) -> Any:
        if not is_by_variable(node):
            return node
        return {name: optax.MaskedNode() if name in absent else value for name, value in node.items()}

    return jax.tree.map(hide_in, tree, is_leaf=is_by_variable) if absent else tree


def is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def put_back(tree: PyTree, before: PyTree) -> PyTree:
    """The tree with what is hidden in it as it was before."""
    return jax.tree.map(lambda new, old: old if is_masked(new) else new, tree, before, is_leaf=is_masked)


def _is_by_variable(node: Any, gradients: Collection[str], variables: Variables) -> bool:
    return isinstance(node, dict) and {*gradients} <= node.keys() <= variables.keys()
