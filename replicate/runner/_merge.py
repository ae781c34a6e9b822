"""The sums over towers that make one step of what the towers return."""

from __future__ import annotations

import dataclasses

import jax

from estimator import EstimatorSpec
from estimator.replication import RunResult, Writes, addend, is_slices, train_op_of
from estimator.typing import Gradients, Tree, Variables
from replicate.cross_tower_ops import CrossTowerOps
from replicate.towers._collectives import cross_tower_concatenate
from replicate.towers._map import num_towers, tower_index


def reduce_result(
    summed: EstimatorSpec, result: RunResult, variables: Variables, ops: CrossTowerOps
) -> tuple[EstimatorSpec, Variables]:
    """What all towers agree on after one sum: gradients and losses, and the new values of the variables written.

    Args:
      summed: the fields of this tower's spec that are merged by a sum.
      result: of the tower's run.
      variables: the values that the run started from.
    """
    aggregation = result.frame.declared.aggregation
    assigned = {
        name: addend(name, value, aggregation[name], tower_index(), num_towers())
        for name, value in result.writes.assigned.items()
    }
    train_op = train_op_of(summed)
    gradients, (bare, *sums) = all_reduce(
        train_op.gradients(),
        (dataclasses.replace(summed, train_op=train_op.without_gradients()), assigned, result.writes.added),
        ops,
    )
    # A sum of booleans is an integer.
    writes = jax.tree.map(lambda x, like: x.astype(like.dtype), Writes(*sums), result.writes)
    spec = dataclasses.replace(bare, train_op=train_op_of(bare).with_gradients(gradients))
    return spec, writes.applied_to(variables)


def all_reduce(gradients: list[Gradients], others: Tree, ops: CrossTowerOps) -> tuple[list[Gradients], Tree]:
    """The sums over towers; of a sparse gradient, the slices of all towers, which stand for it.

    Args:
      gradients: of each update of a train_op.
      others: what else is summed, exactly.
      ops: takes the sums.

    Raises:
      ValueError: a gradient is sparse, which `ops` does not take.
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
    for some, positions in ((ops, range(count)), (ops.exact, range(count, len(leaves)))):
        dense = [i for i in positions if not is_slices(leaves[i])]
        sums = some.sum_in_towers([leaves[i] for i in dense]) if dense else []
        for i, leaf in zip(dense, sums, strict=True):
            leaves[i] = leaf
    leaves = [cross_tower_concatenate(leaf) if is_slices(leaf) else leaf for leaf in leaves]
    in_order, others = jax.tree.unflatten(structure, leaves)
    return [dict(zip(own, mine, strict=True)) for own, mine in zip(gradients, in_order, strict=True)], others
