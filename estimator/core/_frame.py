"""The frame: what a running model_fn reads and writes while it looks like stateful code.

A frame is opened inside a pure function, the model_fn runs in it, and what it left there is collected. Nothing
survives the `with`; the thread-local stack of open frames is the only module-level state of this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from estimator.core._mode_keys import ModeKeys
from estimator.core._notes import Notes
from estimator.core._replica import Replica
from estimator.core._typing import Partitions, Slots, Variables
from estimator.runtime._transformations import differentiates, on_stack

if TYPE_CHECKING:
    from estimator.core._placement import Placement
    from estimator.core._step_guard import StepGuard

T = TypeVar("T")


class Writes(NamedTuple):
    """The variables that a model_fn wrote itself, by name.

    Attributes:
      assigned: the value assigned last.
      added: the sum of the deltas since.
    """

    assigned: Variables
    added: Variables

    @property
    def names(self) -> list[str]:
        return list({**self.assigned, **self.added})

    def applied_to(self, variables: Variables) -> Variables:
        """The new values of what was written."""
        # `assign` drops earlier deltas, so what is in `added` came later, and counts from the assigned value.
        values = dict(self.assigned)
        for name, delta in self.added.items():
            values[name] = jax.tree.map(jnp.add, values.get(name, variables[name]), delta)
        return values


class RunId:
    """Identity token of one run of a model_fn.

    All tokens compare equal, so that a pytree which holds one has the same structure in every run; `is` tells two runs
    apart.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunId)

    def __hash__(self) -> int:
        # Equal tokens need equal hashes: jax looks up a tree structure by its hash.
        return 0


@dataclasses.dataclass(frozen=True)
class ScopeDefaults:
    """The defaults that `get_variable` takes from the open `variable_scope`s for arguments that are not given.

    Attributes:
      initializer, regularizer, custom_getter: the arguments of `variable_scope`.
    """

    initializer: Any = None
    regularizer: Any = None
    custom_getter: Any = None


@dataclasses.dataclass
class Declared:
    """The names that a model_fn has declared so far.

    Attributes:
      trainable, aggregation: the arguments of `get_variable`, by full name.
      partitions: which dimension of a variable's array is cut, by full name and path; empty if a tower is one device.
      slot_owners: which optimizer each entry of `Frame.slots` belongs to.
      reserved_slots: the entries that an optimizer will use before its train_op is made, and their optimizers.
      rng_calls: how often `make_rng` was called, by name.
      scope_uses: how often each `variable_scope` was opened, by full name; 0 once the scope around it is closed.
      name_scopes: what each opening of a `variable_scope` is called in the names of what is reported; see `Frame`.
      notes: of features, about the model; a run around this one takes them over.
    """

    trainable: dict[str, bool] = dataclasses.field(default_factory=dict)
    aggregation: dict[str, Any] = dataclasses.field(default_factory=dict)
    partitions: Partitions = dataclasses.field(default_factory=dict)
    slot_owners: dict[str, object] = dataclasses.field(default_factory=dict)
    reserved_slots: dict[str, object] = dataclasses.field(default_factory=dict)
    rng_calls: Counter[str] = dataclasses.field(default_factory=Counter)
    scope_uses: Counter[str] = dataclasses.field(default_factory=Counter)
    name_scopes: set[str] = dataclasses.field(default_factory=set)
    notes: Notes = dataclasses.field(default_factory=Notes)

    @property
    def trainable_names(self) -> tuple[str, ...]:
        return tuple(name for name, is_trainable in self.trainable.items() if is_trainable)


@dataclasses.dataclass
class Tracing:
    """The place of a run among jax's transformations.

    Attributes:
      run: stands for this run.
      runs: this run, and those within it, as of towers.
      trace: which of jax's traces the frame was opened in.
      around: the transformations of jax that the frame was opened under.
    """

    run: RunId = dataclasses.field(default_factory=RunId)
    runs: list[RunId] = dataclasses.field(default_factory=list)
    trace: object = None
    around: tuple[str, ...] = ()


