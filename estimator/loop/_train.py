"""The training loop: programs in flight, and hooks around compiled steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from estimator.checkpoint._async_save import CheckpointWriteError
from estimator.checkpoint._checkpoint_dir import check_places, step_of
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.core._batch import rows_of
from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.hooks._nan import NanTensorHook
from estimator.inputs._input_fn import Batches
from estimator.loop import _hook_calls, _steps_per_loop
from estimator.loop._context import RunContext
from estimator.loop._plan import Chunk, Plan
from estimator.loop._programs import Carry, Pair, Programs, Run, StepOutputs, carry_of, state_of
from estimator.loop._read_ahead import read_ahead, shows_bars
from estimator.loop._resume_input import warn_of_resuming
from estimator.loop._training_log import TrainingLog
from estimator.multihost._process_group import ProcessGroup
from estimator.optim._non_finite import cleared, log_skipped, raise_if_any, skipped_steps
from estimator.runtime._huge_pages import advise_huge_pages
from estimator.runtime._uninterrupted import compile_first, shield

# More gain nothing, and on CPU devices the collectives of many starve each other until XLA aborts the process.
_PROGRAMS_IN_FLIGHT = 2
_STEPS_BETWEEN_LOOKS = 100  # at the losses, for NaN


class NanLossDuringTrainingError(RuntimeError):
    """The loss, or a variable about to be saved, is not a number."""


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
      skipped_batches: how many batches of the input earlier runs have taken.

    Attributes:
      context: what hooks see.
      saved_path: the newest checkpoint, which may still be being written.
      saved_step: its step, or -1.
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
    ) -> None:
        self.programs = programs
        self.config = config
        self.checkpoints = checkpoints
        self.hooks = hooks
        self.last_step = last_step
        start = int(state.global_step)
        self.context = RunContext(ModeKeys.TRAIN, config.model_dir, start, group, actions=self, verbose=config.verbose)
        self.context.set_model_info(programs.traits)
        self.saved_path = saved_path
        self.saved_step = -1 if saved_path is None else start
        self._saved_before = self.saved_path, self.saved_step  # what is left if the last save fails
        self._skipped = 0  # steps that on_nan="skip" left out so far
        if programs.traits.on_nan:
            self._skipped = skipped_steps(state)
            if programs.traits.on_nan == "raise":
                state = cleared(state)
        advise_huge_pages(jax.tree.leaves(state.variables))
        self._carry = carry_of(state)
        self._key_data = jax.random.key_data(state.key)
        self._skipped_batches = skipped_batches
        self._position: Any = None  # in the input, after the last chunk of steps
        self._first_step = self._looked_step = start
        self._losses: list[tuple[StepOutputs, int]] = []  # of each program since the last look, and how many there are
        self._log = TrainingLog(config.log_step_count_steps, start, last_step, shows_bars(self.context))
        self._ended_by_nan = False
        self._warned_of_input = False
        self._changed_at = -1  # the last step whose state was changed when it was saved already

    def run(self, batches: Batches) -> State:
        """Trains until the last step, the end of the input, or a hook wants it to end. Hooks have begun already.

        Raises:
          NanLossDuringTrainingError: the loss became NaN. Nothing of that is saved.
          NonFiniteGradientError: a gradient was inf or NaN, and on_nan is "raise". Nothing of that is saved.
          CheckpointWriteError: a checkpoint could not be written.
        """
        with self._finishing_save():
            return self._run(batches)

    def _run(self, batches: Batches) -> State:
        context = self.context
        self._position = batches.get_state()
        check_places(str(self.config.model_dir), context.global_step, self.last_step)
        _hook_calls.create_state(self.hooks, context)
        look_every = min(self.config.log_step_count_steps or _STEPS_BETWEEN_LOOKS, _STEPS_BETWEEN_LOOKS)
        size = _steps_per_loop.choose(self.config.steps_per_loop, self.programs, self.hooks, context, look_every)
        with self._log:
            for run, due, position in self._runs(batches, size):
                requests = _hook_calls.before(due, context) if due else []
                outputs, reported = self._start(run, reporting=_hook_calls.requests_values(requests, context))
                self._position = position
                if context.global_step - run.steps - self._looked_step >= look_every:
                    self.look(but=1)  # the devices have something to do meanwhile
                    if context.found_nan:  # in all processes: they see the same losses, or have agreed to stop
                        context.stop("NaN loss")
                    size.timed(self._looked_step)
                if due:
                    _hook_calls.after(due, context, requests, outputs.losses, run.steps, reported, outputs.rates)
            self.look()
        if self._changed_at == context.global_step:
            context.note_restored()
        if self._log.last_loss is not None:
            logging.info("Loss for final step: %.6g.", self._log.last_loss)
        elif context.stop_reason == "input":
            logging.warning("Training with estimator made no steps. Perhaps input is empty or misspecified.")
        return state_of(self._carry, self._key_data)

    def _runs(self, batches: Batches, size: _steps_per_loop.LoopSize) -> Iterator[tuple[Run, Sequence[Hook], Any]]:
        """The programs to run, each with the hooks to call around it and the position in the input after it, which is
        known after the last one of a chunk; their input is made ready by a thread."""
        context = self.context
        plan = Plan(self.hooks, context.global_step, self.last_step, size.most)

        def make(pairs: list[Pair], chunk: Chunk) -> list[Run]:
            return self.programs.runs(pairs, chunk.most, chunk.alone, chunk.reports)

        for ready, due in read_ahead(batches, plan, context, make):
            for run in ready.batches[:-1]:
                yield run, (), self._position
            yield ready.batches[-1], due, ready.position

    def _start(self, run: Run, reporting: bool) -> tuple[StepOutputs, dict[str, Report]]:
        """Starts a program. Waits for the last but one, but not for this one."""
        context = self.context
        program = run.reporting if reporting and run.reporting else run.program
        number = self._skipped_batches + context.batches + 1  # of the program's first batch in the input
        if self.programs.is_new(program):
            context.phase = "compile"
            self.programs.guard(number, run.batch, compile_first, program, self._carry, self._key_data, *run.args)
        else:
            context.phase = "step"
        self._carry, outputs, reported = self.programs.guard(
            number, run.batch, program, self._carry, self._key_data, *run.args
        )
        context.phase = "step"
        self._losses.append((outputs, run.steps))
        if len(self._losses) > _PROGRAMS_IN_FLIGHT:
            self._losses[-1 - _PROGRAMS_IN_FLIGHT][0].losses.block_until_ready()
        context.global_step += run.steps
        context.count(run.steps, rows_of(*run.batch) * context.group.count)
        self._log.advance(run.steps)
        if self._log.clock is None:
            outputs.losses.block_until_ready()
            known = _of_steps(self._losses)
            self._log.start_clock(context.global_step, known.losses, known.rates)
            context.clock = self._log.clock
        return outputs, reported

    def look(self, but: int = 0) -> None:
        """Looks at the losses since the last look, none of which may be NaN, and logs; `but` not at the last program's.

        To read the loss of each step at once would cost every step, on several CPU devices, a tenth of its time.
        """
        programs = self._losses[: len(self._losses) - but]
        if not programs:
            return
        losses, rates, skipped = _of_steps(programs)
        self._losses = self._losses[len(programs) :]
        first = self._looked_step + 1
        self.context.rates = rates
        self.context.notify_loss_watchers(first, losses)
        if skipped is not None and skipped.any():  # only then the host waits for the newest program
            if self.programs.traits.on_nan == "raise":
                raise_if_any(self._carry)
            self._skipped += int(skipped.sum())
            log_skipped(self._carry, int(skipped.sum()), self._skipped)
        if np.isnan(losses).any():
            self._end_by_nan(first + int(np.argmax(np.isnan(losses))))
        self._looked_step += len(losses)
        self._log.add(self._looked_step, losses, rates)

    def _end_by_nan(self, step: int) -> None:
        advice = (
            f"NaN loss during training, at step {step}. {self._newest()} {self.programs.guard.about_nan()}, "
            "lower the learning rate, or run with jax.config.update('jax_debug_nans', True)."
        )
        if all(hook.fail_on_nan_loss for hook in self.hooks if isinstance(hook, NanTensorHook)):
            raise NanLossDuringTrainingError(advice)
        if not self._ended_by_nan:
            logging.warning("%s", advice)
        self._ended_by_nan = self.context.found_nan = True
        self.context.request_stop("NaN loss")

    def change(self, change: Callable[[Carry], Carry]) -> None:
        """Replaces the carry."""
        self._carry = change(self._carry)
        if self.saved_step == self.context.global_step:
            self._changed_at = self.saved_step

    def state(self) -> State:
        """The state now, unless a loss that led to it is NaN."""
        self.look()
        return state_of(self._carry, self._key_data)

    def save(self, wait: bool = True) -> str | None:
        """Saves the state, if it is not saved and has no NaN; returns the newest checkpoint.

        Args:
          wait: whether to return when it is on disk, if the config allows anything else. In `end` it always is then.
        """
        state, step = self.state(), self.context.global_step
        wait = wait or not self.config.save_checkpoints_async or self.context.phase == "end"
        is_within = self.context.phase != "end" or self.context.preempted
        if self.saved_step == step or self._ended_by_nan:
            if wait:
                with self.context.in_phase("checkpoint"):
                    self._wait_for_save()
            return self.saved_path
        with self.context.in_phase("checkpoint"):
            self.context.flush()  # a run that resumes from here will not write it
            bad = sorted(_names_with_nan(state.variables))
            if bad:
                raise NanLossDuringTrainingError(
                    f"NaN in the variables {bad} after step {step}, of which no checkpoint was saved. "
                    f"{self._newest()} Look for a gradient that is not a number, or lower the learning rate."
                )
            taken = self._skipped_batches + self.context.batches
            positions = self.context.group.all_gather(self._position)
            host = {"input": {"batches": taken, "positions": positions}, "hooks": _hook_calls.states(self.hooks)}
            self._wait_for_save()
            self._saved_before = self.saved_path, self.saved_step
            self.saved_path, self.saved_step = self.checkpoints.save(state, host, wait), step
        if is_within and taken and not self._warned_of_input:
            self._warned_of_input = warn_of_resuming(self._position, self.config)
        return self.saved_path

    @contextlib.contextmanager
    def _finishing_save(self) -> Iterator[None]:
        """Waits for the last checkpoint when the block ends, however it ends. An error of the block comes before the
        checkpoint's, which is in the log. A second Ctrl-C does not wait."""
        try:
            try:
                yield
            except BaseException as error:
                with contextlib.suppress(Exception):
                    self._wait_for_save()
                step, saved = self.context.global_step, max(self.saved_step, self._first_step)
                if step > saved and isinstance(error, Exception | SystemExit):
                    logging.warning(
                        "Training failed after step %d. What came after step %d is in no checkpoint, and is lost.",
                        step,
                        saved,
                    )
                raise
            with self.context.in_phase("checkpoint"):
                self._wait_for_save()
        except BaseException:
            self.checkpoints.give_up()
            raise

    def _wait_for_save(self) -> None:
        try:
            self.checkpoints.wait()
        except CheckpointWriteError:
            self.saved_path, self.saved_step = self._saved_before
            raise

    def _newest(self) -> str:
        path = self.checkpoints.latest()  # waits for one that is being written
        if path is None:
            return "There is no checkpoint."
        return f"The newest checkpoint is from step {step_of(path)}; nothing later was saved."


