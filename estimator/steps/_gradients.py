"""Runs a model_fn once and takes the gradients that it asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import Frame, Writes, open_frame
from estimator.core._notes import Notes
from estimator.core._train_op import GradientsNeeded, Update
from estimator.core._typing import Forward, PyTree
from estimator.optim import _loss_scale
from estimator.optim._apply_updates import StepGradients
from estimator.optim._arguments import WHY_NO_GRADIENTS
from estimator.optim._gradient_calls import GradientCalls, Reached
from estimator.sparse._embedding import TapsNeeded, join_gradients, make_taps, put_taps, rows_by_table
from estimator.steps._derivative import Derivative
from estimator.steps._run_result import RunResult
from estimator.variables._lookups import Lookups


def run_model_fn(
    call: Callable[..., EstimatorSpec],
    frame: Frame,
    *batch: PyTree,
    differentiate: bool,
    loss_scale: float = 1.0,
    transform: Callable[[Forward], Forward] | None = None,
) -> RunResult:
    """Runs `call` in a frame like `frame`, with the gradients it asks for.

    Args:
      call: runs the model_fn on the batch.
      frame: where the run starts; it is not changed.
      *batch: the arguments of `call`.
      differentiate: whether the losses of `minimize` are differentiated. Where a replicated model_fn has taken the
        gradients in its towers, nothing is left to differentiate.
      loss_scale: factor on every loss that is differentiated.
      transform: turns the forward pass, a pure function, into another one that is differentiated instead.
    """
    return _Run(call, frame, batch, loss_scale, transform).result(differentiate)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Request:
    """A pass that stopped at `compute_gradients`."""

    var_list: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    slots: str | None = dataclasses.field(metadata={"static": True})


class _Pass(NamedTuple):
    """Results of a forward pass other than its losses; a pytree.

    Attributes:
      request: what stopped it; None if it came to its end, and has a spec.
      spec, writes, denominators: as in `RunResult`.
      gradients: of the updates whose gradients the model_fn has given.
      rows: by table, the rows that were looked up.
    """

    request: _Request | None
    spec: EstimatorSpec | None
    gradients: StepGradients
    writes: Writes
    denominators: list[jax.Array]
    rows: dict[str, list[jax.Array]]


@dataclasses.dataclass(eq=False, repr=False)
class _Run:
    """Repeats forward passes until one has all it needs; XLA removes what two passes have in common.

    A pass may lack two things that only an earlier pass can tell:

    - `compute_gradients` returns values in the middle of the model_fn. A pass that has no values for it yet is left by
      an exception which carries the loss out; the gradients of that loss go into the next pass.
    - A table is not differentiated itself, or its gradient would be as large as the table. Instead, zeros are added to
      the rows of each lookup, the taps, and differentiated. Their shapes are known after a pass: a first one is left at
      its first lookup, and made without a derivative, which takes a third of the time to trace.

    One `jax.vjp` of the last pass serves all losses of `minimize`.
    """

    _call: Callable[..., EstimatorSpec]
    _frame: Frame
    _batch: tuple[PyTree, ...]
    _loss_scale: float
    _transform: Callable[[Forward], Forward] | None

    def __post_init__(self) -> None:
        # Integers are left out: jax would make gradients of dtype float0 for them.
        self._floating = {name: value for name, value in self._frame.variables.items() if _is_floating(value)}
        self._known_gradients: tuple[dict[str, PyTree], ...] = ()
        self._taps: dict[str, list[jax.Array]] = {}
        self._needs_taps = False
        self._last_frame = self._frame
        self._differentiates = False
        self._reached: set[str] = set()

    def result(self, differentiate: bool) -> RunResult:
        self._differentiates = self._needs_taps = differentiate
        # Each pass that stops at `compute_gradients` gives its gradients to the next pass: one more pass for each call,
        # of which XLA merges the common parts.
        while True:
            if differentiate:
                derivative = self._differentiate()
                done = derivative.other
            else:
                # Without a derivative; only a pass that stops at `compute_gradients` is repeated with one.
                _, done = self._forward(self._floating, {})
                if done.request is not None:
                    derivative = self._differentiate()
            if done.request is None:
                break
            self._known_gradients += (self._gradients(derivative, 0, done.request.var_list, done.request.slots),)
        spec = done.spec
        assert spec is not None  # a pass without a request has one
        if differentiate:
            for i, update in enumerate(done.gradients.select(spec.train_op)[1]):
                gradients = self._gradients(derivative, i, update.var_list, update.slots)
                if not gradients:
                    raise _no_gradients(update)
                done.gradients.by_slots[update.slots] = gradients
        self._last_frame.declared.notes.get(Reached).names.update(self._reached)
        return RunResult(spec, done.gradients, done.writes, done.denominators, self._last_frame)

    def _differentiate(self) -> Derivative[_Pass]:
        while True:
            others = {name: value for name, value in self._floating.items() if name not in self._taps}
            try:
                derivative = Derivative(self._forward, (others, self._taps))
            except TapsNeeded:
                self._needs_taps = False
                self._taps = jax.tree.map(lambda tap: jnp.zeros(tap.shape, tap.dtype), jax.eval_shape(self._find_taps))
                continue
            taps = make_taps(self._last_frame)
            # The taps fit the lookups, except those after a `compute_gradients`.
            if not derivative.losses or jax.tree.map(jnp.shape, taps) == jax.tree.map(jnp.shape, self._taps):
                return derivative
            self._taps = taps

    def _find_taps(self) -> dict[str, list[jax.Array]]:
        self._forward(self._floating, {})
        found, self._last_frame = make_taps(self._last_frame), self._frame
        return found

    def _gradients(
        self, derivative: Derivative[_Pass], i: int, names: tuple[str, ...], slots: str | None
    ) -> dict[str, PyTree]:
        """Of loss `i`, times `loss_scale`, by the names that it depends on.

        With a `DynamicLossScale` in the optimizer's slots the backward pass runs with that factor too, which is divided
        out again here.
        """
        dynamic = _loss_scale.current(self._frame.slots, slots)
        loss = derivative.losses[i]
        fits = float(np.asarray(self._loss_scale).astype(loss.dtype)) == self._loss_scale
        scale = self._loss_scale if fits or loss.dtype.itemsize >= 4 else 1.0
        cotangent = jnp.full((), scale, loss.dtype)
        if dynamic is not None:
            cotangent = _loss_scale.scale_by(cotangent, dynamic)
        (dense, of_taps), (is_dense, is_tapped) = derivative.pull(i, cotangent)
        if dynamic is not None:
            dense, of_taps = _loss_scale.unscale_by((dense, of_taps), dynamic)
        if scale != self._loss_scale:  # a third, say, would be rounded to the bfloat16 of the loss
            dense, of_taps = jax.tree.map(lambda x: x * jnp.asarray(self._loss_scale, x.dtype), (dense, of_taps))
        gradients = {name: gradient for name, gradient in dense.items() if any(jax.tree.leaves(is_dense[name]))}
        gradients |= join_gradients(of_taps, derivative.other.rows, self._frame.variables, is_tapped)
        self._reached.update(gradients)
        return jax.tree.map(_ascending, {name: gradients[name] for name in names if name in gradients})

    def _forward(self, *trained: PyTree) -> tuple[list[jax.Array], _Pass]:
        """The forward pass as a pure function of what is differentiated: variables, and taps."""
        frame = self._frame
        fixed = {name: value for name, value in frame.variables.items() if name not in trained[0]}
        rest = (fixed, frame.slots, frame.key, frame.global_step, self._known_gradients)
        forward = self._transform(self._run_once) if self._transform else self._run_once
        return forward(trained, rest, self._batch)

    def _run_once(self, trained: PyTree, rest: PyTree, batch: tuple[PyTree, ...]) -> tuple[list[jax.Array], _Pass]:
        floating, taps = trained
        fixed, slots, key, step, known_gradients = rest
        # The frame is kept for its Python values; its arrays are tracers, which are valid in this pass only.
        frame = self._last_frame = self._frame.fresh(
            variables={name: (fixed | floating)[name] for name in self._frame.variables},
            slots=slots,
            key=key,
            global_step=step,
            replica=dataclasses.replace(self._frame.replica, loss_scale=self._loss_scale),
        )
        frame.notes.get(GradientCalls).known = known_gradients
        put_taps(frame, taps, self._needs_taps)
        with open_frame(frame):
            try:
                spec = self._call(*batch)
            # The pass returns the request that stopped it instead of the spec.
            except GradientsNeeded as needed:
                request = _Request(needed.var_list, needed.slots)
                nothing = StepGradients(), Writes({}, {})
                self._last_frame = self._without_values(frame)
                return [needed.loss], _Pass(request, None, *nothing, frame.denominators, rows_by_table(frame))
        if frame.reported:  # beside what towers within this run have reported
            spec = dataclasses.replace(spec, reported={**spec.reported, **frame.reported})
        gradients, pending = frame.notes.get(StepGradients).select(spec.train_op)
        losses = [update.loss for update in pending if update.loss is not None and self._differentiates]
        if self._differentiates:
            self._last_frame = self._without_values(frame)
        return losses, _Pass(None, spec, gradients, frame.writes, frame.denominators, rows_by_table(frame))

    def _without_values(self, frame: Frame) -> Frame:
        """The frame of a pass that is differentiated, without what is known in this pass only."""
        kept = dataclasses.replace(
            frame, variables=self._frame.variables, notes=Notes(), writes=Writes({}, {}), denominators=[], reported={}
        )
        reads = frame.notes.get(Lookups)
        kept.notes.get(Lookups).rows, kept.notes.get(Lookups).read_whole = reads.rows, reads.read_whole
        return kept


def _no_gradients(update: Update) -> ValueError:
    call = f"`{type(update.optimizer).__name__}.minimize`"
    return ValueError(
        f"No gradients provided for any variable: the loss that {call} got (optimizer {update.optimizer.get_name()!r}) "
        f"depends on none of {list(update.var_list)}. {WHY_NO_GRADIENTS}"
    )


def _ascending(gradient: jax.Array) -> jax.Array:
    """The direction in which a real loss grows, as in TensorFlow: of a complex variable, jax's gradient conjugated."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


def _is_floating(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