@dataclasses.dataclass
class Frame:
    """One run of a model_fn.

    Attributes:
      mode: what the run is for.
      variables: the value of every variable at the start of the run, by full name.
      slots: the optimizers' states at the start of the run, by optimizer name.
      key: the PRNG key of this step (in init: of the initial values).
      global_step: int32 scalar.
      initializing: whether `get_variable` creates variables instead of looking them up.
      initial_values: what they begin with, by the names of their arrays; an initializer makes what is not there.
      replica: this run's place in a replicated one.
      scope, reuse, scope_defaults: the open `variable_scope`s.
      name_scope: prefixes what is reported, as TensorFlow's `name_scope`: of no two openings of a scope the same.
      declared: what the model_fn has named so far.
      notes: of features, about only this run.
      writes: the variables that it wrote.
      denominators: of the losses so far; only those known in the model_fn itself, not in a loop or branch within it.
      reported: what it reported, by full name (see `_record.py`).
      placement: where a replicated model_fn wants its variables; None for a plain one.
      guard: policy for steps that are not made; None if every step is.
      compared_on: where the first batch runs in one tower too, to compare the numbers (`steps/_one_tower_check.py`).
      tracing: where the run stands among jax's transformations.
    """

    mode: ModeKeys
    variables: Variables
    slots: Slots
    key: jax.Array
    global_step: jax.Array
    initializing: bool = False
    initial_values: Variables = dataclasses.field(default_factory=dict)
    replica: Replica = Replica()
    scope: tuple[str, ...] = ()
    name_scope: tuple[str, ...] = ()
    reuse: Any = None
    scope_defaults: ScopeDefaults = ScopeDefaults()
    declared: Declared = dataclasses.field(default_factory=Declared)
    notes: Notes = dataclasses.field(default_factory=Notes)
    writes: Writes = dataclasses.field(default_factory=lambda: Writes({}, {}))
    denominators: list[jax.Array] = dataclasses.field(default_factory=list)
    reported: dict[str, Any] = dataclasses.field(default_factory=dict)
    placement: Placement | None = None
    guard: StepGuard | None = None
    compared_on: jax.Device | None = None
    tracing: Tracing = dataclasses.field(default_factory=Tracing)

    def fresh(self, **changes: Any) -> Frame:
        """A frame that starts from here: in the same scope, with the same names in use, nothing written yet."""
        # Copies, so that each run that starts here counts from the same numbers. `trainable` begins empty, since
        # `get_variable` takes a name that is in it for a second call.
        declared = Declared(
            slot_owners=dict(self.declared.slot_owners),
            reserved_slots=dict(self.declared.reserved_slots),
            rng_calls=Counter(self.declared.rng_calls),
            scope_uses=Counter(self.declared.scope_uses),
            name_scopes=set(self.declared.name_scopes),
        )
        inherited = {name: getattr(self, name) for name in _INHERITED}
        own = {"variables": dict(self.variables), "slots": dict(self.slots), "declared": declared}
        return Frame(**(inherited | own | changes))

    def adopt_names(self, inner: Declared) -> None:
        """Makes the variables and optimizers that a run within this one has declared known here."""
        self.declared.trainable.update(inner.trainable)
        self.declared.aggregation.update(inner.aggregation)
        self.declared.slot_owners.update(inner.slot_owners)
        self.declared.notes.update(inner.notes)
        # Taken over and not added up: the inner run began with the counts of this one.
        self.declared.rng_calls = inner.rng_calls
        self.declared.scope_uses = inner.scope_uses
        self.declared.name_scopes = inner.name_scopes


# The fields that a run within another one inherits; others start with their defaults.
_INHERITED = (
    *("mode", "key", "global_step", "initializing", "initial_values", "replica"),
    *("scope", "name_scope", "reuse", "scope_defaults"),
)


def current_trace() -> Any:
    """Equal for two places in one function that jax traces; within a `jax.jit` or `jax.lax.scan` it is another."""
    from jax.extend.core import get_opaque_trace_state  # imports Pallas

    return get_opaque_trace_state(convention="estimator")


def transformations_within(frame: Frame) -> tuple[str, ...] | None:
    """The transformations of jax between the model_fn and the code that calls this, the innermost first.

    It is None if jax traces both in one function, so that what is known here is known in the model_fn. A function that
    is traced apart only by `jax.jit` has no names.
    """
    if frame.tracing.trace == current_trace():
        return None
    # The innermost come first, so what was on the stack when the frame was opened is at the end.
    names = on_stack()
    return names[: len(names) - len(frame.tracing.around)]


