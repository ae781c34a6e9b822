"""Notes of the calls of an optimizer's methods in one run, for each other."""

from __future__ import annotations

import dataclasses

from estimator.core._typing import Gradients


@dataclasses.dataclass
class GradientCalls:
    """Calls of `compute_gradients`, `tower_gradient` and `get_state` in one run of a model_fn.

    Attributes:
      known: what the first calls of `compute_gradients` return (see `steps/_gradients.py`).
      count: the number of calls of `compute_gradients`.
      scaled: the variables whose gradients it returned, which are scaled as the losses are.
      loss_scaled_by: of these variables, the optimizers whose loss scale the gradients were computed with.
      unreached: the variables for which it returned None, since the loss does not depend on them.
      says_scaled: whether `tower_gradient` scaled gradients that the model_fn took by itself.
      slot_variables: the variables that entries of `Frame.slots` are about, where a run reads them outside of TRAIN.
    """

    known: tuple[Gradients, ...] = ()
    count: int = 0
    scaled: set[str] = dataclasses.field(default_factory=set)
    loss_scaled_by: dict[str, object] = dataclasses.field(default_factory=dict)
    unreached: set[str] = dataclasses.field(default_factory=set)
    says_scaled: bool = False
    slot_variables: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Reached:
    """The variables that a loss of the model depends on, or that `apply_gradients` was given a gradient for."""

    names: set[str] = dataclasses.field(default_factory=set)

    def update(self, other: Reached) -> None:
        self.names.update(other.names)
