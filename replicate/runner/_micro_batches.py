"""Micro-batches: a tower's rows in several parts one after another, merged as if each part were a tower."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from estimator import EstimatorSpec, TrainOp, VariableAggregation
from estimator.core._batch import check_batch
from estimator.core._bcoo import is_sparse
from estimator.core._frame import Frame, lets_out
from estimator.sparse._indexed_slices import is_slices, joined
from estimator.steps._forward_transform import Forward
from estimator.steps._gradients import Outcome, run
from replicate.runner._merge import apart, check_rows, merged, share, together
from replicate.runner._tower_optimizer import TowerOptimizer
from replicate.towers._map import num_towers, tower_index
from replicate.towers._split_batch import split_rows

PyTree = Any


def accumulate_steps(train_op: TrainOp | None) -> int:
    """The number of micro-batches that the optimizers of a train_op ask for.

    Raises:
      ValueError: they do not agree.
    """
    asked = {
        update.slots: update.optimizer.accumulate_steps if isinstance(update.optimizer, TowerOptimizer) else 1
        for update in (train_op.updates if train_op else ())
    }
    if len(set(asked.values())) > 1:
        listed = " and ".join(f"{name!r} for {steps}" for name, steps in asked.items())
        raise ValueError(
            f"The optimizers of one training step ask for different `accumulate_steps`: {listed}. "
            "Give all of them the same `TowerOptimizer(..., accumulate_steps=...)`."
        )
    return max(asked.values(), default=1)


def accumulated(
    call: Callable[[PyTree], EstimatorSpec],
    batch: PyTree,
    frame: Frame,
    steps: int,
    *,
    like: Outcome,
    aggregation: dict[str, VariableAggregation],
    average: Callable[[PyTree], PyTree] | None,
    loss_scale: float,
    mean_loss: bool,
    transform: Callable[[Forward], Forward] | None,
) -> Outcome:
    """What one run over all rows of a tower would leave, from `steps` runs over an equal part of them each.

    Gradients and everything else that is merged by sum are added up within one `jax.lax.scan`, so that the memory for
    activations is that of one micro-batch.

    Args:
      call: runs the model_fn on a batch.
      batch: the rows of this tower.
      frame: where each micro-batch starts, with the key of the step.
      like: what a run over all rows leaves; only its structure, shapes and dtypes matter.
      aggregation: what becomes of the values assigned to a variable, by name.
      average: what becomes of the denominators that losses divide by, beyond this tower; None: there are none.
      loss_scale: factor on the loss of a tower.
      mean_loss: whether the tower's loss is the mean of those of the micro-batches, not their sum.
      transform: of the run of each micro-batch.

    Raises:
      ValueError: the rows do not divide by `steps`.
    """
    rows = check_batch(batch)
    if rows % steps:
        towers = num_towers()
        raise ValueError(
            f"Batch size {rows * towers} needs to be divisible by the number of towers, which is {towers}, times "
            f"`accumulate_steps`, which is {steps}. Choose a batch size that is a multiple of {towers * steps}, or "
            "another `accumulate_steps`."
        )
    part = 1 / steps if mean_loss else 1.0
    micro_batches = jax.tree.map(lambda x: split_rows(x, steps), batch, is_leaf=is_sparse)
    numbered = jnp.arange(steps, dtype=jnp.int32), micro_batches

    def one(index: jax.Array, batch: PyTree, denominators: list[jax.Array] | None) -> tuple[Outcome, list[jax.Array]]:
        seen: list[jax.Array] = []

        def average(denominator: jax.Array) -> jax.Array:
            if not lets_out():
                raise ValueError(
                    "A loss with weights for each example is computed within a function that jax traces apart "
                    "(`jax.lax.cond`, `jax.lax.scan`, `jax.checkpoint` ...). With `accumulate_steps` it divides by the "
                    "weights of all micro-batches, which are not known there. Return logits or losses from the "
                    "function and reduce them outside, use Reduction.SUM, or leave out `accumulate_steps`."
                )
            seen.append(jax.lax.stop_gradient(denominator))
            return denominator if denominators is None else _instead(denominator, denominators[len(seen) - 1])

        key = jax.random.fold_in(frame.key, tower_index() * steps + index)
        inside = frame.fresh(key=key, average_denominator=average)
        outcome, _ = run(
            call,
            inside,
            batch,
            take_gradients=denominators is not None,
            loss_scale=loss_scale * part,
            denominators=seen,
            transform=transform,
        )
        return outcome, seen

    def only_denominators(_: None, numbered: tuple[jax.Array, PyTree]) -> tuple[None, list[jax.Array]]:
        return None, one(*numbered, None)[1]

    denominators: list[jax.Array] = []
    if average is not None:
        _, stacked = jax.lax.scan(only_denominators, None, numbered)
        denominators = average([jnp.mean(each) for each in stacked])

    def add(totals: list[jax.Array], numbered: tuple[jax.Array, PyTree]) -> tuple[list[jax.Array], PyTree]:
        index, rows_of_it = numbered
        outcome, _ = one(index, rows_of_it, denominators)
        assigned = {
            name: share(name, value, aggregation[name], index, steps, "micro-batch")
            for name, value in outcome.assigned.items()
        }
        check_rows(outcome.spec, rows // steps, "micro-batch")
        same, own = apart(outcome.spec, part)
        leaves = jax.tree.leaves((same, assigned, outcome.added), is_leaf=is_slices)
        addends = [leaf for leaf in leaves if not is_slices(leaf)]
        slices = [leaf for leaf in leaves if is_slices(leaf)]
        return [total + leaf for total, leaf in zip(totals, addends, strict=True)], (own, slices)

    # The leaves alone, since each run of the model_fn has optimizers, which are part of the structure, of its own.
    leaves, structure = jax.tree.flatten((apart(like.spec, part)[0], like.assigned, like.added), is_leaf=is_slices)
    zeros = [jnp.zeros_like(leaf) for leaf in leaves if not is_slices(leaf)]
    totals, (own, slices) = jax.lax.scan(add, zeros, numbered)
    sums, joins = iter(totals), map(joined, slices)
    merged_leaves = [next(joins) if is_slices(leaf) else next(sums) for leaf in leaves]
    same, assigned, added = jax.tree.unflatten(structure, merged_leaves)
    return Outcome(together(same, merged(own, steps)), assigned, added)


@jax.custom_jvp
def _instead(own: jax.Array, averaged: jax.Array) -> jax.Array:
    """The average in place of the micro-batch's own denominator, where no gradient is lost by it."""
    del own
    return averaged


@functools.partial(_instead.defjvp, symbolic_zeros=True)
def _instead_jvp(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        raise ValueError(
            "A loss divides by the sum of weights that depend on trainable variables. With `accumulate_steps` no "
            "gradient can flow through that sum, as it goes over all micro-batches. Wrap the weights in "
            "`jax.lax.stop_gradient`, use another reduction than MEAN, or leave out `accumulate_steps`."
        )
    return primals[1], tangents[1]
