"""Micro-batches: a tower's rows in several parts one after another, merged as if each part were a tower."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from estimator import TrainOp
from estimator.replication import Frame, ModelRun, RunResult
from estimator.typing import PyTree
from replicate.runner._base import Runner
from replicate.runner._tower_optimizer import TowerOptimizer
from replicate.towers._collectives import is_slices, join_slices
from replicate.towers._key import tower_key
from replicate.towers._map import num_towers
from replicate.towers._split_batch import rows_of_tower, split_rows


def accumulate_steps(train_op: TrainOp | None) -> int:
    """The number of micro-batches that the optimizers of a train_op ask for."""
    steps_by_slots = {
        update.slots: update.optimizer.accumulate_steps if isinstance(update.optimizer, TowerOptimizer) else 1
        for update in (train_op.updates if train_op else ())
    }
    if len(set(steps_by_slots.values())) > 1:
        listed = " and ".join(f"{name!r} for {steps}" for name, steps in steps_by_slots.items())
        raise ValueError(
            f"The optimizers of one training step ask for different `accumulate_steps`: {listed}. "
            "Give all of them the same `TowerOptimizer(..., accumulate_steps=...)`."
        )
    return max(steps_by_slots.values(), default=1)


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Runs a model_fn on a tower's rows in equal parts, one after another, with the result of one run over all rows.

    Gradients and everything else that is merged by sum are added up within one `jax.lax.scan`, so that
    activations need the memory of one micro-batch.

    Attributes:
      runner: has the towers.
      run: of the model_fn, on the rows of all towers.
      frame: where each micro-batch starts, with the key of the step.
      steps: the number of micro-batches.
      loss_scale: factor on the loss of a tower.
    """

    runner: Runner
    run: ModelRun
    frame: Frame
    steps: int
    loss_scale: float

    def run_all(self, batch: PyTree, like: RunResult, average: Callable[[PyTree], PyTree]) -> RunResult:
        """The result of all micro-batches.

        Args:
          batch: the rows of this tower.
          like: of a run over all rows; only its structure, shapes, dtypes and Python values matter.
          average: takes the average over towers of the denominators that losses divide by.

        Raises:
          ValueError: the rows do not divide by `steps`.
        """
        rows = rows_of_tower(self.run.rows, num_towers(), self.steps)
        numbered = jnp.arange(self.steps, dtype=jnp.int32), split_rows(batch, self.steps)
        denominators: list[jax.Array] = []
        # Losses are divided by the weights of all micro-batches, which a forward pass sums before the gradients.
        if like.denominators:
            _, stacked = jax.lax.scan(lambda _, part: (None, self._run_one(*part, None).denominators), None, numbered)
            denominators = average([jnp.mean(each) for each in stacked])

        def add(totals: list[jax.Array], part: tuple[jax.Array, PyTree]) -> tuple[list[jax.Array], PyTree]:
            result = self._run_one(*part, denominators)
            writes = result.addends(part[0], self.steps, "micro-batch")
            result.check_rows(rows // self.steps, "micro-batch")
            summed, per_part = result.scale(self._share).split()
            leaves = jax.tree.leaves((summed, result.gradients, writes), is_leaf=is_slices)
            addends = [leaf for leaf in leaves if not is_slices(leaf)]
            slices = [leaf for leaf in leaves if is_slices(leaf)]
            return [total + leaf for total, leaf in zip(totals, addends, strict=True)], (per_part, slices)

        # Only the leaves are carried, since the structure holds the optimizers, of which each run makes its own.
        summed = like.scale(self._share).split()[0]
        leaves, structure = jax.tree.flatten((summed, like.gradients, like.writes), is_leaf=is_slices)
        zeros = [jnp.zeros_like(leaf) for leaf in leaves if not is_slices(leaf)]
        totals, (per_part, slices) = jax.lax.scan(add, zeros, numbered)
        sums, joins = iter(totals), map(join_slices, slices)
        whole = [next(joins if is_slices(leaf) else sums) for leaf in leaves]
        summed, gradients, writes = jax.tree.unflatten(structure, whole)
        return RunResult(
            per_part.merge(self.steps, are_towers=False).join(summed), gradients, writes, denominators, like.frame
        )

    @property
    def _share(self) -> float:
        """The share of a micro-batch's loss in the tower's."""
        return 1 / self.steps if self.runner.mean_loss else 1.0

    def _run_one(self, index: jax.Array, batch: PyTree, denominators: list[jax.Array] | None) -> RunResult:
        """The run of a micro-batch, differentiated if the denominators that its losses divide by are known."""

        def average(own: jax.Array, number: int | None) -> jax.Array:
            if number is None:
                raise ValueError(
                    "A loss with weights for each example is computed within a function that jax traces apart "
                    "(`jax.lax.cond`, `jax.lax.scan`, `jax.checkpoint` ...). With `accumulate_steps` it divides by the "
                    "weights of all micro-batches, which are not known there. Return logits or losses from the "
                    "function and reduce them outside, use Reduction.SUM, or leave out `accumulate_steps`."
                )
            return own if denominators is None else _replace_denominator(own, denominators[number])

        # Numbered over all towers, so that each micro-batch draws other random numbers.
        key = tower_key(self.frame.key, index, self.steps)
        replica = self.frame.replica
        share = replica.share if self.runner.mean_loss else replica.share / self.steps
        return self.run.on(
            batch,
            self.frame.fresh(key=key, replica=dataclasses.replace(replica, average_denominator=average, share=share)),
            differentiate=denominators is not None,
            loss_scale=self.loss_scale * self._share,
            transform=self.runner.transform,
        )


@jax.custom_jvp
def _replace_denominator(own: jax.Array, averaged: jax.Array) -> jax.Array:
    """The average instead of the micro-batch's own denominator, where no gradient is lost by it."""
    return averaged


@functools.partial(_replace_denominator.defjvp, symbolic_zeros=True)
def _replace_denominator_jvp(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        raise ValueError(
            "A loss divides by the sum of weights that depend on trainable variables. With `accumulate_steps` no "
            "gradient can flow through that sum, as it goes over all micro-batches. Wrap the weights in "
            "`jax.lax.stop_gradient`, use another reduction than MEAN, or leave out `accumulate_steps`."
        )
    return primals[1], tangents[1]
