"""The context of a run: what its hooks see, and how the loop answers them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from estimator.core._hook import Context
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.multihost._preemption import SIGTERM
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.optim._learning_rate import with_rate
from estimator.summary._event_writer import EventWriter


class RunContext(Context):
    """The context that the loop makes: what hooks see, and what the loop itself sets and calls."""

    def __init__(
        self,
        mode: ModeKeys,
        model_dir: str | None = None,
        global_step: int = 0,
        group: ProcessGroup | None = None,
    ) -> None:
        self.mode = mode
        self.group = group or SingleProcess()
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
        self._local_stop_reason: str | None = None
        self.rates: dict[str, np.ndarray] = {}
        self._state: Callable[[], Any] | None = None
        self._save: Callable[[], str | None] | None = None
        self._look: Callable[[], None] | None = None
        self._change: Callable[[Callable[[Any], Any]], None] | None = None
        self._watchers: list[Callable[[Context, int, np.ndarray], None]] = []
        self._events: dict[str, EventWriter] = {}

    @property
    def state(self) -> Any:
        if self._state is None:
            raise RuntimeError("There is no state yet: `context.state` can be read from `after_create_state` on.")
        return self._state()

    def has_state(self, state: Any) -> None:
        """Lets hooks of a run that only reads its state see it."""
        self.global_step = int(state.global_step)
        self._state = lambda: state

    def save(self) -> str | None:
        if self._save is None:
            raise RuntimeError(f"Only training saves checkpoints; got `context.save()` in mode {str(self.mode)!r}.")
        return self._save()

    def change(self, change: Callable[[Any], Any]) -> None:
        if self._change is None:
            raise RuntimeError(
                "Only training changes variables, from `after_create_state` to the last `after_run`; got a change in "
                f"mode {str(self.mode)!r}."
            )
        self._change(change)

    def set_learning_rate(self, name: str, value: float) -> None:
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
        self._watchers.append(watcher)

    def saw_losses(self, step: int, losses: np.ndarray) -> None:
        for watcher in self._watchers:
            watcher(self, step, losses)

    def look(self) -> None:
        if self._look is not None:
            self._look()

    def events(self, directory: str | None = None) -> EventWriter:
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
    def local_stop_reason(self) -> str | None:
        """Why this process wants the run to end, which others may not know yet."""
        return SIGTERM if self.preempted else self._local_stop_reason

    def preempt(self) -> None:
        """Notes that SIGTERM came; where there are other processes, all have to stop at the same step."""
        self.preempted = True
        if self.group.count == 1:
            self.stop(SIGTERM)

    def agreed(self, make: Callable[[], Any]) -> Any:
        return self.group.broadcast_from_chief(make)

    def agree_to_stop(self) -> None:
        """Has all processes stop if one of them wants to."""
        reasons = [reason for reason in self.group.all_gather(self._local_stop_reason) if reason is not None]
        if reasons:
            self.stop(reasons[0])

    def count(self, batches: int, rows: int) -> None:
        """Adds batches of so many examples to what was taken."""
        self.batches += batches
        self.examples += batches * rows

    def request_stop(self, reason: str = "a hook") -> None:
        if self.group.count == 1:
            self.stop(reason)
        self._local_stop_reason = self._local_stop_reason or reason

    def stop(self, reason: str) -> None:
        """Does what `request_stop` asks for, where all processes do so."""
        self.stop_reason = self.stop_reason or reason
