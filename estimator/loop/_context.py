"""The context of a run: what its hooks see, and how the loop answers them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from estimator.core._hook import Context
from estimator.core._mode_keys import ModeKeys
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.loop._stopwatch import Stopwatch
from estimator.multihost._preemption import Preempted
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.optim._learning_rate import set_rate
from estimator.steps._model_info import ModelInfo
from estimator.storage._files import normalize
from estimator.summary._event_writer import EventWriter
from estimator.summary._trackers import TrackedEvents, Writer, run_of

T = TypeVar("T")

_PARTS = {"input": "input", "compile": "compilation", "checkpoint": "checkpoint", "evaluate": "evaluation"}  # of phases


class RunContext(Context):
    """A `Context` as the loop sees it, which sets its attributes and calls what hooks do not.

    Args:
      mode: of the run.
      model_dir: where the Estimator saves, or None.
      global_step: the number of training steps done.
      group: the processes that make the same run.
      verbose: whether it shows progress bars.
      stopwatch: measures the parts of the run.

    Attributes:
      reads_input: whether the user's input runs in the main thread, so that a stop has to end it there.
      towers: the number of towers in all processes.
      signal: the name of the signal by which the run was `preempted`.
      ends_at_once: whether a second Ctrl-C ends the run at once.
      own_seconds: of several processes, the seconds that each has spent on reading its input and on its host; as of a
        chunk or two before.
    """

    def __init__(
        self,
        mode: ModeKeys,
        model_dir: str | None = None,
        global_step: int = 0,
        group: ProcessGroup | None = None,
        verbose: bool = True,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        super().__init__(mode, model_dir, global_step)
        self.verbose = verbose
        self.group = group or SingleProcess()
        self.towers = 1
        self.own_seconds: list[tuple[float, float]] = []
        self.stopwatch = stopwatch or Stopwatch()
        self._waited = 0.0  # seconds, before the clock was started
        self._phase = ""
        self.phase = "begin"
        self.reads_input = False
        self.signal: str | None = None
        self.ends_at_once = False
        self._local_stop_reason: str | None = None
        self._events: dict[str, Writer] = {}

    def set_model_info(self, info: ModelInfo) -> None:
        """Tells hooks what is known of the model_fn in this mode."""
        self.reported, self.trainable_variables = info.reported, info.trainable
        self.towers = info.placement.towers

    def set_readonly_state(self, state: State) -> None:
        """Lets hooks of a run that only reads its state see it."""
        self.global_step = int(state.global_step)
        self._state = state

    def look(self) -> None:
        """Waits for nothing: only training has losses that are pending."""

    def devices_are_busy(self) -> bool:
        """Returns whether devices still work on steps that were started; only training starts them ahead."""
        return False

    def set_learning_rate(self, name: str, value: float) -> None:
        if self.mode != ModeKeys.TRAIN or self.phase == "end":
            raise RuntimeError(
                f"`context.set_learning_rate({name!r}, {value!r})` is for hooks of a training run, from "
                f"`after_create_state` on and before `end`; got mode {str(self.mode)!r}, phase {self.phase!r}."
            )
        name, value = self.agreed(lambda: (name, value))
        self.change(lambda carry: carry._replace(slots=set_rate("context.set_learning_rate", carry.slots, name, value)))

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
        """Records that the first program of a training run is done."""
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
        return self.signal or self._local_stop_reason

    def preempt(self, reason: str) -> None:
        """Records that a signal came; where there are other processes, all have to stop at the same step."""
        # A signal's handler calls this, maybe in the middle of a round with other processes: it must not begin another.
        self.preempted, self.signal = True, reason
        if self.group.count == 1:
            self.stop(reason)

    def end_at_once(self) -> None:
        """Records that the run ends at once, by a second Ctrl-C."""
        self.ends_at_once = True

    @property
    def ends_at_interrupt(self) -> bool:
        """Whether Ctrl-C ends the run at once. Other processes, where there are any, would wait for this one."""
        return self.group.count == 1

    def announce_interrupt(self) -> None:
        """Logs what a Ctrl-C does that does not end the run at once; only training saves something."""

    def is_asked_by(self, error: BaseException) -> bool:
        """Returns whether an error within the run says only what the run knows: that a signal asks it to end."""
        return self.preempted and not self.ends_at_once and isinstance(error, Preempted | KeyboardInterrupt)

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
