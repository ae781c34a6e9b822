"""The common part of all runners of towers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from estimator import EstimatorSpec, State
from estimator.replication import Frame, ModelRun, NonFinitePolicy, PerPart, Placement
from estimator.typing import Forward
from replicate.cross_tower_ops import CrossTowerOps
from replicate.towers._collectives import cross_tower_mean
from replicate.towers._key import tower_key
from replicate.towers._map import num_towers


@dataclasses.dataclass(frozen=True)
class Runner(abc.ABC):
    """Runs a model_fn in towers, within the frame of the run around it.

    Attributes:
      devices: one per tower, or a tuple of them.
      placement: where the variables live.
      mean_loss: whether the merged loss is the mean of the towers' losses, not their sum.
      on_nan: policy for gradients that are not finite; None if nobody looks.
      ops: takes the sums over towers.
      transform: the `tower_transform` of `replicate_model_fn`.
    """

    devices: tuple[Any, ...]
    placement: Placement
    mean_loss: bool
    on_nan: NonFinitePolicy | None
    ops: CrossTowerOps
    transform: Callable[[Forward], Forward] | None

    @abc.abstractmethod
    def initialize(self, run: ModelRun) -> EstimatorSpec:
        """Creates the variables as one tower with the whole batch would."""

    @abc.abstractmethod
    def train(self, run: ModelRun) -> EstimatorSpec:
        """The merged spec of a training step."""

    @abc.abstractmethod
    def evaluate(self, run: ModelRun) -> EstimatorSpec:
        """The merged spec in EVAL or PREDICT, in which every example counts once."""

    def merge_parts(self, per_part: PerPart, towers: int) -> PerPart:
        """The fields of the spec of all towers, from arrays with the towers as their first dimension."""
        return per_part._replace(metrics=self.placement.to_merge(per_part.metrics)).merge(towers)

    def start_of(self, frame: Frame) -> State:
        """The state that all towers of a run start from."""
        return State(self.placement.to_read(frame.variables), frame.slots, frame.global_step, frame.key)

    def readable(self, spec: EstimatorSpec) -> EstimatorSpec:
        """The spec with what every process reads whole in each."""
        metrics, reported = self.placement.whole_in_each((spec.eval_metric_ops, spec.reported))
        return dataclasses.replace(spec, eval_metric_ops=metrics, reported=reported)


def tower_frame(
    frame: Frame,
    start: State,
    average_denominator: Callable[[jax.Array, int | None], jax.Array],
    share: float,
    first: int = 0,
) -> Frame:
    """The frame of one tower.

    Args:
      frame: of the run around the towers.
      start: the state that the tower starts from.
      average_denominator, share: see `Replica`.
      first: the number of the first row, which makes the random keys differ from other parts' towers.
    """
    key = start.key
    # A single tower with all rows draws the same random numbers as a plain model_fn.
    if num_towers() > 1 or first:
        key = tower_key(key, first)
    return frame.fresh(
        variables=start.variables,
        slots=start.slots,
        key=key,
        global_step=start.global_step,
        replica=dataclasses.replace(
            frame.replica,
            average_denominator=average_denominator,
            share=share,
            towers=num_towers(),
            mean=cross_tower_mean,
        ),
    )
