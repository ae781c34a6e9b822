"""Copies of the variables compared during a training run."""

from __future__ import annotations

from estimator.core._hook import Context, Hook, RunValues
from estimator.multihost._replica_check import check_replicas


class ReplicaCheckHook(Hook):
    """Raises `ReplicaMismatchError` if copies differ; `RunConfig(check_replicas_every=...)` adds it.

    Args:
      every: at which multiples of global steps to look.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def next_step(self, step: int) -> int:
        # At multiples of N, whatever the first step of the run is.
        return step + self._every - step % self._every

    def after_run(self, context: Context, values: RunValues) -> None:
        state = context.state
        check_replicas(context.global_step, variable=state.variables, slot=state.slots)
