"""Placement of a batch, the variables and the optimizer slots."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from estimator.core._state import State
from estimator.core._typing import Partitions, PyTree, Shardings, Tree, Variables

Step = Callable[[State, PyTree, PyTree], tuple[State, PyTree]]
"""`(state, features, labels) -> (state, spec)`."""

Steps = Callable[..., tuple[State, PyTree]]
"""`(state, features, labels, *bounds) -> (state, specs)`: a training step, or several in a loop, whose batches and
specs are stacked. It may return a tuple of specs."""

Read = Callable[[State, PyTree, PyTree], Tree]
"""`(state, features, labels) -> anything`; the state is only read."""


class Halves(NamedTuple):
    """A training step in two pure functions, and what its spec says once it is done.

    Attributes:
      compute: `(state, features, labels) -> (spec, gradients, assigned)`, to run where the model_fn runs.
      apply: `(state, train_op, gradients, assigned) -> state`, to run where the variables are.
      finish: `(spec, gradients.is_allowed(), state after) -> spec`.
    """

    compute: Callable[[State, PyTree, PyTree], tuple[PyTree, PyTree, Variables]]
    apply: Callable[[State, PyTree, PyTree, Variables], State]
    finish: Callable[[PyTree, jax.Array | None, State], PyTree]


class Placement:
    """Everything on the default device: the placement of a plain model_fn.

    A replicated model_fn puts another one into its frame. Shardings are pytree prefixes; None leaves the choice to jax.

    Attributes:
      parts: the number of devices that each run of the model_fn is spread over.
      is_one_program: whether a training step may be part of another program (`jax.jit`, `lax.scan`).
      homes: the places of the variables of several towers, in a few words.
    """

    parts = 1
    is_one_program = True
    homes = ""

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The devices that the model_fn runs on, in all processes, tower after tower."""
        return tuple(jax.device_put(np.int32(0)).devices())

    @property
    def towers(self) -> int:
        """The number of towers in all processes."""
        return self.towers_per_process * self._processes

    @property
    def _processes(self) -> int:
        return jax.process_count() if self.spans_processes else 1

    def introduce(self, rows: int) -> str:
        """The towers, their devices and their shares of a batch, and where the variables are, for the log.

        Args:
          rows: of this process, in a batch.
        """
        towers, rows = self.towers, rows * self._processes
        own = [device for device in self.devices if device.process_index == jax.process_index()]
        where = name_devices(own or self.devices)
        of_parts = f" of {self.parts} devices" if self.parts > 1 else ""
        apart = f", {self.towers_per_process} in each of {self._processes} processes, here" * self.spans_processes
        begin = f"{plural(towers, 'tower')}{of_parts}{apart} on" if towers * self.parts > 1 else "1 device:"
        each, rest = divmod(rows, towers)
        share = (f" = {towers} x {each}" + (f" + {rest}" if rest else "")) if each and towers > 1 else ""
        homes = f"; variables {self.homes}" if self.homes else ""
        return f"{begin} {where}, {plural(rows, 'row')}{share}{homes}"

    def describe(self) -> str:
        """A sentence that says where the variables live and where the optimizers run, for a report."""
        return "Variables and slots are on one device, and the optimizers run there."

    def state(self, like: State) -> Shardings:
        """The shardings of a State; `like` has its abstract arrays, the variables in the order they were created."""
        return None

    def state_to_read(self, like: State) -> Shardings:
        """The shardings of a State that the model_fn only reads, as in evaluation."""
        return self.state(like)

    def batch(self, rows: int) -> jax.sharding.Sharding | None:
        """The sharding of features and labels of `rows` examples."""
        return None

    spans_processes = False
    """True if the devices belong to several processes, each of which has some rows of every batch."""

    towers_per_process = 1

    def from_processes(self, batch: Tree, stacked: bool = False) -> Tree:
        """The batch of all processes, given the rows of this one; `stacked`: several batches, `[steps, rows, ...]`.

        Called only if the placement `spans_processes`.
        """
        raise NotImplementedError(f"{type(self).__name__} spans processes, but has no `from_processes`. Define it.")

    def whole_in_each(self, tree: Tree) -> Tree:
        """Arrays of a program that each process is to be able to read."""
        return tree

    def in_all_processes(self, batch: Tree) -> Tree:
        """A batch that every process has whole, on all devices."""
        return batch

    # What becomes of arrays within a program.

    def with_partitions(self, partitions: Partitions) -> Placement:
        """The same for a model_fn that declared which dimension of its variables is cut, by name and path."""
        return self

    def place(self, tree: Tree) -> Tree:
        """Variables or slots, with the shardings of the state."""
        return tree

    def shard(self, x: jax.Array, axis: int) -> jax.Array:
        """An array, cut over the devices that the run is spread over."""
        return x

    def gather(self, tree: Tree) -> Tree:
        """Arrays, whole on every device."""
        return tree

    def to_read(self, variables: Tree) -> Tree:
        """Variables, as the model_fn reads them."""
        return variables

    def to_update(self, train_op: Tree) -> Tree:
        """Summed gradients, as the optimizer takes them."""
        return train_op

    def to_merge(self, metrics: Tree) -> Tree:
        """The metrics of all towers, as they are merged."""
        return metrics

    def map_steps(self, steps: Steps, stacked: bool = False) -> Steps:
        """The steps, run by each tower on its own rows and its own state, and what they return, merged.

        Args:
          steps: as they are run by default: the model_fn maps over towers in each of them.
          stacked: whether they get stacked batches, `[steps, rows, ...]`.
        """
        return steps

    # Where a step has to be several programs.

    def split_step(self, halves: Halves, like: State, donate: bool) -> Step | None:
        """The training step as several programs. If None, it is one.

        Args:
          halves: the step in two pure parts.
          like: the abstract State.
          donate: whether the memory of the given state may be reused.
        """
        return None

    def split_read(self, step: Read[Tree]) -> Read[Tree] | None:
        """A step that only reads the state, with transfers before it. If None, it needs none."""
        return None


class OffTowerPlacement(Placement, abc.ABC):
    """A placement of variables on devices that no program can share with the model_fn.

    A program runs on one set of devices. Where the model_fn and the variables are on different ones, a training step
    is several programs with transfers between them, made here; it cannot be part of another program.
    """

    is_one_program = False

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.homes = ("on " if len(devices) == 1 else "in turn on ") + name_devices(devices)

    def describe(self) -> str:
        return (
            "Each variable and its slots are on a device of their own: towers get the variables from there, and their "
            "gradients are summed, and the optimizers run, there."
        )

    # Abstract again: `Placement` has the variables where the model_fn runs.
    @abc.abstractmethod
    def state_to_read(self, like: State) -> Shardings: ...

    @abc.abstractmethod
    def split_step(self, halves: Halves, like: State, donate: bool) -> Step: ...

    @abc.abstractmethod
    def split_read(self, step: Read[Tree]) -> Read[Tree]: ...


def plural(number: int, what: str) -> str:
    """A number and what it counts.

    >>> plural(1, "row"), plural(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def name_devices(devices: Sequence[jax.Device]) -> str:
    """The names of devices of one kind, with ranges of their numbers: "cpu:0-3"."""
    ranges: list[list[int]] = []
    for number in dict.fromkeys(device.id for device in devices):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    name, kind = str(devices[0]), devices[0].platform  # jax calls a GPU "cuda:0", and says much more of a TPU
    kind = name.rpartition(":")[0] if name.endswith(f":{devices[0].id}") else kind
    return f"{kind}:" + ",".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)
