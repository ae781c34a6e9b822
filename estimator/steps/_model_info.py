"""`ModelInfo`: facts about a model_fn that are known before its first run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import jax

from estimator.core._hook import Hook
from estimator.core._notes import Notes
from estimator.core._placement import Placement
from estimator.core._record import Report
from estimator.core._state import State
from estimator.core._step_guard import StepGuard


@dataclasses.dataclass(frozen=True, eq=False)  # by identity: it is hashed in a tree structure of the first run
class ModelInfo:
    """The facts about a model_fn in a mode that its first, abstract run shows.

    Attributes:
      like: the State, of `jax.ShapeDtypeStruct`s.
      placement: where variables and batches go.
      pending: whether losses are left to differentiate.
      shardings: of the State; a prefix.
      guard: policy for steps that are not made; None if every step is.
      compared_on: the device that runs the first batch in one tower, to compare the numbers, or None.
      hooks: of its EstimatorSpec for this mode: for the chief only, and for all.
      trainable: the names of the variables that optimizers change by default.
      trained: the names of those that optimizers change, in TRAIN.
      reported: what it reports, by name, of `jax.ShapeDtypeStruct`s.
      notes: of the features that it uses, about the model.
    """

    like: State
    placement: Placement
    pending: bool
    shardings: Any
    guard: StepGuard | None
    compared_on: jax.Device | None
    hooks: tuple[Sequence[Hook], Sequence[Hook]]
    trainable: tuple[str, ...]
    trained: tuple[str, ...]
    reported: dict[str, Report]
    notes: Notes

    @functools.cached_property
    def batch_devices(self) -> Set[jax.Device] | None:
        """The devices that a batch goes to; None if it stays where it is."""
        # The devices do not depend on the number of rows: any will do.
        sharding = self.placement.batch(1)
        return None if sharding is None else sharding.device_set

    @functools.cached_property
    def placed_state(self) -> State:
        """The State, of `jax.ShapeDtypeStruct`s with their shardings."""
        shardings = jax.tree.broadcast(self.shardings, self.like, is_leaf=lambda x: x is None)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), self.like, shardings)

    @property
    def device(self) -> jax.Device:
        """One of the devices that the model_fn runs on, which are of one kind."""
        shardings = jax.tree.leaves(self.shardings)
        return next(iter(shardings[0].device_set)) if shardings else jax.devices()[0]

    @property
    def platform(self) -> str:
        """The platform of its devices."""
        return self.device.platform

    @property
    def is_one_program(self) -> bool:
        """True if `train_step` may be part of another program (`jax.jit`, `lax.scan`): unless variables live on other
        devices than the towers."""
        return self.placement.is_one_program
