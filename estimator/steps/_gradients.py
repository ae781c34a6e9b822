"""Runs a model_fn and takes the gradients that it asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import Frame, open_frame
from estimator.core._train_op import GradientsNeeded, TrainOp, Update
from estimator.core._typing import PyTree
from estimator.optim import _loss_scale
from estimator.sparse._embedding import slices, taps_for
from estimator.steps._forward_transform import Forward, transformed


class Outcome(NamedTuple):
    """What is left of a run.

    Attributes:
      spec: what the model_fn returned, with gradients in place of pending losses.
      assigned: by name, the value the run assigned last.
      added: by name, the sum of the deltas it added since.
    """

    spec: EstimatorSpec
    assigned: dict[str, PyTree]
    added: dict[str, PyTree]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Request:
    """A run that stopped at `compute_gradients`."""

    var_list: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    slots: str | None = dataclasses.field(metadata={"static": True})


def written(outcome: Outcome, variables: dict[str, PyTree]) -> dict[str, PyTree]:
    """The new values of the variables that a run wrote: what it assigned last, and what it added since."""
    values = dict(outcome.assigned)
    for name, delta in outcome.added.items():
        values[name] = jax.tree.map(jnp.add, values.get(name, variables[name]), delta)
    return values


def run(
    call: Callable[..., EstimatorSpec],
    frame: Frame,
    *batch: PyTree,
    take_gradients: bool,
    loss_scale: float = 1.0,
    denominators: list[jax.Array] | None = None,
    transform: Callable[[Forward], Forward] | None = None,
) -> tuple[Outcome, Frame]:
    """Runs `call` in a frame like `frame`, with the gradients it asks for.

    One `jax.vjp` of the whole run serves every loss that `minimize` noted. `compute_gradients` must return values in
    the middle of the run: there the run is left by an exception that carries the loss out, and is done again with
    the gradients in hand. XLA removes the repeated part.

    Lookups in tables are differentiated with respect to zeros added to the rows found, the taps, not to the table,
    so that no gradient of the table's size exists. A first run tells their shapes.

    Args:
      call: runs the model_fn on the batch.
      frame: where the run starts; it is not changed.
      *batch: what `call` gets.
      take_gradients: whether losses are pending. Where a replicated model_fn has taken the gradients in its towers
        there are none, and the towers must not be differentiated once more.
      loss_scale: factor on every loss that is differentiated.
      denominators: a list to which `frame.average_denominator` adds those that it sees in one run.
      transform: makes of the run, a pure function, another one, of which the gradients are taken.

    Returns:
      The outcome, and the frame as the run left it, good for its Python values only.
    """
    floating = {name: value for name, value in frame.variables.items() if _is_floating(value)}
    seen = [] if denominators is None else denominators
    known: tuple[dict[str, PyTree], ...] = ()
    taps: dict[str, list[jax.Array]] = {}
    ran: list[Frame] = []

    def attempt(trained: Any, rest: Any, batch: PyTree) -> tuple[list[Any], tuple[Any, Any, Any]]:
        floating, taps = trained
        variables, slots, key, step, known = rest
        started = frame.fresh(
            variables={name: (variables | floating)[name] for name in frame.variables},
            slots=slots,
            key=key,
            global_step=step,
            known_gradients=known,
            taps=taps,
            loss_scale=loss_scale,
        )
        ran.append(started)
        seen.clear()  # of an attempt that stopped at `compute_gradients`
        with open_frame(started):
            try:
                spec = call(*batch)
            except GradientsNeeded as needed:
                return [needed.loss], (_Request(needed.var_list, needed.slots), started.lookups, list(seen))
        if started.reported:  # beside what towers within this run have reported
            spec = dataclasses.replace(spec, reported={**spec.reported, **started.reported})
        pending = [update.loss for update in _pending(spec.train_op)] if take_gradients else []
        return pending, (Outcome(spec, started.assigned, started.added), started.lookups, list(seen))

    def forward(*trained: PyTree) -> tuple[list[Any], tuple[Any, Any, Any]]:
        fixed = {name: value for name, value in frame.variables.items() if name not in trained[0]}
        rest = (fixed, frame.slots, frame.key, frame.global_step, known)
        return (transformed(transform, attempt) if transform else attempt)(trained, rest, batch)

    def gradients(i: int, names: tuple[str, ...], slots: str | None) -> dict[str, PyTree]:
        """Of one loss, times `loss_scale`; the backward pass runs with the scale in the optimizer's slots besides."""
        dynamic = _loss_scale.current(frame.slots, slots)
        cotangents = [jnp.full((), loss_scale if j == i else 0.0, loss.dtype) for j, loss in enumerate(losses)]
        if dynamic is not None:
            cotangents[i] = _loss_scale.scaled(cotangents[i], dynamic)
        dense, of_taps = pull(cotangents)
        if dynamic is not None:
            dense, of_taps = _loss_scale.unscaled((dense, of_taps), dynamic)
        taken = dense | slices(of_taps, lookups, frame.variables)
        return {name: taken[name] for name in names}

    while True:
        differentiate = take_gradients
        if not differentiate:
            _, (outcome, _, averaged) = forward(floating, {})
            differentiate = isinstance(outcome, _Request)
        if differentiate:
            others = {name: value for name, value in floating.items() if name not in taps}
            losses, pull, (outcome, lookups, averaged) = jax.vjp(forward, others, taps, has_aux=True)
            needed = taps_for(ran[-1])
            if losses and jax.tree.map(jnp.shape, needed) != jax.tree.map(jnp.shape, taps):
                taps = needed
                continue
        if isinstance(outcome, Outcome):
            break
        known += (gradients(0, outcome.var_list, outcome.slots),)

    seen[:] = averaged
    spec = outcome.spec
    if take_gradients and spec.train_op is not None:
        pending = _pending(spec.train_op)
        taken = {update.slots: gradients(i, update.var_list, update.slots) for i, update in enumerate(pending)}
        spec = dataclasses.replace(spec, train_op=_with_gradients(spec.train_op, taken))
    return outcome._replace(spec=spec), ran[-1]


def _pending(train_op: TrainOp | None) -> list[Update]:
    return [update for update in train_op.updates if update.gradients is None] if train_op else []


def has_pending(train_op: TrainOp | None) -> bool:
    """Whether gradients are still to be taken from a loss."""
    return bool(_pending(train_op))


def _with_gradients(train_op: TrainOp, taken: dict[str, dict[str, PyTree]]) -> TrainOp:
    return TrainOp(
        tuple(
            dataclasses.replace(update, gradients=taken.get(update.slots, update.gradients))
            for update in train_op.updates
        )
    )


def _is_floating(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
