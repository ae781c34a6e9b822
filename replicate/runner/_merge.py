"""The sums over towers that make one step of what the towers return."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from estimator import EstimatorSpec, TrainOp
from estimator.typing import Gradients, Tree
from replicate.cross_tower_ops import CrossTowerOps
from replicate.towers._collectives import cross_tower_concatenate
from replicate.towers._map import num_towers
from replicate.towers._slices import is_slices


def reduce_step(spec: EstimatorSpec, others: Tree, ops: CrossTowerOps) -> tuple[EstimatorSpec, Tree]:
    """The sums over towers of the spec of a training step, with its gradients, and of what else is summed."""
    train_op = spec.train_op or TrainOp()
    bare = spec.replace_unchecked(train_op=train_op.without_gradients())
    gradients, (bare, others) = all_reduce(train_op.gradients(), (bare, others), ops)
    return bare.replace_unchecked(train_op=(bare.train_op or TrainOp()).with_gradients(gradients)), others


def all_reduce(gradients: list[Gradients], others: Tree, ops: CrossTowerOps) -> tuple[list[Gradients], Tree]:
    """The sums over towers; of a sparse gradient, the slices of all towers, which stand for it.

    Args:
      gradients: of each update of a train_op.
      others: what else is summed, exactly.
      ops: takes the sums.
    """
    if num_towers() == 1:
        return gradients, others
    for name, gradient in (item for own in gradients for item in own.items()):
        if is_slices(gradient) and not ops.takes_slices:
            raise ValueError(
                f"`{type(ops).__name__}` cannot sum the gradient of the variable {name!r}, an `est.IndexedSlices` as "
                "`est.embedding_lookup` makes them. Use other `cross_tower_ops`, such as `AllReduce()`."
            )
    in_order = [list(own.values()) for own in gradients]  # which jax would sort by name
    leaves, structure = jax.tree.flatten((in_order, others), is_leaf=is_slices)
    count = 0 if ops.exact is ops else len(jax.tree.leaves(in_order, is_leaf=is_slices))
    # Gradients by the chosen algorithm, which may compress them; losses, metrics and marks always exactly.
    for some, positions in ((ops, range(count)), (ops.exact, range(count, len(leaves)))):
        dense = [i for i in positions if not is_slices(leaves[i])]
        sums = some.sum_in_towers([leaves[i] for i in dense]) if dense else []
        for i, total in zip(dense, sums, strict=True):
            is_bool = jnp.result_type(leaves[i]) == jnp.bool_  # the sum of which is an integer
            leaves[i] = total.astype(jnp.bool_) if is_bool else total
    leaves = [cross_tower_concatenate(leaf) if is_slices(leaf) else leaf for leaf in leaves]
    in_order, others = jax.tree.unflatten(structure, leaves)
    return [dict(zip(own, mine, strict=True)) for own, mine in zip(gradients, in_order, strict=True)], others