def check_is_known_outside(
    call: str, frame: Frame, consequence: str, unless: Callable[[tuple[str, ...]], bool] = lambda names: False
) -> None:
    """Raises a ValueError in a function that jax traces apart: outside of it only what it returns is known.

    Args:
      call, consequence: for the message.
      unless: of the names of the transformations: whether those let out what is made here.
    """
    within = transformations_within(frame)
    if within is not None and not unless(within):
        # `jax.jit` is compiled code: it leaves no frame of Python on the stack, and so no name.
        where = f"`{within[0]}`" if within else "`jax.jit`, or what acts as it"
        raise ValueError(f"{call} was called within a function that jax traces apart ({where}), {consequence}.")


# A stack for each thread, so that threads that run model_fns do not see each other's frames.
class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


@contextlib.contextmanager
def open_frame(frame: Frame) -> Iterator[Frame]:
    """Makes `frame` the current one until the block ends."""
    frame.tracing.trace, frame.tracing.around = current_trace(), on_stack()
    _stack.frames.append(frame)
    # The enclosing runs note it, too: a train_op that is made in a tower belongs to the outer run.
    for each in _stack.frames:
        each.tracing.runs.append(frame.tracing.run)
    try:
        yield frame
    finally:
        popped = _stack.frames.pop()
        if popped is not frame:
            raise RuntimeError("Frames were closed in another order than they were opened.")


# Hooks run between compiled steps, when no model_fn is running; their context has the values.
_IN_A_HOOK = {
    "est.global_step": " In a hook read `context.global_step`.",
    "est.get_variable": " In a hook read `context.state.variables`.",
    "est.read_variable": " In a hook read `context.state.variables`.",
}


def current_frame(caller: str) -> Frame:
    """The frame of the current run; `caller` is named in the error if there is none."""
    if not _stack.frames:
        raise RuntimeError(
            f"`{caller}` must be called inside a model_fn that an Estimator or `est.transform` runs; "
            f"got called outside of one.{_IN_A_HOOK.get(caller, '')}"
        )
    return _stack.frames[-1]


def innermost_frame() -> Frame | None:
    """The frame of the current run, if there is one."""
    return _stack.frames[-1] if _stack.frames else None


def open_frames() -> list[Frame]:
    """The frames of the current run and of those around it, the innermost last."""
    return list(_stack.frames)


def is_visible_to_model_fn() -> bool:
    """Returns whether a value that is computed here, and depends on no argument of a function that is differentiated,
    is known in the model_fn that is running."""
    within = transformations_within(_stack.frames[-1])
    return within is None or differentiates(within)


def average_denominator(denominator: jax.Array) -> jax.Array:
    """The denominator that a mean loss divides by: averaged over towers, where there are towers."""
    frame = innermost_frame()
    if frame is None:
        return denominator
    if not is_visible_to_model_fn():
        # Not noted: in a loop or a branch it is a tracer of that function, which nobody outside can use.
        return frame.replica.average_denominator(denominator, None)
    # Only the value of a noted denominator is used, which needs no gradient.
    frame.denominators.append(jax.lax.stop_gradient(denominator))
    # By its number, a second run finds what all parts of a batch have added up for this loss.
    return frame.replica.average_denominator(denominator, len(frame.denominators) - 1)


class _Store(dict[Hashable, Any]):
    """The objects of `run_store` in one run."""


def run_store(key: Hashable, make: Callable[[], T]) -> T:
    """The object that a library keeps for one run of a model_fn: the first call makes it, later ones return it.

    A model_fn runs many times: in each mode, on each tower, whenever jax traces it. Every run has a store of its own,
    which ends with it; so a counter in it gives the same numbers in all of them; one in a module would not.

    >>> import estimator as est, itertools, jax, jax.numpy as jnp
    >>> def next_weight():
    ...     number = next(est.run_store("my_library.weights", itertools.count))
    ...     return est.get_variable(f"weight_{number}", ())
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=features * next_weight() + next_weight())
    >>> model = est.transform(model_fn)
    >>> list(model.init(jax.random.key(0), jnp.ones(3), mode="infer").variables)
    ['weight_0', 'weight_1']

    Args:
      key: names the library and what it keeps.
      make: a function without arguments.

    Raises:
      TypeError: `make` is not a function.
      RuntimeError: no model_fn is running.
    """
    if not callable(make):
        raise TypeError(f"`est.run_store({key!r})` needs a function that makes what is stored; got {make!r}.")
    store = current_frame("est.run_store").notes.get(_Store)
    if key not in store:
        store[key] = make()
    return store[key]
