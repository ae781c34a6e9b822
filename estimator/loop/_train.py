"""The training loop: programs in flight, and hooks around compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import logging

from estimator.checkpoint._checkpoints import Checkpoints
from estimator.checkpoint._model_dir import check_places
from estimator.core._batch import rows_of
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.hooks._checkpoint_saver import CheckpointSaverHook
from estimator.inputs._input_fn import Batches
from estimator.loop import _hook_calls, _steps_per_loop
from estimator.loop._context import RunContext
from estimator.loop._loss_reader import LossReader
from estimator.loop._plan import Chunk, Plan
from estimator.loop._programs import InFlight, Pair, ProgramCall, Programs, StepOutputs
from estimator.loop._read_ahead import read_ahead, shows_bars
from estimator.loop._saver import Saver
from estimator.loop._stopwatch import Stopwatch
from estimator.loop._training_log import TrainingLog
from estimator.multihost._process_group import ProcessGroup
from estimator.steps._step_loops import Carry, carry_of, state_of

NO_STEPS = (
    "Training with estimator made no steps. Perhaps input is empty or misspecified. An iterator that is made outside "
    "of input_fn is used up by the first call that reads it: make it within."
)
_NO_SAVES = "since save_checkpoints_steps and save_checkpoints_secs of its RunConfig are both None"


class Training(RunContext):
    """One call of `Estimator.train`, and the context of its hooks.

    Args:
      programs: the compiled programs.
      config: how often to log, and how many steps go into one program.
      checkpoints: where to save.
      group: the processes that train.
      state: where to start; nobody else uses it any more.
      hooks: in the order in which they are called.
      last_step: where to stop; if None, where the input ends.
      saved_path: the checkpoint that the state was read from, if it was.
      skipped_batches: the number of batches of the input that earlier runs have taken.
      stopwatch: measures the parts of the run.

    Attributes:
      saver: saves the state.
    """

    def __init__(
        self,
        programs: Programs,
        config: RunConfig,
        checkpoints: Checkpoints,
        group: ProcessGroup,
        state: State,
        hooks: Sequence[Hook],
        last_step: int | None,
        saved_path: str | None,
        skipped_batches: int,
        stopwatch: Stopwatch,
    ) -> None:
        start = int(state.global_step)
        super().__init__(ModeKeys.TRAIN, config.model_dir, start, group, config.verbose, stopwatch)
        self.set_model_info(programs.info)
        self._programs = programs
        self._config = config
        self.hooks = hooks
        self._last_step = last_step
        self.saver = Saver(checkpoints, config, hooks, self, saved_path, skipped_batches)
        guard = programs.info.guard
        watch = None if guard is None else guard.watch(state)
        if watch is not None:
            state = watch.state
        self._carry = carry_of(state)
        self._key_data = jax.random.key_data(state.key)
        programs.note_start(self._carry, self._key_data)
        self._in_flight = InFlight()
        self._log = TrainingLog(config.log_step_count_steps, self, last_step, shows_bars(self))
        self._losses = LossReader(programs, watch, hooks, self, self._log, self.saver.describe_newest)
        self._changed_at = -1  # the last step whose state was changed when it was saved already

    def run(self, batches: Batches) -> State:
        """Trains until the last step, the end of the input, or a hook wants it to end. Hooks have begun already.

        Raises:
          NanLossDuringTrainingError: the loss became NaN. Nothing of that is saved.
          RuntimeError: of the model_fn's guard, for a step that was not made. Nothing of that is saved.
          CheckpointWriteError: a checkpoint could not be written.
        """
        with self.saver.finish_last():
            return self._run(batches)

    def _run(self, batches: Batches) -> State:
        # Before a thread reads ahead: the checkpoint that a hook saves before the first step has this position.
        self.saver.position = batches.get_state()
        check_places(str(self._config.model_dir), self.global_step, self._last_step)
        _hook_calls.create_state(self.hooks, self)
        self.saver.begin(self._last_step)
        look_every = _steps_per_loop.steps_between_looks(self._config.log_step_count_steps)
        size = _steps_per_loop.choose(self._config.steps_per_loop, self._programs, self.hooks, self, look_every)
        with self._log:
            # The order for each program: before_run, the program, the losses of earlier programs, after_run. Hooks are
            # only due at the end of a program.
            for i, (run, due, position, look_every) in enumerate(self._runs(batches, size)):
                requests = _hook_calls.before(due, self)
                outputs, reported = self._start(run, requests)
                self.saver.position = position
                if self.global_step - run.steps - self._losses.step >= look_every:
                    self._losses.read(self._carry, but=1)  # the devices have something to do meanwhile
                    if self.found_nan:  # in all processes, which read the same losses or have agreed to stop
                        self.stop("NaN loss")
                    size.measure(self._losses.step)
                _hook_calls.after(due, self, requests, outputs.losses, run.steps, reported, outputs.report)
                if i == 0:
                    self.saver.start()
            # Before hooks end: a NaN in the last steps is found here, and nothing of it is saved in an `end`.
            self.look()
        if self._changed_at == self.global_step:
            self.note_restored()  # the state in memory is not the one that was saved for this step
        if self._log.last_loss is not None:
            self._log.say_final_loss()
        elif self.stop_reason == "input":
            logging.warning(NO_STEPS)
        return state_of(self._carry, self._key_data)

    def _runs(
        self, batches: Batches, size: _steps_per_loop.LoopSize
    ) -> Iterator[tuple[ProgramCall, Sequence[Hook], Any, int]]:
        """The programs to run, each with the hooks to call around it, the position in the input after it, which is
        known after the last one of a chunk, and the number of steps after which to look at losses; their input is made
        ready by a thread."""
        plan = Plan(self.hooks, self.global_step, self._last_step, size.bounds)

        def make(pairs: list[Pair], chunk: Chunk) -> list[ProgramCall]:
            return self._programs.runs(pairs, chunk.room, chunk.alone, chunk.reports)

        for ready, chunk in read_ahead(batches, plan, self, make, _steps_per_loop.SECONDS_OF_A_CHUNK):
            for run in ready.batches[:-1]:
                yield run, (), self.saver.position, chunk.look_every
            yield ready.batches[-1], chunk.due, ready.position, chunk.look_every

    def _start(self, run: ProgramCall, requests: Sequence[PyTree]) -> tuple[StepOutputs, dict[str, Report]]:
        """Starts a program. Waits for the last but two, but not for this one."""
        program = run.program
        if run.reporting is not None and _hook_calls.requests_values(requests, self):
            program = run.reporting
        number = self.saver.batches + 1  # of the program's first batch in the input
        # What watches the run reports its phase, and ends it.
        self.phase = "compile" if program.is_new() else "step"
        # The old carry is donated, and cannot be used after this, even if the program fails.
        self._carry, outputs, reported = self._programs.guard(
            number, run.pairs[0], program, self._carry, self._key_data, *run.args
        )
        self.stopwatch.switch("device")
        self._in_flight.add(outputs.losses)
        self.stopwatch.switch("host")
        self.global_step += run.steps
        self.count(run.steps, rows_of(*run.pairs[0]) * self.group.count)
        self._log.advance(run.steps)
        self._losses.add(outputs, run.pairs)
        if self.phase == "compile":  # the first program has run
            self.phase = "step"
        return outputs, reported

    def devices_are_busy(self) -> bool:
        return self._in_flight.is_busy()

    @property
    def ends_at_interrupt(self) -> bool:
        """Whether a Ctrl-C would lose nothing: neither steps, nor one that devices make, nor a checkpoint."""
        return super().ends_at_interrupt and self.phase == "compile" and not self.saver.unsaved_steps

    def announce_interrupt(self) -> None:
        saves = f"saves a checkpoint in {self.model_dir}, from which the next call continues"
        if not any(isinstance(hook, CheckpointSaverHook) for hook in self.hooks):
            saves = f"saves nothing, {_NO_SAVES}"
        logging.warning(
            "Ctrl-C: `train` ends after the steps that have begun, and %s. A second Ctrl-C ends it at once, and what "
            "came after step %d is lost.",
            saves,
            self.saver.newest_step,
        )

    def describe_end(self) -> str:
        """A sentence about what a run that was asked to end has left."""
        if self.saver.unsaved_steps or self.saver.path is None:
            left = f"What came after step {self.saver.newest_step} is not saved, {_NO_SAVES}."
        else:
            left = f"It is saved as {self.saver.path}: call `train` again to continue."
        return f"Training ended after step {self.global_step}. {left}"

    def look(self) -> None:
        self._losses.read(self._carry)

    @property
    def least_step_seconds(self) -> float | None:
        return self._programs.least_step_seconds

    def change(self, change: Callable[[Carry], Carry]) -> None:
        self._carry = change(self._carry)
        if self.saver.step == self.global_step:
            self._changed_at = self.saver.step

    @property
    def state(self) -> State:
        self.look()
        return state_of(self._carry, self._key_data)

    def save(self, wait: bool = True) -> str | None:
        return self.saver.save(self.state, wait, skip=self._losses.ended_by_nan)
