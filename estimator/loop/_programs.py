"""The compiled programs of the training loop: one step, or several in a loop."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten

from estimator.core._batch import BatchGuard, abstract
from estimator.core._bcoo import alike
from estimator.core._estimator_spec import EstimatorSpec, loss_of, report_of
from estimator.core._record import Report
from estimator.core._state import State
from estimator.core._train_op import StepReport
from estimator.core._typing import Features, Labels, PyTree
from estimator.inputs._batch_values import stack_of
from estimator.loop._flops import count_flops, peak_flops, steps_that_fit
from estimator.runtime._program import Program, abstract_argument
from estimator.steps._step_loops import Carry, carry_of, loop_over_some, state_of
from estimator.steps._transform import Model

Pair = tuple[PyTree, PyTree]  # features and labels

# More gain nothing, and on CPU devices the collectives of many starve each other until XLA aborts the process.
_MOST_IN_FLIGHT = 2
# Of the batches of a chunk, of which some are read ahead: to bring as many to an accelerator takes milliseconds.
_MOST_BYTES = 1 << 26
# A batch that is stacked is copied once more, by the program that takes it out of the stack. On a CPU, of 256 KB a step
# takes 0.4 of the time so, of 1 MB 1.7, of 4 MB 2.
_MOST_BYTES_OF_A_STACKED_BATCH = 1 << 19


class StepOutputs(NamedTuple):
    """The values of every step: scalars, or of several steps arrays `[steps]`.

    Attributes:
      losses: of the model_fn.
      report: what the step says of itself.
    """

    losses: jax.Array
    report: StepReport


Outcome = tuple[Carry, StepOutputs, dict[str, Report]]


class ProgramCall(NamedTuple):
    """A program with its batches, ready to run.

    Attributes:
      program: `(carry, key_data, *args) -> (carry, outputs, reported)`.
      args: the batches.
      pairs: features and labels of each step; of several processes, the rows of this one.
      reporting: the program to run instead, to get what the model_fn reports.
    """

    program: Program
    args: tuple[Any, ...]
    pairs: Sequence[Pair]
    reporting: Program | None = None

    @property
    def steps(self) -> int:
        """The number of steps it makes."""
        return len(self.pairs)


class Programs:
    """The programs that train a model, for batches like the one given; each is compiled when it is first used.

    | program               | steps it makes                  | what the model_fn reports |
    |-----------------------|---------------------------------|---------------------------|
    | `step`                | one                             | is left out               |
    | `step_reporting`      | one                             | is returned               |
    | `loop`                | with the first `steps` batches  | is left out               |
    | `loop_reporting`      | with the first `steps` batches  | is returned, of the last  |

    Of the spec they keep the loss and what the log shows beside it; what the model_fn reports is computed where a hook
    reads it only.

    Where steps run in loops, a single one does too: out of a loop XLA makes other programs of some steps (those with
    convolutions, on a CPU), of which the last bits differ. So results do not depend on how a run is cut into programs,
    nor on what hooks read: a run that resumes from a checkpoint cuts its steps elsewhere.

    Attributes:
      info: what is known of the model_fn.
      steps_per_program: the number of steps that a program makes at most.
      loops: whether steps run in loops.
      guard: calls them.
    """

    def __init__(self, model: Model, features: Features, labels: Labels) -> None:
        self.info = info = model.info(features, labels)
        self.steps_per_program = 1
        self.loops = False
        self.guard = BatchGuard(features, labels)
        self._batch = jax.tree.map(_abstract, self._from_processes((features, labels)))
        self._start: tuple[Carry, jax.Array] | None = None

        def compile_run(run: Callable[..., Outcome]) -> Program:
            run = functools.partial(run, model)
            if not info.is_one_program:
                return Program(run, jit=False)
            # The state comes out as it goes in: its memory can be reused, and the next call needs no other program.
            homes = info.shardings and jax.tree.map(lambda x: x.sharding, carry_of(info.placed_state))
            return Program(run, donate=True, out_shardings=(homes, None, None))

        self._step, self._step_reporting = compile_run(step), compile_run(step_reporting)
        self._loop, self._loop_reporting = compile_run(loop), compile_run(loop_reporting)

    @functools.cached_property
    def steps_that_fit(self) -> int:
        """The number of steps that are to go into one program, by their arithmetic and the size of their batches."""
        if self.info.platform == "cpu" and self._bytes > _MOST_BYTES_OF_A_STACKED_BATCH:
            return 1
        fit = steps_that_fit(self._trace_to_count(), self.info.platform, lambda _: self.flops)
        return max(1, min(fit, self.batches_that_fit))

    @property
    def batches_that_fit(self) -> int:
        """The number of batches that are to be read ahead together, by their size; 0 for large ones."""
        return _MOST_BYTES // max(1, self._bytes)

    @property
    def _bytes(self) -> int:
        """The bytes of a batch of this process."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._batch)) // jax.process_count()

    @functools.cached_property
    def flops(self) -> float:
        """The FLOPs of a step on one device."""
        return count_flops(self._trace_to_count())

    @property
    def least_step_seconds(self) -> float | None:
        """The seconds that the FLOPs of a step take at the peak of its devices, where that is known."""
        peak = peak_flops(self.info.device.device_kind)
        return None if peak is None or not self.info.is_one_program else self.flops / peak

    def note_start(self, carry: Carry, key_data: jax.Array) -> None:
        """Notes what the first program is called with: a step that is lowered to count its FLOPs is then compiled."""
        self._start = jax.tree.map(abstract_argument, (carry, key_data))

    def _trace_to_count(self) -> jax.stages.Traced:
        return self.trace_step(self.info.like) if self._start is None else self._step.trace(*self._start, *self._batch)

    def trace_step(self, like: State) -> jax.stages.Traced:
        """The program of one step, for a state that is like this: of `jax.ShapeDtypeStruct`s."""
        key_data = jax.eval_shape(jax.random.key_data, like.key)
        return self._step.trace(carry_of(like), key_data, *self._batch)

    def runs(self, pairs: Sequence[Pair], most: int, alone: bool = False, reports: bool = False) -> list[ProgramCall]:
        """The programs that make a step with each batch, in their order.

        Args:
          pairs: the batches.
          most: for how many a program has room; the same for many calls, since each number is compiled by itself.
          alone: whether this is a single step, in a program of its own.
          reports: whether hooks may read values of the last step.
        """
        reports = reports and bool(self.info.reported)
        if not self.loops:
            last = self._step_reporting if reports else None
            placed = map(self._from_processes, pairs)
            return [
                ProgramCall(self._step, args, [pair], last if i == len(pairs) else None)
                for i, (args, pair) in enumerate(zip(placed, pairs, strict=True), 1)
            ]
        room = 1 if alone else max(most, len(pairs))
        # Sparse batches that differ in their number of entries are padded only here: most batches stack as they are.
        stacked = stacked_batches(pairs, room) or stacked_batches(alike(pairs), room)
        if stacked is None:
            before = [run for pair in pairs[:-1] for run in self.runs([pair], 1, alone=True)]
            return [*before, *self.runs(pairs[-1:], 1, True, reports)]
        stacked = self._from_processes(stacked, stacked=True)
        # The number of steps is an argument, so that a chunk that is short runs the same program.
        args = np.int32(len(pairs)), *stacked
        return [ProgramCall(self._loop, args, pairs, self._loop_reporting if reports else None)]

    def _from_processes(self, batch: PyTree, stacked: bool = False) -> PyTree:
        placement = self.info.placement
        return placement.from_processes(batch, stacked) if placement.spans_processes else batch


