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
from estimator.runtime._huge_pages import advise_huge_pages
from estimator.steps._compiled_steps import Carry, carry_of, state_of


class Training:
    """One call of `Estimator.train`. Hooks act on it through its `context`.

    Args:
      programs: the compiled programs.
      config: how often to log, and how many steps go into one program.
      checkpoints: where to save.
      group: the processes that train.
      state: where to start; nobody else uses it any more.
      hooks: in the order in which they are called.
      last_step: where to stop; None: where the input ends.
      saved_path: the checkpoint that the state was read from, if it was.
      skipped_batches: the number of batches of the input that earlier runs have taken.
      stopwatch: measures the parts of the run.

    Attributes:
      context: what hooks see.
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
        self.programs = programs
        self.config = config
        self.hooks = hooks
        self.last_step = last_step
        start = int(state.global_step)
        self.context = RunContext(ModeKeys.TRAIN, config.model_dir, start, group, self, config.verbose, stopwatch)
        self.context.set_model_info(programs.info)
        self.saver = Saver(checkpoints, config, hooks, self.context, saved_path, skipped_batches)
        guard = programs.info.guard
        watch = None if guard is None else guard.watch(state)
        if watch is not None:
            state = watch.state
        advise_huge_pages(jax.tree.leaves(state.variables))
        self._carry = carry_of(state)
        self._key_data = jax.random.key_data(state.key)
        programs.note_start(self._carry, self._key_data)
        self._in_flight = InFlight()
        self._log = TrainingLog(config.log_step_count_steps, self.context, last_step, shows_bars(self.context))
        self._losses = LossReader(programs, watch, hooks, self.context, self._log, self.saver.describe_newest)
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
        context = self.context
        # Before a thread reads ahead: the checkpoint that a hook saves before the first step has this position.
        self.saver.position = batches.get_state()
        check_places(str(self.config.model_dir), context.global_step, self.last_step)
        _hook_calls.create_state(self.hooks, context)
        self.saver.begin(self.last_step)
        look_every = _steps_per_loop.steps_between_looks(self.config.log_step_count_steps)
        size = _steps_per_loop.choose(self.config.steps_per_loop, self.programs, self.hooks, context, look_every)
        with self._log:
            # The order for each program: before_run, the program, the losses of earlier programs, after_run. Hooks are
            # only due at the end of a program.
            for i, (run, due, position) in enumerate(self._runs(batches, size)):
                requests = _hook_calls.before(due, context)
                outputs, reported = self._start(run, requests)
                self.saver.position = position
                if context.global_step - run.steps - self._losses.step >= look_every:
                    self._losses.read(self._carry, but=1)  # the devices have something to do meanwhile
                    if context.found_nan:  # in all processes, which read the same losses or have agreed to stop
                        context.stop("NaN loss")
                    size.measure(self._losses.step)
                _hook_calls.after(due, context, requests, outputs.losses, run.steps, reported, outputs.scalars)
                if i == 0:
                    self.saver.start()
            # Before hooks end: a NaN in the last steps is found here, and nothing of it is saved in an `end`.
            self.look()
        if self._changed_at == context.global_step:
            context.note_restored()  # the state in memory is not the one that was saved for this step
        if self._log.last_loss is not None:
            logging.info("Loss for final step: %.6g.", self._log.last_loss)
        elif context.stop_reason == "input":
            logging.warning("Training with estimator made no steps. Perhaps input is empty or misspecified.")
        return state_of(self._carry, self._key_data)

    def _runs(
        self, batches: Batches, size: _steps_per_loop.LoopSize
    ) -> Iterator[tuple[ProgramCall, Sequence[Hook], Any]]:
        """The programs to run, each with the hooks to call around it and the position in the input after it, which is
        known after the last one of a chunk; their input is made ready by a thread."""
        context = self.context
        plan = Plan(self.hooks, context.global_step, self.last_step, size.most)

        def make(pairs: list[Pair], chunk: Chunk) -> list[ProgramCall]:
            return self.programs.runs(pairs, chunk.most, chunk.alone, chunk.reports)

        for ready, due in read_ahead(batches, plan, context, make):
            for run in ready.batches[:-1]:
                yield run, (), self.saver.position
            yield ready.batches[-1], due, ready.position

    def _start(self, run: ProgramCall, requests: Sequence[PyTree]) -> tuple[StepOutputs, dict[str, Report]]:
        """Starts a program. Waits for the last but two, but not for this one."""
        context, program = self.context, run.program
        if run.reporting is not None and _hook_calls.requests_values(requests, context):
            program = run.reporting
        number = self.saver.batches + 1  # of the program's first batch in the input
        # What watches the run reports its phase, and ends it.
        context.phase = "compile" if program.is_new() else "step"
        # The old carry is donated, and cannot be used after this, even if the program fails.
        self._carry, outputs, reported = self.programs.guard(
            number, run.batch, program, self._carry, self._key_data, *run.args
        )
        context.stopwatch.switch("device")
        self._in_flight.add(outputs.losses)
        context.stopwatch.switch("host")
        context.global_step += run.steps
        context.count(run.steps, rows_of(*run.batch) * context.group.count)
        self._log.advance(run.steps)
        self._losses.add(outputs, run.steps)
        if context.phase == "compile":  # the first program has run
            context.phase = "step"
        return outputs, reported

    def look(self) -> None:
        self._losses.read(self._carry)

    def least_step_seconds(self) -> float | None:
        return self.programs.least_step_seconds

    def change(self, change: Callable[[Carry], Carry]) -> None:
        """Replaces the carry."""
        self._carry = change(self._carry)
        if self.saver.step == self.context.global_step:
            self._changed_at = self.saver.step

    def state(self) -> State:
        """The state now, unless a loss that led to it is NaN."""
        self.look()
        return state_of(self._carry, self._key_data)

    def save(self, wait: bool = True) -> str | None:
        return self.saver.save(self.state(), wait, skip=self._losses.ended_by_nan)
