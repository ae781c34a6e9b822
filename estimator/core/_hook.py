"""What a hook is: five moments of a run, and what it sees there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._typing import PyTree
from estimator.multihost._process_group import Team
from estimator.optim._learning_rate import with_rate
from estimator.summary._event_writer import EventWriter

SIGTERM = "SIGTERM"  # as a reason to stop


class Hook:
    """Something that happens around the steps of `train`, `evaluate` or `predict`. Override what you need.

    The moments are those of TensorFlow's `SessionRunHook`. Between the moments that its hooks ask for, a run puts as
    many steps as it may into one program; so a hook that says by `next_step` when it is wanted costs nothing in
    between. One that overrides `before_run` or `after_run` alone is called around every step, as in TensorFlow.

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
        """The next step around which to call `before_run` and `after_run`; None: not now, ask again.

        Asked before each program, up to two programs ahead of what has run; at least every 100 steps. So a hook that
        goes by the clock returns `step + 1` when its time has come, and None until then. The same step may be asked
        about again: what is returned must not depend on how often that was.

        Args:
          step: so many steps will have run (in `evaluate` and `predict`: so many batches).
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
        """What the hook remembers, to be saved with each checkpoint of a training; None: nothing.

        Made of dicts with strings as keys, lists, numbers, strings, bytes and None. In `train` a hook that overrides
        this is called before the one that saves, so that the checkpoint of a step knows what the hook made of it.
        """

    def set_state(self, state: Any) -> None:
        """Called between `begin` and `after_create_state` where the checkpoint that training goes on from holds a
        state of the hook: of the first, second ... hook of its class."""

    def end(self, context: Context) -> None:
        """Called last, once in a run, whatever happened: `context.error` tells what went wrong, if anything did."""


class Context:
    """What a hook may know of the run, and do to it.

    Attributes:
      mode: of `est.ModeKeys`.
      model_dir: where the Estimator saves; None for a run without one.
      output_dir: where event files of the run go: the model_dir, in `evaluate` the eval_dir; None in `predict`.
      reported: what the model_fn reports in this mode, by name: reports of `jax.ShapeDtypeStruct`s.
      global_step: the number of training steps done.
      batches: the number of batches that this run has taken.
      examples: the number of examples in them.
      clock: the step and `time.monotonic()` when the first program of a training was done, whose compilation is no part
        of a rate; None before.
      phase: what the run is doing: "begin", "input", "compile", "step", "checkpoint", "evaluate", "output" (`predict`
        waits until it is asked for more) or "end".
      error: in `end`: the exception that ended the run, or None.
      stop_reason: in `end`: why the run ended: "input" (which ended), "steps" (all were done), "error", "closed" (an
        iterator of `predict`), or what `request_stop` was told.
      preempted: whether SIGTERM came: the process ends with the run.
      found_nan: whether a loss is known to be NaN; nothing is saved any more.
      metrics: in `end` of an evaluation that succeeded: what `evaluate` returns.
      team: the other processes that make the same run; None: there are none.
      restored: whether a hook gave the newest checkpoint other values than those of the state.
      rates: what watchers of losses see beside these, known as late: the learning rates of the same steps, of
        optimizers under `optax.inject_hyperparams`; by tag, "learning_rate" or, of several, "learning_rate/<name>".
    """

    def __init__(
        self, mode: ModeKeys, model_dir: str | None = None, global_step: int = 0, team: Team | None = None
    ) -> None:
        self.mode = mode
        self.team = team
        self.model_dir = model_dir
        self.output_dir = model_dir if mode == ModeKeys.TRAIN else None
        self.reported: dict[str, Report] = {}
        self.global_step = global_step
        self.batches = 0
        self.examples = 0
        self.clock: tuple[int, float] | None = None
        self.phase = "begin"
        self.error: BaseException | None = None
        self.stop_reason: str | None = None
        self.preempted = False
        self.found_nan = False
        self.metrics: dict[str, Any] | None = None
        self.restored = False
        self._wished: str | None = None
        self.rates: dict[str, np.ndarray] = {}
        self._state: Callable[[], Any] | None = None
        self._save: Callable[[], str | None] | None = None
        self._look: Callable[[], None] | None = None
        self._change: Callable[[Callable[[Any], Any]], None] | None = None
        self._watchers: list[Callable[[Context, int, np.ndarray], None]] = []
        self._events: dict[str, EventWriter] = {}

    @property
    def step(self) -> int:
        """What `Hook.next_step` counts: the global step in `train`, the batches in `evaluate` and `predict`."""
        return self.global_step if self.mode == ModeKeys.TRAIN else self.batches

    @property
    def state(self) -> Any:
        """The `est.State` after the steps so far, on its devices: good until the moment is over; copy what you keep.

        Reading it waits for the steps, and looks at their losses: one that is NaN is raised here.
        """
        if self._state is None:
            raise RuntimeError("There is no state yet: `context.state` can be read from `after_create_state` on.")
        return self._state()

    def has_state(self, state: Any) -> None:
        """Lets hooks of a run that only reads its state see it."""
        self.global_step = int(state.global_step)
        self._state = lambda: state

    def save(self) -> str | None:
        """Saves a checkpoint now, unless that of this step is there; returns its path (None: saving is off)."""
        if self._save is None:
            raise RuntimeError(f"Only training saves checkpoints; got `context.save()` in mode {str(self.mode)!r}.")
        return self._save()

    def change(self, change: Callable[[Any], Any]) -> None:
        """Lets a function make of the variables, slots and global step those that training goes on with."""
        if self._change is None:
            raise RuntimeError(
                "Only training changes variables, from `after_create_state` to the last `after_run`; got a change in "
                f"mode {str(self.mode)!r}."
            )
        self._change(change)

    def set_learning_rate(self, name: str, value: float) -> None:
        """Sets a learning rate from the next step on, as `est.set_learning_rate` does with a state; nothing waits.

        Of several processes all call it; what process 0 gives counts. The checkpoint of the step has the rate if the
        hook is called before the one that saves: if it overrides `get_state`.
        """
        if self._change is None or self.phase == "end":
            raise RuntimeError(
                f"`context.set_learning_rate({name!r}, {value!r})` is for hooks of a training, from "
                f"`after_create_state` on and before `end`; got mode {str(self.mode)!r}, phase {self.phase!r}."
            )
        name, value = self.agreed(lambda: (name, value))
        self.change(
            lambda carry: carry._replace(slots=with_rate("context.set_learning_rate", carry.slots, name, value))
        )

    def watch_losses(self, watcher: Callable[[Context, int, np.ndarray], None]) -> None:
        """Lets a hook see the losses of all steps without waiting: once they are known, at most some 100 steps later.

        Args:
          watcher: called as `watcher(context, step, losses)`: those of some steps in order, the first of them `step`.
        """
        self._watchers.append(watcher)

    def saw_losses(self, step: int, losses: np.ndarray) -> None:
        for watcher in self._watchers:
            watcher(self, step, losses)

    def look(self) -> None:
        """Waits for the steps so far, and lets watchers see their losses. One that is NaN is raised."""
        if self._look is not None:
            self._look()

    def events(self, directory: str | None = None) -> EventWriter:
        """What writes event files into a directory (`output_dir`): one for all hooks; closed after their `end`."""
        chosen = directory or self.output_dir
        assert chosen is not None
        directory = os.path.normpath(chosen)
        if directory not in self._events:
            first, last = (self.global_step + 1, math.inf) if self.mode == ModeKeys.TRAIN else (self.global_step,) * 2
            self._events[directory] = EventWriter(directory, first, last)
        return self._events[directory]

    def flush(self) -> None:
        for writer in self._events.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._events.values():
            writer.close()
        self._events.clear()

    @property
    def wished(self) -> str | None:
        """Why this process wants the run to end, of which others may not know yet."""
        return SIGTERM if self.preempted else self._wished

    @property
    def stop_requested(self) -> bool:
        """Whether someone wants the run to end."""
        return self.stop_reason is not None

    def preempt(self) -> None:
        """Notes that SIGTERM came; where there are other processes, all have to stop at the same step."""
        self.preempted = True
        if self.team is None:
            self.stop(SIGTERM)

    def agreed(self, make: Callable[[], Any]) -> Any:
        """What process 0 makes, in all processes: for decisions that depend on a clock or a disk, and on which programs
        or checkpoints depend. To be called by all of them; `make` is called in process 0 alone."""
        return make() if self.team is None else self.team.from_chief(make)

    def agree_to_stop(self) -> None:
        """Has all processes stop if one of them wants to."""
        if self.team is not None:
            reasons = [reason for reason in self.team.exchange(self._wished) if reason is not None]
            if reasons:
                self.stop(reasons[0])

    def count(self, batches: int, rows: int) -> None:
        """Adds batches of so many examples to what was taken."""
        self.batches += batches
        self.examples += batches * rows

    def request_stop(self, reason: str = "a hook") -> None:
        """Ends the run after the moment that is going on, as if its input had ended; of several processes, all."""
        if self.team is None:
            self.stop(reason)
        self._wished = self._wished or reason

    def stop(self, reason: str) -> None:
        """Does what `request_stop` asks for, where all processes do so."""
        self.stop_reason = self.stop_reason or reason


class RunValues:
    """What came out of one step (or batch); fetched from the devices when it is read."""

    def __init__(
        self, losses: Any, steps: int, reported: dict[str, Any], asked: Any, rates: dict[str, Any] | None = None
    ) -> None:
        self._losses = losses  # of a program: an array of at least so many steps, or that of a single one
        self._steps = steps
        self._reported = reported
        self._asked = asked
        self._rates = rates or {}
        known = ["loss"] * (losses is not None) + sorted(reported)
        for name in jax.tree.leaves(asked):
            if name not in known:
                raise ValueError(
                    f"A hook asked for the value {name!r}, but the model_fn reports only {known}. "
                    f"Write `est.record({name!r}, value)` in the model_fn."
                )

    @property
    def loss(self) -> float | None:
        """The loss; None in `predict`."""
        return None if self._losses is None else self._last(self._losses)

    @property
    def learning_rates(self) -> dict[str, float]:
        """Those of optimizers under `optax.inject_hyperparams` that the step was made with, by tag; see
        `Context.rates`."""
        return {tag: self._last(rates) for tag, rates in self._rates.items()}

    def _last(self, of_steps: Any) -> float:
        return float(np.asarray(of_steps).reshape(-1)[self._steps - 1])

    @property
    def results(self) -> PyTree:
        """The values that `before_run` asked for, as Python and numpy values in the same structure."""
        names = {name for name in jax.tree.leaves(self._asked) if name != "loss"}
        found = jax.device_get({name: self._reported[name] for name in names})
        return jax.tree.map(lambda name: self.loss if name == "loss" else found[name].as_value(), self._asked)
