"""The compiled programs of the training loop: one step, or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten

from estimator.core._batch import BatchGuard, abstract
from estimator.core._bcoo import alike, with_steps
from estimator.core._estimator_spec import EstimatorSpec, loss_of, train_op_of
from estimator.core._record import Report
from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.inputs._batch_values import stack_of
from estimator.loop._flops import steps_that_fit
from estimator.optim._learning_rate import tagged
from estimator.steps._deferred_merge import merged
from estimator.steps._transform import Model

Pair = tuple[PyTree, PyTree]  # features and labels


class Carry(NamedTuple):
    """What goes from step to step on the devices: the state, less its key, which never changes."""

    variables: dict[str, PyTree]
    slots: dict[str, PyTree]
    global_step: jax.Array


class StepOutputs(NamedTuple):
    """What is known of every step: scalars, or of several steps arrays `[steps]`.

    Attributes:
      losses: those of the model_fn.
      rates: the learning rates under `optax.inject_hyperparams`, by tag (see `_learning_rates.py`).
    """

    losses: jax.Array
    rates: dict[str, jax.Array]


Outcome = tuple[Carry, StepOutputs, dict[str, Report]]


class Run(NamedTuple):
    """A program with its batches, ready to run.

    Attributes:
      program: `(carry, key_data, *args) -> (carry, seen, reported)`.
      steps: how many steps it makes.
      args: the batches.
      batch: features and labels of the first step; of several processes, the rows of this one.
      reporting: the program to run in its place, to get what the model_fn reports.
    """

    program: Callable[..., Outcome]
    steps: int
    args: tuple[Any, ...]
    batch: Pair
    reporting: Callable[..., Outcome] | None = None


class Programs:
    """The programs that train a model, for batches like the one given; each is compiled when it is first used.

    The key comes as plain numbers, since jax takes typed keys on a slower path (some 8 us per call). Of the spec they
    keep the loss and the learning rates; what the model_fn reports is computed by `reporting` only.

    Where steps run in loops, a single one does too: out of a loop XLA makes other programs of some steps (those with
    convolutions, on a CPU), of which the last bits differ. So results do not depend on how a run is cut into programs,
    nor on what hooks ask for: a run that goes on from a checkpoint cuts its steps elsewhere.

    Attributes:
      traits: what is known of the model_fn.
      steps_per_program: how many steps a program makes at most.
      loops: whether steps run in loops.
      guard: to call them with.
    """

    def __init__(self, model: Model, features: PyTree, labels: PyTree) -> None:
        self.traits = traits = model.traits(features, labels)
        self.steps_per_program = 1
        self.loops = False
        self.guard = BatchGuard(features, labels)
        self._batch = jax.tree.map(_abstract, traits.placement.from_processes((features, labels)))
        self._used: set[int] = set()

        def reporting_step(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> Outcome:
            state, spec = model.inner_step(state_of(carry, key_data), features, labels)
            return _carry(state), _seen(spec), spec.reported

        def step(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> Outcome:
            return *reporting_step(carry, key_data, features, labels)[:2], {}

        def reporting(*args: Any) -> Outcome:
            return merged(reporting_step(*args))

        def one(*args: Any) -> Outcome:
            return merged(step(*args))

        def several(carry: Carry, key_data: jax.Array, features: PyTree, labels: PyTree) -> Outcome:
            state, spec = model.train_loop(state_of(carry, key_data), with_steps((features, labels)))
            return _carry(state), _seen(spec), {}

        def some(carry: Carry, key_data: jax.Array, steps: jax.Array, *batches: PyTree) -> Outcome:
            carry, seen, _ = _loop(step, carry, key_data, 0, steps, batches)
            return carry, merged(seen, stacked=True), {}

        def some_reporting(carry: Carry, key_data: jax.Array, steps: jax.Array, *batches: PyTree) -> Outcome:
            carry, seen, _ = _loop(step, carry, key_data, 0, steps - 1, batches)
            carry, last, reported = _loop(reporting_step, carry, key_data, steps - 1, steps, batches)
            seen = jax.tree.map(lambda x, y: x.at[steps - 1].set(y[steps - 1]), seen, last)
            return carry, merged(seen, stacked=True), merged(reported)

        def compiled(program: Any) -> Any:
            return jax.jit(program, donate_argnums=0) if traits.is_one_program else program

        self._one, self._reporting = compiled(one), compiled(reporting)
        self._several, self._some, self._some_reporting = map(compiled, (several, some, some_reporting))

    @functools.cached_property
    def steps_that_fit(self) -> int:
        """How many steps are to go into one program, by their arithmetic."""
        carry, key_data = _carry(self.traits.like), jax.eval_shape(jax.random.key_data, self.traits.like.key)
        return steps_that_fit(self._one, self.traits.platform, carry, key_data, *self._batch)

    def compiled_step(self, like: State) -> Any:
        """The program of one step, compiled for a state that is like this: of `jax.ShapeDtypeStruct`s."""
        key_data = jax.eval_shape(jax.random.key_data, like.key)
        return self._one.lower(_carry(like), key_data, *self._batch).compile()

    def runs(self, pairs: Sequence[Pair], most: int, alone: bool = False, reports: bool = False) -> list[Run]:
        """The programs that make a step with each batch, in their order.

        Args:
          pairs: the batches.
          most: for how many a program is to have room; the same for many calls, since each number compiles anew.
          alone: whether this is a single step, to be a program of its own.
          reports: whether values may be asked for of the last step.
        """
        reports = reports and bool(self.traits.reported)
        if not self.loops:
            last = self._reporting if reports else None
            placed = map(self.traits.placement.from_processes, pairs)
            return [
                Run(self._one, 1, args, pair, last if i == len(pairs) else None)
                for i, (args, pair) in enumerate(zip(placed, pairs, strict=True), 1)
            ]
        room = 1 if alone else max(most, len(pairs))
        stacked = stacked_batches(pairs, room) or stacked_batches(alike(pairs), room)
        if stacked is None:
            before = [run for pair in pairs[:-1] for run in self.runs([pair], 1, alone=True)]
            return [*before, *self.runs(pairs[-1:], 1, True, reports)]
        stacked = self.traits.placement.from_processes(stacked, stacked=True)
        if len(pairs) == room > 1 and not reports:
            return [Run(self._several, room, stacked, pairs[0])]
        args = np.int32(len(pairs)), *stacked
        return [Run(self._some, len(pairs), args, pairs[0], self._some_reporting if reports else None)]

    def is_new(self, program: Callable[..., Outcome]) -> bool:
        """Whether a program is about to be compiled, as far as is known; to be asked once before each run."""
        if id(program) in self._used:
            return False
        self._used.add(id(program))
        return True


def _loop(
    step: Callable[..., Outcome],
    carry: Carry,
    key_data: jax.Array,
    start: jax.Array | int,
    stop: jax.Array,
    batches: tuple[PyTree, ...],
) -> Outcome:
    """Makes a step with each of the batches from `start` to `stop`; what is reported is that of the last one.

    Where to stop is an argument of the program: XLA would take a loop of one step apart.
    """
    first = jax.tree.map(lambda x: x[0], batches)
    _, of_one, reported = jax.eval_shape(step, carry, key_data, *first)

    def body(i: jax.Array, before: Outcome) -> Outcome:
        carry, seen, reported = step(before[0], key_data, *jax.tree.map(lambda x: x[i], batches))
        return carry, jax.tree.map(lambda x, y: x.at[i].set(y), before[1], seen), reported

    room = jax.tree.leaves(batches)[0].shape[0]
    seen = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), of_one)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), reported)
    return jax.lax.fori_loop(start, stop, body, (carry, seen, nothing))


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = None if getattr(x, "is_fully_addressable", True) else x.sharding
    return abstract(x).update(sharding=sharding)


def state_of(carry: Carry, key_data: jax.Array) -> State:
    return State(carry.variables, carry.slots, carry.global_step, jax.random.wrap_key_data(key_data))


def _carry(state: State) -> Carry:
    return Carry(state.variables, state.slots, state.global_step)


def _seen(spec: EstimatorSpec) -> StepOutputs:
    """A skipped step's NaN is reported as inf: it must not end the training."""
    loss, train_op = loss_of(spec), train_op_of(spec)
    if train_op.skipped is not None:
        loss = jnp.where(train_op.skipped & jnp.isnan(loss), jnp.inf, loss)
    return StepOutputs(loss, tagged(train_op.learning_rates))


def stacked_batches(pairs: Sequence[Pair], room: int) -> Pair | None:
    """The batches as one of arrays `[room, batch, ...]`, the last of them repeated to fill the room; None if they
    differ in structure, shapes or dtypes."""
    first, structure = tree_flatten(pairs[0])
    flat = [first]
    for pair in pairs[1:]:
        leaves, other = tree_flatten(pair)
        if other != structure:  # type: ignore[operator]
            return None
        flat.append(leaves)
    stacked = []
    for same in zip(*flat, strict=True):
        for kinds in ([getattr(x, "shape", None) for x in same], [getattr(x, "dtype", None) for x in same]):
            if kinds.count(kinds[0]) < len(kinds):
                return None
        stack = stack_of(same) if len(same) == room else None
        stacked.append(_stack([*same, *[same[-1]] * (room - len(same))]) if stack is None else stack)
    return jax.tree.unflatten(structure, stacked)


def _stack(leaves: Sequence[Any]) -> Any:
    return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves)
