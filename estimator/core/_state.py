"""The state of a training run: variables, optimizer slots, step and key."""

from __future__ import annotations

from typing import NamedTuple

import jax

from estimator.core._typing import Slots, Variables


class State(NamedTuple):
    """All that training changes; a pytree.

    Attributes:
      variables: by full name, an array or a pytree of arrays.
      slots: by optimizer name, the state of its optax transformation.
      global_step: int32 scalar, the number of finished training steps.
      key: typed PRNG key scalar; never changes, since each step folds its number in.
    """

    variables: Variables
    slots: Slots
    global_step: jax.Array
    key: jax.Array