def _of_steps(programs: Sequence[tuple[StepOutputs, int]]) -> Any:
    """The `StepOutputs` of some programs, as numpy arrays with an element per step."""
    counts = [count for _, count in programs]

    def joined(*of_programs: jax.Array) -> np.ndarray:
        pairs = zip(of_programs, counts, strict=True)
        return np.concatenate([np.atleast_1d(x.addressable_data(0))[:count] for x, count in pairs])

    return jax.tree.map(joined, *(outputs for outputs, _ in programs))


@shield
def _names_with_nan(variables: dict[str, PyTree]) -> list[str]:
    on_devices: dict[frozenset[jax.Device], dict[str, list[jax.Array]]] = {}  # a program takes arrays of the same ones
    names = []
    for name, value in variables.items():
        leaves = [leaf for leaf in jax.tree.leaves(value) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        here = [leaf for leaf in leaves if _is_in_host_memory(leaf)]
        if any(
            np.isnan(shard.data).any() for leaf in here for shard in leaf.addressable_shards if not shard.replica_id
        ):
            names.append(name)
        elif len(here) < len(leaves):
            devices = frozenset(device for leaf in leaves for device in leaf.devices())
            on_devices.setdefault(devices, {})[name] = leaves
    flags = jax.device_get([_has_nan(group) for group in on_devices.values()])
    return names + [name for group in flags for name, has_nan in group.items() if has_nan]


def _is_in_host_memory(x: jax.Array) -> bool:
    """Whether numpy reads an array without a copy, which needs no program to be compiled before the first save."""
    return x.is_fully_addressable and {device.platform for device in x.devices()} == {"cpu"}


@jax.jit
def _has_nan(variables: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    return {name: jnp.array([jnp.isnan(x).any() for x in leaves]).any() for name, leaves in variables.items()}