def step(model: Model, carry: Carry, key_data: jax.Array, features: Features, labels: Labels) -> Outcome:
    return _outcome(*model.inner_steps(functools.partial(_step, False), state_of(carry, key_data), features, labels))


def step_reporting(model: Model, carry: Carry, key_data: jax.Array, features: Features, labels: Labels) -> Outcome:
    return _outcome(*model.inner_steps(functools.partial(_step, True), state_of(carry, key_data), features, labels))


def loop(model: Model, carry: Carry, key_data: jax.Array, steps: jax.Array, *batches: PyTree) -> Outcome:
    """A step with each of the first `steps` of the stacked batches."""
    return _outcome(*model.inner_steps(_loop, state_of(carry, key_data), *batches, steps, stacked=True))


def loop_reporting(model: Model, carry: Carry, key_data: jax.Array, steps: jax.Array, *batches: PyTree) -> Outcome:
    return _outcome(*model.inner_steps(_loop_reporting, state_of(carry, key_data), *batches, steps, stacked=True))


def _step(
    reports: bool, step: Callable[..., Any], state: State, *batch: PyTree
) -> tuple[State, tuple[EstimatorSpec, EstimatorSpec | None]]:
    """One step; of its spec, what every step says, and what the model_fn reports."""
    state, spec = step(state, *batch)
    bare = spec.replace_unchecked(predictions=None, eval_metric_ops={}, export_outputs=None, reported={})
    return state, (bare, bare.replace_unchecked(reported=spec.reported) if reports else None)


