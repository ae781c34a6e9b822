"""`Hook`: five moments of a run, and the values that a hook sees there."""

from __future__ import annotations

import abc
import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import numpy as np

from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._state import State
from estimator.core._train_op import StepReport
from estimator.core._typing import PyTree
from estimator.porting._missing_names import missing_attribute

T = TypeVar("T")


class Hook:
    """Code that runs around the steps of `train`, `evaluate` or `predict`. Override the methods that you need.

    The methods are called when TensorFlow calls them in a `SessionRunHook`. Between the moments that its hooks ask for,
    a run puts as many steps as it may into one program; so a hook that says by `next_step` when it is wanted costs
    nothing in between. A hook that overrides only `before_run` or `after_run` is called around every step, as in
    TensorFlow.

    Several processes have the same hooks, which are called at the same steps in all: where `next_step` says so in
    process 0. A decision on which collective work or a checkpoint depends is made by `context.agreed`.

    >>> class PrintLoss(Hook):
    ...     def next_step(self, step):
    ...         return step + 10  # not before ten more steps
    ...     def after_run(self, context, values):
    ...         print(context.global_step, values.loss)
    """

    # Whether `before_run` may be called some steps early, so that its step can be the last of a program of several.
    before_run_may_be_early = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "after_create_session"):
            raise TypeError(
                f"{cls.__name__}.after_create_session would never be called: there is no session. "
                "Call it `after_create_state(self, context)`; `context.state` holds the variables."
            )

    def begin(self) -> None:
        """Called first, once in a run, before there is a state."""

    def after_create_state(self, context: Context) -> None:
        """Called when the state was made, or read from a checkpoint, before the first step."""

    def next_step(self, step: int) -> int | None:
        """The next step around which to call `before_run` and `after_run`; None to be asked again.

        Called before each program, up to two programs ahead of what has run: about once a second, and at least every
        100 steps, unless `RunConfig(steps_per_loop=...)` is more. So a hook that goes by the clock returns `step + 1`
        when its time has come, and None until then. It may be called several times with the same step: what it returns
        must not depend on how often.

        Args:
          step: the number of steps that will have run (in `evaluate` and `predict`: of batches).
        """
        ours, base = type(self), Hook
        everywhere = ours.before_run is not base.before_run or ours.after_run is not base.after_run
        return step + 1 if everywhere else None

    def before_run(self, context: Context) -> Any:
        """Called before a step. Returns which values of it `after_run` is to get, or None.

        Values are known by the names under which the model_fn reports them, by `est.summary.*` or `est.record`, and
        "loss". Return a name, or a list or dict of names; `values.results` has the same structure.
        """

    def after_run(self, context: Context, values: RunValues) -> None:
        """Called after a step was started; it waits for the step's end only if it reads a value or the state."""

    def get_state(self) -> Any:
        """Returns what the hook remembers, which `train` saves with each checkpoint; None if nothing.

        Made of dicts with strings as keys, lists, numbers, strings, bytes and None. In `train` a hook that overrides
        this is called before the one that saves, so that the checkpoint of a step knows what the hook made of it.
        """

    def set_state(self, state: Any) -> None:
        """Called between `begin` and `after_create_state` if the checkpoint that training resumes from holds a state
        of the hook: of the first, second ... hook of its class."""

    def end(self, context: Context) -> None:
        """Called last, once in a run, whatever happened: `context.error` tells what went wrong, if anything did."""


