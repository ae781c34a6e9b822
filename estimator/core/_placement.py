"""Placement of a batch, the variables and the optimizer slots."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from estimator.core._bcoo import per_step
from estimator.core._state import State
from estimator.core._typing import Features, Labels, Partitions, PyTree, Shardings, Tree, Variables

Step = Callable[[State, PyTree, PyTree], tuple[State, PyTree]]
"""`(state, features, labels) -> (state, spec)`."""

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
      kind: in a word or two, for those who look at it.
      parts: the number of devices that each run of the model_fn is spread over.
      is_one_program: whether a training step may be part of another program (`jax.jit`, `lax.scan`).
    """

    kind = "one device"
    parts = 1
    is_one_program = True

    def state(self, like: State) -> Shardings:
        """The shardings of a State; `like` has its abstract arrays, the variables in the order they were created."""
        del like
        return None

    def state_to_read(self, like: State) -> Shardings:
        """The shardings of a State that the model_fn only reads, as in evaluation."""
        return self.state(like)

    def batch(self, rows: int) -> jax.sharding.Sharding | None:
        """The sharding of features and labels of `rows` examples."""
        del rows
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
        del partitions
        return self

    def place(self, tree: Tree) -> Tree:
        """Variables or slots, with the shardings of the state."""
        return tree

    def shard(self, x: jax.Array, axis: int) -> jax.Array:
        """An array, cut over the devices that the run is spread over."""
        del axis
        return x

    def gather(self, tree: Tree) -> Tree:
        """Arrays, whole on every device."""
        return tree

    def first(self, of_towers: jax.Array) -> jax.Array:
        """The first tower's of values with the towers as their first dimension, in every process."""
        # Gathered before it is indexed: the first tower's part may be in another process.
        return self.gather(of_towers)[0]

    def to_read(self, variables: Tree) -> Tree:
        """Variables, as the model_fn reads them."""
        return variables

    def to_update(self, train_op: Tree) -> Tree:
        """Summed gradients, as the optimizer takes them."""
        return train_op

    def to_merge(self, metrics: Tree) -> Tree:
        """The metrics of all towers, as they are merged."""
        return metrics

    # How steps are compiled.

    def compile_step(self, step: Step, halves: Halves, like: State, donate: bool) -> Step:
        """The compiled training step.

        Args:
          step: the pure `(state, features, labels) -> (state, spec)`.
          halves: the same in two pure parts, for variables that are on devices of their own.
          like: the abstract State.
          donate: whether the memory of the given state may be reused.
        """
        del halves
        return self._compile_sharded(step, like, donate)

    def compile_loop(self, loop: Step, halves: Halves, like: State, donate: bool) -> Step:
        """The compiled steps over stacked batches; arguments as for `compile_step`."""
        del halves
        return self._compile_sharded(loop, like, donate, stacked=True)

    def compile_read(self, step: Read[Tree]) -> Read[Tree]:
        """The compiled `step(state, features, labels)`, which leaves the state as it is."""
        # No shardings are given: the state may be from TRAIN, with slots, or from this mode, without.
        return self._with_all_rows(jax.jit(step))

    def _compile_sharded(self, step: Step, like: State, donate: bool, stacked: bool = False) -> Step:
        shardings = self.state(like)
        compiled = jax.jit(
            step,
            # None: a batch stays where the caller has it; `PureSteps.compute` constrains it within the program.
            in_shardings=(shardings, None, None),
            # The state comes out as it goes in: so its memory can be reused, and the next call needs no other program.
            out_shardings=(shardings, None),
            donate_argnums=0 if donate else (),
        )
        return self._with_all_rows(compiled, stacked)

    def _with_all_rows(self, step: Read[Tree], stacked: bool = False) -> Read[Tree]:
        """A step on the batch of all processes, given the rows of this one."""
        if not self.spans_processes:
            return step
        return lambda state, *batch: step(state, *self.from_processes(batch, stacked))


class OffTowerPlacement(Placement, abc.ABC):
    """A placement of variables on devices that no program can share with the model_fn.

    A program runs on one set of devices. Where the model_fn and the variables are on different ones, a training step
    is several programs with transfers between them, made here; it cannot be part of another program.
    """

    kind = "variable devices"
    is_one_program = False

    # Abstract again: by its methods here, `Placement` puts the variables and the model_fn into one program.
    @abc.abstractmethod
    def state_to_read(self, like: State) -> Shardings: ...

    @abc.abstractmethod
    def compile_step(self, step: Step, halves: Halves, like: State, donate: bool) -> Step: ...

    @abc.abstractmethod
    def compile_read(self, step: Read[Tree]) -> Read[Tree]: ...

    def compile_loop(self, loop: Step, halves: Halves, like: State, donate: bool) -> Step:
        """As many steps as the batches hold, one after the other."""
        # Such a step is made of the halves alone, so that `loop` only fills the place of the step.
        step = self.compile_step(loop, halves, like, donate)

        def steps(state: State, features: Features, labels: Labels) -> tuple[State, PyTree]:
            specs = []
            batches = per_step((features, labels))
            # Sparse leaves say the shape of one step by now, but their arrays have all steps, like dense leaves.
            for i in range(len(jax.tree.leaves(batches)[0])):
                state, spec = step(state, *jax.tree.map(lambda x, i=i: x[i], batches))
                specs.append(spec)
            return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *specs)

        return steps
