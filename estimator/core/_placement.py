"""Where a batch, the variables and the optimizer slots live."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any


class Placement:
    """Everything on the default device: the placement of a plain model_fn.

    A replicated model_fn puts another one into its frame. Shardings are pytree prefixes; None leaves the choice to jax.
    """

    def state(self, like: Any) -> Any:
        """The shardings of a State; `like` has its abstract arrays, the variables in the order they were created."""
        del like
        return None

    def batch(self, rows: int) -> Any:
        """The sharding of features and labels of `rows` examples."""
        del rows
        return None

    spans_processes = False
    """Whether the devices are those of several processes, of which each has some rows of every batch."""

    towers_per_process = 1

    def from_processes(self, batch: Any, stacked: bool = False) -> Any:
        """The batch of all processes, given the rows of this one; `stacked`: several batches, `[steps, rows, ...]`."""
        del stacked
        return batch

    def whole_in_each(self, tree: Any) -> Any:
        """Arrays of a program that each process is to be able to read."""
        return tree

    def in_all_processes(self, batch: Any) -> Any:
        """A batch that every process has whole, on all devices."""
        return batch


class OffTowerPlacement(Placement, abc.ABC):
    """A placement of variables on devices that no program can share with the model_fn.

    A program runs on one set of devices. Where the model_fn and the variables are on different ones, a training step
    is several programs with transfers between them, made here; it cannot be part of another program.
    """

    @abc.abstractmethod
    def near(self, like: Any) -> Any:
        """The shardings of a State that the model_fn only reads, as in evaluation."""

    @abc.abstractmethod
    def train_step(
        self, compute: Callable[..., Any], apply: Callable[..., Any], like: Any, donate: bool
    ) -> Callable[..., Any]:
        """The training step `(state, features, labels) -> (state, spec)` from its two pure halves.

        Args:
          compute: `(state, features, labels) -> (spec, assigned)`, to run where the model_fn runs.
          apply: `(state, train_op, assigned) -> state`, to run where the variables are.
          like: the abstract State.
          donate: whether the memory of the given state may be reused.
        """

    @abc.abstractmethod
    def read_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled form of `step(state, features, labels)`, which leaves the state as it is."""