def check_methods(kind: type, given: Any, what: str = "hook") -> None:
    """Raises a TypeError if a run could not call a method of a hook, or of another object, as its class `kind` says."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        signature = inspect.signature(method)
        own = getattr(given, name)
        if name.startswith("_") or not callable(own) or getattr(own, "__func__", None) is method:
            continue
        try:
            # Only their number counts, since a run passes the arguments by position.
            inspect.signature(own).bind(*list(signature.parameters)[1:])
        except TypeError as error:
            raise TypeError(
                f"{type(given).__name__}.{name}{inspect.signature(own)} of a {what} cannot be called as a run calls it "
                f"({error}). Write `def {name}({', '.join(signature.parameters)}):`."
            ) from None
        except ValueError:  # it is in compiled code, and has no signature to look at
            continue


class StandIn(Hook):
    """A hook that calls an object that poses as one, such as `mock.Mock(spec=est.Hook)`; called around every step.

    Args:
      posing: has the methods of a hook. What its `before_run` returns is left out where it is not a request.
    """

    def __init__(self, posing: Any) -> None:
        self._posing = posing

    # `next_step` and `get_state` stay Hook's own: a mock returns neither a step nor a state that can be saved.
    def begin(self) -> None:
        self._posing.begin()

    def after_create_state(self, context: Context) -> None:
        self._posing.after_create_state(context)

    def before_run(self, context: Context) -> Any:
        requests = self._posing.before_run(context)
        return requests if isinstance(requests, str | list | tuple | dict) else None

    def after_run(self, context: Context, values: RunValues) -> None:
        self._posing.after_run(context, values)

    def end(self, context: Context) -> None:
        self._posing.end(context)


def as_hooks(hooks: Iterable[Any]) -> tuple[Hook, ...]:
    """Hooks, with a `StandIn` for each that only poses as one."""
    # Not by `isinstance`, which holds for a mock with a spec too: its `__class__` is Hook.
    return tuple(hook if issubclass(type(hook), Hook) else StandIn(hook) for hook in hooks)


class Context(abc.ABC):
    """The view that a hook has of the run, and the means to act on it.

    Attributes:
      mode: one of `est.ModeKeys`.
      model_dir: the directory in which the Estimator saves; None for a run without one.
      output_dir: the directory for event files of the run: the model_dir, or the eval_dir in `evaluate`; None in
        `predict`.
      reported: the values that the model_fn reports in this mode, by name: reports of `jax.ShapeDtypeStruct`s.
      trainable_variables: the names of the variables that optimizers change by default, in the order in which the
        model_fn got them; `state.variables` has the values by name.
      global_step: the number of training steps done.
      batches: the number of batches that this run has taken.
      examples: the number of examples in these batches.
      clock: the step and `time.monotonic()` when the first program of a training run was done, whose compilation is not
        part of a rate; None before.
      phase: the phase of the run: "begin", "input", "compile", "step", "hook", "checkpoint", "evaluate", "output"
        (`predict` waits for its caller) or "end".
      error: in `end`, the exception that ended the run, or None.
      stop_reason: in `end`, why the run ended: "input" (which ended), "steps" (all were done), "error", "closed" (an
        iterator of `predict`), "SIGTERM", "SIGINT" (Ctrl-C), or what was passed to `request_stop`.
      preempted: true after SIGTERM or Ctrl-C: another run is to continue.
      found_nan: true if a loss is known to be NaN; nothing is saved any more.
      metrics: in `end` of an evaluation that succeeded, what `evaluate` returns.
      restored: true if the newest checkpoint holds other values than the state: see `note_restored`.
      report: what the steps say of themselves, with an array of all values in place of each scalar: of the same steps
        as the losses that watchers see, and available as late as these.
    """

    phase: str

    def __init__(self, mode: ModeKeys, model_dir: str | None, global_step: int) -> None:
        self.mode = mode
        self.model_dir = model_dir
        # An evaluation gets its eval_dir from `Runs.evaluate`; a prediction writes no events.
        self.output_dir = model_dir if mode == ModeKeys.TRAIN else None
        self.reported: dict[str, Report] = {}
        self.trainable_variables: tuple[str, ...] = ()
        self.global_step = global_step
        self.batches = 0
        self.examples = 0
        self.clock: tuple[int, float] | None = None
        self.error: BaseException | None = None
        self.stop_reason: str | None = None
        self.preempted = False
        self.found_nan = False
        self.metrics: dict[str, Any] | None = None
        self.restored = False
        self.report = StepReport()
        self._state: State | None = None
        self._watchers: list[Callable[[Context, int, np.ndarray], None]] = []

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, "Context", name)

    @property
    def step(self) -> int:
        """The count for `Hook.next_step`: the global step in `train`, the batches in `evaluate` and `predict`."""
        return self.global_step if self.mode == ModeKeys.TRAIN else self.batches

    @property
    @abc.abstractmethod
    def input_wait(self) -> float:
        """The seconds since `clock` in which this process and its devices waited for training input."""

    @property
    def least_step_seconds(self) -> float | None:
        """The seconds that the FLOPs of a training step take at the peak of its devices; None if that is not known, as
        on CPUs."""
        return None

    @property
    def stop_requested(self) -> bool:
        """True if someone wants the run to end."""
        return self.stop_reason is not None

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """All values in `report` that the log and summaries show beside the loss, by tag."""
        return self.report.scalars()

    @property
    def state(self) -> State:
        """The `est.State` after the steps so far, on its devices: good until the moment is over; copy what you keep.

        Reading it waits for the steps, and looks at their losses: one that is NaN is raised here.
        """
        if self._state is None:
            raise RuntimeError("There is no state yet: `context.state` can be read from `after_create_state` on.")
        return self._state

    def save(self, wait: bool = True) -> str | None:
        """Saves a checkpoint now, unless this step has one, or a loss was NaN; returns the path of the newest
        one, or None.

        Args:
          wait: whether to return when it is on disk. Otherwise, with `RunConfig(save_checkpoints_async=True)`, it may
            appear there later; the next save, the end of the run and `latest_checkpoint` wait for it.
        """
        raise RuntimeError(f"Only training saves checkpoints; got `context.save()` in mode {str(self.mode)!r}.")

    def change(self, change: Callable[[Any], Any]) -> None:
        """Replaces the training carry (variables, slots and global step) by `change(carry)`."""
        raise RuntimeError(
            "Only training changes variables, from `after_create_state` to the last `after_run`; got a change in "
            f"mode {str(self.mode)!r}."
        )

    @abc.abstractmethod
    def set_learning_rate(self, name: str, value: float) -> None:
        """Sets a learning rate from the next step on, as `est.set_learning_rate` does with a state; nothing waits.

        All processes call it; the value of process 0 counts. The checkpoint of the step has the rate if the
        hook is called before the one that saves: if it overrides `get_state`.
        """

    def watch_losses(self, watcher: Callable[[Context, int, np.ndarray], None]) -> None:
        """Lets a hook see the losses of all steps without waiting: once they are known, at most some 100 steps later.

        Args:
          watcher: called as `watcher(context, step, losses)` with the losses of some steps in order, the first of them
            `step`.
        """
        self._watchers.append(watcher)

    @abc.abstractmethod
    def look(self) -> None:
        """Waits for the steps so far, and lets watchers see their losses. One that is NaN is raised."""

    @abc.abstractmethod
    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Says in `phase` that the run evaluates within the block."""

    def note_restored(self) -> None:
        """Records that a hook gave the newest checkpoint values that differ from the state."""
        self.restored = True

    @abc.abstractmethod
    def events(self, directory: str | None = None) -> Events:
        """The writer of event files for a directory (`output_dir`): one for all hooks; closed after their `end`."""

    @abc.abstractmethod
    def agreed(self, make: Callable[[], T]) -> T:
        """Returns in all processes what `make` returns in process 0: for decisions that depend on a clock or a disk,
        and on which programs or checkpoints depend. All processes call it; only process 0 calls `make`."""

    @abc.abstractmethod
    def request_stop(self, reason: str = "a hook") -> None:
        """Ends the run after the current moment, as if its input had ended; of several processes, all."""


