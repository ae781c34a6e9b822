"""The context of a run: what its hooks see, and how the loop answers them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from estimator.core._hook import Context
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._train_op import select_rates
from estimator.loop._stopwatch import Stopwatch
from estimator.multihost._preemption import SIGTERM
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.optim._learning_rate import set_rate
from estimator.porting._missing_names import missing_attribute
from estimator.steps._compiled_steps import Carry
from estimator.steps._model_info import ModelInfo
from estimator.storage._files import normalize
from estimator.summary._event_writer import EventWriter
from estimator.summary._trackers import TrackedEvents, Writer, run_of

T = TypeVar("T")

_PARTS = {"input": "input", "compile": "compilation", "checkpoint": "checkpoint", "evaluate": "evaluation"}  # of phases


class Actions(Protocol):
    """The actions of a run for its hooks; documented in `Context`."""

    def state(self) -> State: ...

    def save(self, wait: bool) -> str | None: ...

    def look(self) -> None: ...

    def change(self, change: Callable[[Carry], Carry]) -> None: ...

    def least_step_seconds(self) -> float | None: ...


class ReadOnly:
    """The actions of evaluation and prediction: they show a state, once there is one, and change nothing."""

    def __init__(self, mode: ModeKeys, state: State | None = None) -> None:
        self._mode = mode
        self._state = state

    def state(self) -> State:
        if self._state is None:
            raise RuntimeError("There is no state yet: `context.state` can be read from `after_create_state` on.")
        return self._state

    def save(self, wait: bool) -> str | None:
        raise RuntimeError(f"Only training saves checkpoints; got `context.save()` in mode {str(self._mode)!r}.")

    def look(self) -> None:
        pass  # no losses are pending

    def change(self, change: Callable[[Carry], Carry]) -> None:
        raise RuntimeError(
            "Only training changes variables, from `after_create_state` to the last `after_run`; got a change in "
            f"mode {str(self._mode)!r}."
        )

    def least_step_seconds(self) -> float | None:
        return None


class RunContext:
    """The object that hooks see as `Context`. The loop sets its attributes, and calls what `Context` does not have.

    Args:
      mode: of the run.
      model_dir: where the Estimator saves; None: it has none.
      global_step: the number of training steps done.
      group: the processes that make the same run.
      actions: what the run does for hooks; None: it only shows a state, which is set later.
      verbose: whether it shows progress bars.
      stopwatch: measures the parts of the run.

    Attributes:
      read_on: reads the next batches, if this thread is the one that reads them and that cannot block.
      reads_input: whether the user's input runs in the main thread, so that a stop has to end it there.
      own_seconds: of several processes, the seconds that each has spent on reading its input and on its host; as of a
        chunk or two before.
    """

    def __init__(
        self,
        mode: ModeKeys,
        model_dir: str | None = None,
        global_step: int = 0,
        group: ProcessGroup | None = None,
        actions: Actions | None = None,
        verbose: bool = True,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.mode = mode
        self.verbose = verbose
        self.group = group or SingleProcess()
        self.model_dir = model_dir
        # An evaluation gets its eval_dir from `Runs.evaluate`; a prediction writes no events.
        self.output_dir = model_dir if mode == ModeKeys.TRAIN else None
        self.reported: dict[str, Report] = {}
        self.trainable_variables: tuple[str, ...] = ()
        self.global_step = global_step
        self.batches = 0
        self.examples = 0
        self.clock: tuple[int, float] | None = None
        self.own_seconds: list[tuple[float, float]] = []
        self.stopwatch = stopwatch or Stopwatch()
        self._waited = 0.0  # seconds, before the clock was started
        self._phase = ""
        self.phase = "begin"
        self.error: BaseException | None = None
        self.stop_reason: str | None = None
        self.preempted = False
        self.read_on: Callable[[], None] = lambda: None
        self.reads_input = False
        self.found_nan = False
        self.metrics: dict[str, Any] | None = None
        self.restored = False
        self.scalars: dict[str, np.ndarray] = {}
        self._actions = actions or ReadOnly(mode)
        self._local_stop_reason: str | None = None
        self._watchers: list[Callable[[Context, int, np.ndarray], None]] = []
        self._events: dict[str, Writer] = {}

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, "Context", name)

    def set_model_info(self, info: ModelInfo) -> None:
        """Tells hooks what is known of the model_fn in this mode."""
        self.reported, self.trainable_variables = info.reported, info.trainable

    @property
    def least_step_seconds(self) -> float | None:
        return self._actions.least_step_seconds()

    @property
    def step(self) -> int:
        return self.global_step if self.mode == ModeKeys.TRAIN else self.batches

    @property
    def rates(self) -> dict[str, np.ndarray]:
        return select_rates(self.scalars)

    @property
    def stop_requested(self) -> bool:
        return self.stop_reason is not None

    @property
    def state(self) -> State:
        return self._actions.state()

    def set_readonly_state(self, state: State) -> None:
        """Lets hooks of a run that only reads its state see it."""
        self.global_step = int(state.global_step)
        self._actions = ReadOnly(self.mode, state)

    def save(self, wait: bool = True) -> str | None:
        return self._actions.save(wait)

    def look(self) -> None:
        self._actions.look()

    def change(self, change: Callable[[Carry], Carry]) -> None:
        self._actions.change(change)

    def set_learning_rate(self, name: str, value: float) -> None:
        if self.mode != ModeKeys.TRAIN or self.phase == "end":
            raise RuntimeError(
                f"`context.set_learning_rate({name!r}, {value!r})` is for hooks of a training run, from "
                f"`after_create_state` on and before `end`; got mode {str(self.mode)!r}, phase {self.phase!r}."
            )
        name, value = self.agreed(lambda: (name, value))
        self.change(lambda carry: carry._replace(slots=set_rate("context.set_learning_rate", carry.slots, name, value)))

    def watch_losses(self, watcher: Callable[[Context, int, np.ndarray], None]) -> None:
        self._watchers.append(watcher)

    def notify_loss_watchers(self, step: int, losses: np.ndarray) -> None:
        for watcher in self._watchers:
            watcher(self, step, losses)

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.group.progress.enter(phase)  # a phase that is entered again has all of its time again
        if phase != self._phase:  # the loop sets it around each program, mostly to what it is
            self._phase = phase
            self.stopwatch.switch(_PARTS.get(phase, "host"))

    @property
    def input_wait(self) -> float:
        return self.stopwatch.read()["input"] - self._waited

    def start_clock(self) -> None:
        """Notes that the first program of a training run is done."""
        self.clock = self.global_step, time.monotonic()
        self._waited = self.stopwatch.read()["input"]

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self._phase, phase
        try:
            yield
        finally:
            self.phase = before

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self.in_phase("evaluate")

    def note_restored(self) -> None:
        self.restored = True

    def track(self, config: RunConfig, params: Any) -> None:
        """Opens the trackers of a config, in process 0: from now on they get the events of `output_dir`, too."""
        if config.trackers and config.is_chief:
            directory = normalize(str(self.output_dir))
            run = run_of(config, params, directory, *self._steps_to_write())
            self._events[directory] = TrackedEvents(self.events(), config.trackers, run)

    def events(self, directory: str | None = None) -> Writer:
        chosen = directory or self.output_dir
        assert chosen is not None
        directory = normalize(chosen)
        if directory not in self._events:
            self._events[directory] = EventWriter(directory, *self._steps_to_write())
        return self._events[directory]

    def _steps_to_write(self) -> tuple[int, float]:
        """The first and the last step: from the first on, what a killed run, or an earlier evaluation of this step, has
        written is replaced."""
        return (self.global_step + 1, math.inf) if self.mode == ModeKeys.TRAIN else (self.global_step,) * 2

    def flush(self) -> None:
        for writer in self._events.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._events.values():
            writer.close(self.error)
        self._events.clear()

    def agreed(self, make: Callable[[], T]) -> T:
        return self.group.broadcast_from_chief(make)

    @property
    def local_stop_reason(self) -> str | None:
        """Why this process wants the run to end, which others may not know yet."""
        return SIGTERM if self.preempted else self._local_stop_reason

    def preempt(self) -> None:
        """Notes that SIGTERM came; where there are other processes, all have to stop at the same step."""
        # A signal's handler calls this, maybe in the middle of a round with other processes: it must not begin another.
        self.preempted = True
        if self.group.count == 1:
            self.stop(SIGTERM)

    def request_stop(self, reason: str = "a hook") -> None:
        if self.group.count == 1:
            self.stop(reason)
        self._local_stop_reason = self._local_stop_reason or reason

    def agree_to_stop(self) -> None:
        """Has all processes stop if one of them wants to."""
        reasons = [reason for reason in self.group.all_gather(self._local_stop_reason) if reason is not None]
        if reasons:
            self.stop(reasons[0])

    def stop(self, reason: str) -> None:
        """Ends the run; all processes do so here."""
        self.stop_reason = self.stop_reason or reason

    def count(self, batches: int, rows: int) -> None:
        """Counts batches of `rows` examples each as taken."""
        self.batches += batches
        self.examples += batches * rows