def _loop(step: Callable[..., Any], state: State, features: PyTree, labels: PyTree, stop: jax.Array) -> Any:
    return _steps_between(False, step, state, (features, labels), 0, stop)


def _loop_reporting(step: Callable[..., Any], state: State, features: PyTree, labels: PyTree, stop: jax.Array) -> Any:
    state, (specs, _) = _steps_between(False, step, state, (features, labels), 0, stop - 1)
    state, (last, reporting) = _steps_between(True, step, state, (features, labels), stop - 1, stop)
    specs = jax.tree.map(lambda x, y: x.at[stop - 1].set(y[stop - 1]), specs, last)
    return state, (specs, reporting)


def _steps_between(
    reports: bool, step: Callable[..., Any], state: State, batches: Pair, start: jax.Array | int, stop: jax.Array
) -> tuple[State, tuple[EstimatorSpec, EstimatorSpec | None]]:
    """The specs of all steps, stacked, and what the last one reports."""

    # The key stays out of the carry, and so out of what the loop copies from step to step.
    def body(carry: Carry, *batch: PyTree) -> tuple[Carry, Any, Any]:
        after, (bare, reporting) = _step(reports, step, State(*carry, state.key), *batch)
        return carry_of(after), bare, reporting

    carry, specs, reporting = loop_over_some(body, carry_of(state), batches, start, stop)
    return State(*carry, state.key), (specs, reporting)


def _outcome(state: State, specs: tuple[EstimatorSpec, EstimatorSpec | None]) -> Outcome:
    spec, reporting = specs
    return carry_of(state), _outputs_of(spec), {} if reporting is None else reporting.reported


class InFlight:
    """The programs that were started last: a new one waits for the last but two."""

    def __init__(self) -> None:
        self._outputs: collections.deque[jax.Array] = collections.deque()

    def add(self, output: jax.Array) -> None:
        """Notes a program that was started, by one of its outputs."""
        self._outputs.append(output)
        if len(self._outputs) > _MOST_IN_FLIGHT:
            self._outputs.popleft().block_until_ready()

    def is_busy(self) -> bool:
        """Returns whether the devices still work on one of them."""
        return bool(self._outputs) and not self._outputs[-1].is_ready()  # type: ignore[attr-defined]


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = None if getattr(x, "is_fully_addressable", True) else x.sharding
    return abstract(x).update(sharding=sharding)


def _outputs_of(spec: EstimatorSpec) -> StepOutputs:
    """A skipped step's NaN is reported as inf: it must not end the training."""
    loss, report = loss_of(spec), report_of(spec)
    if report.skipped is not None:
        loss = jnp.where(report.skipped & jnp.isnan(loss), jnp.inf, loss)
    return StepOutputs(loss, report)


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


def _stack(leaves: Sequence[jax.Array | np.ndarray]) -> jax.Array | np.ndarray:
    return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves)
