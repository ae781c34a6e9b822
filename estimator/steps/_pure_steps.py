"""The pure functions of a model_fn: each runs it in a fresh frame, and collects what it leaves there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from estimator.core._batch import check_batch
from estimator.core._bcoo import constrain, has_sparse, per_step
from estimator.core._estimator_spec import EstimatorSpec, loss_of, train_op_of
from estimator.core._frame import Frame, open_frame
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn
from estimator.core._placement import Halves, Placement
from estimator.core._replica import Replica
from estimator.core._state import State
from estimator.core._train_op import StepReport, TrainOp
from estimator.core._typing import Features, Labels, PyTree, Slots, Variables
from estimator.optim._apply_updates import At, StepGradients, apply_step
from estimator.optim._clip import read_norms
from estimator.optim._finite import update_if
from estimator.optim._gradient_calls import Reached
from estimator.optim._learning_rate import read_rates
from estimator.optim._moving_average import (
    Averages,
    begin_averages,
    check_averages_move,
    check_averages_read,
    variables_to_read,
)
from estimator.optim._non_finite import SLOTS as SKIPPED_STEPS
from estimator.optim._non_finite import NonFinite, count_skipped
from estimator.runtime._linen_weights import watch_linen
from estimator.steps._gradients import run_model_fn
from estimator.steps._model_info import ModelInfo
from estimator.steps._step_loops import Carry, carry_of, loop_over_all

_ALONE = Replica()

OPTIONAL_SLOTS = {SKIPPED_STEPS: NonFinite}
"""The entries of `State.slots` that belong to a feature, not to an optimizer, and that a checkpoint may lack."""


class PureSteps:
    """A model_fn as pure functions of explicit arguments. A training step is `compute`, `apply` and `finish_spec`.

    Args:
      call: the model_fn, `(features, labels, mode) -> EstimatorSpec`.

    Attributes:
      saw_sparse: whether a batch had a sparse leaf: looking into each would cost dense ones time.
    """

    def __init__(self, call: ModelFn) -> None:
        self._call = call
        self._has_named_unreached = False
        self._has_named_untrained = False
        self.saw_sparse = False

    def init(
        self, key: jax.Array, features: Features, labels: Labels, initial_values: Variables, mode: ModeKeys
    ) -> tuple[State, ModelInfo]:
        """The first State, and the `ModelInfo`."""
        self.saw_sparse |= has_sparse((features, labels))
        step = jnp.zeros((), jnp.int32)
        frame = Frame(mode, {}, {}, key=key, global_step=step, initializing=True, initial_values=initial_values)
        with open_frame(frame):
            spec = self._call(features, labels, mode)
        if mode == ModeKeys.TRAIN:
            check_averages_move(train_op_of(spec), frame)
            _warn_of_lost_updates(train_op_of(spec), frame)
            _warn_of_half_precision(loss_of(spec))
        state = State(frame.variables, frame.slots, step, key)
        like = jax.tree.map(_struct, state)
        like = like._replace(variables={name: like.variables[name] for name in frame.declared.trainable})  # jax sorts
        placement = frame.placement or Placement()
        info = ModelInfo(
            like=like,
            placement=placement,
            pending=bool(frame.notes.get(StepGradients).select(spec.train_op)[1]),
            shardings=placement.state(like) if mode == ModeKeys.TRAIN else placement.state_to_read(like),
            guard=frame.guard,
            compared_on=frame.compared_on,
            hooks=_hooks(spec),
            trainable=frame.declared.trainable_names,
            trained=tuple({name: None for update in (spec.train_op or TrainOp()).updates for name in update.var_list}),
            # Only the kinds of what is reported: its values would be computed, and compiled, for nothing.
            reported=jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {**spec.reported, **frame.reported}
            ),
            notes=frame.declared.notes,
        )
        return state, info

    def compute(
        self,
        info: ModelInfo,
        state: State,
        features: Features,
        labels: Labels,
        mode: ModeKeys,
        replica: Replica = _ALONE,
    ) -> tuple[EstimatorSpec, StepGradients, Variables]:
        """The spec, the gradients that it asks for, and the variables that the model_fn wrote itself."""
        # Each program has its own kind of batch, which is checked here, where it is traced.
        rows = check_batch(features, labels)
        self.saw_sparse |= has_sparse((features, labels))
        # This gives XLA the sharding of the rows, so that it does not gather a batch that the caller has not placed.
        sharding = info.placement.batch(rows)
        if sharding is not None and not replica.one_tower:
            features, labels = constrain((features, labels), sharding)
        frame = Frame(
            mode,
            variables_in(mode, info, state.variables),
            state.slots,
            # The key depends on the step only: a run that resumes draws the same numbers as one without a stop.
            key=jax.random.fold_in(state.key, state.global_step),
            global_step=state.global_step,
            replica=replica,
        )
        differentiate = info.pending and not replica.forward_only
        with watch_linen() as untrained:
            result = run_model_fn(lambda: self._call(features, labels, mode), frame, differentiate=differentiate)
        if mode == ModeKeys.TRAIN:
            self._name_untrained(untrained)
        if not replica.forward_only:
            self._name_unreached(info, result.frame.declared.notes.get(Reached))
        return result.spec, result.gradients, result.writes.applied_to(state.variables)

    def _name_untrained(self, modules: set[str]) -> None:
        if modules and not self._has_named_untrained:
            self._has_named_untrained = True
            logging.warning(
                "The model_fn calls `init` of the Flax modules %s and computes with its weights: they are not "
                "variables, no optimizer trains them, and no checkpoint has them. Write "
                "`net = est.flax_module(net, 'net')`, and `net(x)` instead of `init` and `apply`.",
                sorted(modules),
            )

    def _name_unreached(self, info: ModelInfo, reached: Reached) -> None:
        unreached = [name for name in info.trainable if name not in reached.names]
        if reached.names and unreached and not self._has_named_unreached:
            self._has_named_unreached = True
            logging.warning(
                "No loss depends on the trainable variables %s: they have no gradient, and stay as they are.", unreached
            )

    def apply(
        self, state: State, train_op: TrainOp, gradients: StepGradients, written: Variables, at: At | None = None
    ) -> State:
        """The state after a step whose gradients are known."""

        def update(before: tuple[Variables, Slots]) -> tuple[Variables, Slots]:
            return apply_step(train_op, gradients, written, State(*before, *state[2:]), at)

        # A condition for its branch: before another one, XLA on CPUs else copies variables and slots.
        apart = state.global_step >= 0 if train_op.after else None
        variables, slots = update_if(apart, update, state[:2], always=True)
        after = State(variables, slots, state.global_step + 1, state.key)
        for change in train_op.after:
            after = change(after)
        return count_skipped(gradients, state, after) if gradients.marks else after

    def train(self, info: ModelInfo, state: State, features: Features, labels: Labels) -> tuple[State, EstimatorSpec]:
        """One step; of one tower, where towers are mapped outside (`Placement.map_steps`)."""

        def compute_at(variables: Variables) -> tuple[TrainOp, StepGradients]:
            start = state._replace(variables=variables)
            spec, gradients, _ = self.compute(info, start, features, labels, ModeKeys.TRAIN)
            return train_op_of(spec), gradients

        # First the model_fn and its gradients, then the updates, then the report.
        spec, gradients, written = self.compute(info, state, features, labels, ModeKeys.TRAIN)
        after = self.apply(state, train_op_of(spec), gradients, written, compute_at)
        return after, finish_spec(spec, gradients.is_allowed(), after)

    def train_step(
        self, info: ModelInfo, state: State, features: Features, labels: Labels
    ) -> tuple[State, EstimatorSpec]:
        """One step of all towers."""
        return info.placement.map_steps(functools.partial(self.train, info))(state, features, labels)

    def train_loop(
        self, info: ModelInfo, state: State, features: Features, labels: Labels
    ) -> tuple[State, EstimatorSpec]:
        """A step with each of the stacked batches."""

        def loop(state: State, *batches: PyTree) -> tuple[State, EstimatorSpec]:
            # The key stays out of the carry, and so out of what the loop copies from step to step.
            def step(carry: Carry, features: Features, labels: Labels) -> tuple[Carry, EstimatorSpec]:
                after, spec = self.train(info, State(*carry, state.key), features, labels)
                return carry_of(after), spec

            carry, specs = loop_over_all(step, carry_of(state), batches)
            return State(*carry, state.key), specs

        return info.placement.map_steps(loop, stacked=True)(state, *per_step((features, labels)))

    def halves(self, info: ModelInfo) -> Halves:
        """The parts of `train`, for variables that are on devices of their own."""

        def compute(state: State, features: Features, labels: Labels) -> tuple[EstimatorSpec, StepGradients, Variables]:
            return self.compute(info, state, features, labels, ModeKeys.TRAIN)

        return Halves(compute, self.apply, finish_spec)

    def read(self, info: ModelInfo, mode: ModeKeys, state: State, features: Features, labels: Labels) -> EstimatorSpec:
        """Evaluation or prediction of a batch."""
        spec, *_ = self.compute(info, state, features, labels, mode)
        return dataclasses.replace(spec, train_op=None)


def _warn_of_lost_updates(train_op: TrainOp, frame: Frame) -> None:
    lost = frame.declared.slot_owners.keys() - {update.slots for update in train_op.updates}
    if lost:
        logging.warning(
            "The EstimatorSpec has no update of the optimizers %s: its train_op lacks what `minimize` returned, "
            "which then changes nothing. Put several train_ops into one by `est.group`.",
            sorted(lost),
        )


def _warn_of_half_precision(loss: jax.Array) -> None:
    if loss.dtype.itemsize < 4:
        logging.warning(
            "The loss is computed in %s, which keeps two or three digits. Cast what it is made of, "
            "`logits.astype(jnp.float32)`, or use `est.losses`, which do.",
            loss.dtype,
        )


def finish_spec(spec: EstimatorSpec, allowed: jax.Array | None, after: State) -> EstimatorSpec:
    """The spec of a step that was made, with a report in place of the train_op.

    Args:
      allowed: whether its updates were made; None if nobody has looked.
    """

    def scalars(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value.ndim == 0}

    return spec.replace_unchecked(
        train_op=StepReport(
            skipped=None if allowed is None else ~allowed,
            learning_rates=scalars(read_rates(after.slots)),
            gradient_norms=scalars(read_norms(after.slots)),
            optimizers=len(train_op_of(spec).updates),
        )
    )


def variables_in(mode: ModeKeys, info: ModelInfo, variables: Variables) -> Variables:
    """The variables as the model_fn reads them in a mode."""
    return variables_to_read(info.notes.get(Averages), mode, variables)


def with_given_values(info: ModelInfo, state: State, given: set[str]) -> State:
    """A new state of which the variables with these names were given other values: what follows them begins again."""
    return state._replace(variables=begin_averages(info.notes.get(Averages), state.variables, given))


def check_modes(infos: Mapping[ModeKeys, ModelInfo]) -> None:
    """Raises an error if what a model_fn does in one mode contradicts another."""
    check_averages_read({mode: (info.notes.get(Averages), info.like.variables) for mode, info in infos.items()})


def _struct(leaf: PyTree) -> jax.ShapeDtypeStruct:
    """An array of the State as programs are traced for it."""
    # With its weak type, which is a part of what jax traces for: a state without it is another program's.
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _hooks(spec: EstimatorSpec) -> tuple[Sequence[Hook], Sequence[Hook]]:
    if spec.mode == ModeKeys.TRAIN:
        return spec.training_chief_hooks, spec.training_hooks
    return (), spec.evaluation_hooks if spec.mode == ModeKeys.EVAL else spec.prediction_hooks