class Events(Protocol):
    """A writer of event files."""

    def write(self, step: int, walltime: float, values: Mapping[str, Any]) -> None:
        """Writes values by tag."""


class RunValues:
    """The values of one step (or batch), fetched from the devices when they are read."""

    def __init__(
        self,
        losses: Any,
        steps: int,
        reported: dict[str, Any],
        requested: Any,
        report: StepReport | None = None,
        declared: Iterable[str] = (),
    ) -> None:
        self._losses = losses  # of a program: an array of at least `steps` steps, or of a single one
        self._steps = steps
        self._reported = reported
        self._requested = requested
        self._report = report or StepReport()
        for name in () if requested is None else jax.tree.leaves(requested):
            # A model_fn may leave out what it reported at first: of a gradient that turned out to be None.
            known = ["loss"] * (losses is not None) + sorted({*reported, *declared})
            if name not in known:
                raise ValueError(
                    f"A hook requests the value {name!r}, but the model_fn reports only {known}. {_advice(name, known)}"
                )

    @property
    def loss(self) -> float | None:
        """The loss; None in `predict`."""
        return None if self._losses is None else self._last(self._losses)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rates of the step, by the names of `est.learning_rates` and `Context.set_learning_rate`."""
        return {name: self._last(of_steps) for name, of_steps in self._report.learning_rates.items()}

    @property
    def scalars(self) -> dict[str, float]:
        """The values of the step that the log and summaries show beside the loss, by tag."""
        return {tag: self._last(of_steps) for tag, of_steps in self._report.scalars().items()}

    def _last(self, of_steps: Any) -> float:
        return float(np.asarray(of_steps).item(self._steps - 1))

    @property
    def results(self) -> PyTree:
        """The values that `before_run` requested, as Python and numpy values in the same structure; None for one that
        the step did not report, but the model_fn did when the state was initialized."""
        reports = jax.device_get(
            {n: self._reported[n] for n in jax.tree.leaves(self._requested) if n in self._reported}
        )
        values = {name: report.as_value() for name, report in reports.items()}
        return jax.tree.map(lambda name: self.loss if name == "loss" else values.get(name), self._requested)


def _advice(name: Any, known: list[str]) -> str:
    """Advice for a name that is not reported, as it may come from a TensorFlow program."""
    plain = str(name).removesuffix(":0")
    if plain in known:
        return f"Write {plain!r}: names have no output's number here."
    if plain == "global_step":
        return (
            "A hook reads it as `context.global_step`; for one like LoggingTensorHook write "
            "`est.record('global_step', est.global_step())` in the model_fn."
        )
    return (
        f"Write `est.record({plain!r}, value)` in the model_fn, and request {plain!r}; a variable's value is in "
        "`context.state.variables`."
    )
