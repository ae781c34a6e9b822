"""The training loop: programs in flight, hooks, log lines and a progress bar around compiled steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from estimator.checkpoint._checkpoints import Checkpoints
from estimator.core._batch import rows_of
from estimator.core._hook import Hook
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._typing import PyTree
from estimator.hooks._nan import NanTensorHook
from estimator.inputs._input_fn import Batches
from estimator.loop import _hook_calls, _steps_per_loop
from estimator.loop._context import RunContext
from estimator.loop._plan import Chunk, Plan
from estimator.loop._programs import Carry, Pair, Programs, Run, StepOutputs, state_of
from estimator.loop._read_ahead import read_ahead, shows_bars
from estimator.optim._non_finite import cleared, log_if_more, raise_if_any, skipped_steps
from estimator.runtime._uninterrupted import compile_first, uninterrupted

# More gain nothing, and on CPU devices the collectives of many starve each other until XLA aborts the process.
_PROGRAMS_IN_FLIGHT = 2
_STEPS_BETWEEN_LOOKS = 100  # at the losses, for NaN


class NanLossDuringTrainingError(RuntimeError):
    """The loss, or a variable about to be saved, is not a number."""


class Training:
    """One call of `Estimator.train`.

    Args:
      programs: the compiled programs.
      config: how often to log, and how many steps go into one program.
      checkpoints: where to save.
      context: what hooks see; its `global_step` is where to start.
      hooks: in the order in which they are called.
      last_step: where to stop; None: where the input ends.
      saved_path: the checkpoint that the state to start from was read from, if it was.
      skipped_batches: how many batches of the input earlier runs have taken.

    Attributes:
      saved_path: the newest checkpoint.
      saved_step: its step; -1: there is none.
    """

    def __init__(
        self,
        programs: Programs,
        config: RunConfig,
        checkpoints: Checkpoints,
        context: RunContext,
        hooks: Sequence[Hook],
        last_step: int | None,
        saved_path: str | None,
        skipped_batches: int,
    ) -> None:
        self.programs = programs
        self.config = config
        self.checkpoints = checkpoints
        self.context = context
        self.hooks = hooks
        self.last_step = last_step
        self.saved_path = saved_path
        self.saved_step = -1 if saved_path is None else context.global_step
        self._skipped_batches = skipped_batches
        self._position: Any = None  # in the input, after the last step
        self._looked_step = self._logged_step = context.global_step
        self._losses: list[tuple[StepOutputs, int]] = []  # of each program since the last look, and how many there are
        self._last_loss: float | None = None
        self._ended_by_nan = False
        self._changed_at = -1  # the last step whose state was changed when it was saved already
        self._skipped = 0  # the number of steps that on_nan="skip" left out so far
        self._clock: tuple[int, float] | None = None  # the step and the time from which the rate is taken

    def run(self, state: State, batches: Batches) -> State:
        """Trains until the last step, the end of the input, or a hook wants it to end. Hooks have begun already.

        Raises:
          NanLossDuringTrainingError: the loss became NaN. Nothing of that is saved.
          NonFiniteGradientError: a gradient was inf or NaN, and on_nan is "raise". Nothing of that is saved.
        """
        if self.programs.traits.on_nan:
            self._skipped = skipped_steps(state)
            if self.programs.traits.on_nan == "raise":
                state = cleared(state)
        self._position = batches.get_state()
        self._key_data = jax.random.key_data(state.key)
        self._carry = Carry(state.variables, state.slots, state.global_step)
        del state  # its memory goes to the first step
        context = self.context
        context._state, context._save, context._look = self._checked_state, self._save, self._look
        context._change = self._change
        context.reported = self.programs.traits.reported
        _hook_calls.create_state(self.hooks, context)
        look_every = min(self.config.log_step_count_steps or _STEPS_BETWEEN_LOOKS, _STEPS_BETWEEN_LOOKS)
        but = 0 if self.programs.traits.on_nan else 1  # the devices have something to do while losses are looked at
        size = _steps_per_loop.choose(self.config.steps_per_loop, self.programs, self.hooks, context, look_every)
        with _bar(self.last_step, context.global_step) as self._bar:
            for run, due in self._runs(batches, size):
                asked = _hook_calls.before(due, context) if due else []
                seen, reported = self._start(run, reporting=_hook_calls.asks(asked, context))
                if context.global_step - but * run.steps - self._looked_step >= look_every:
                    self._look(but)
                    if context.found_nan:  # which all processes find here, or have told each other of
                        context.stop("NaN loss")
                    size.timed(self._looked_step)
                if due:
                    _hook_calls.after(due, context, asked, seen.losses, run.steps, reported, seen.rates)
            self._look()
        context.restored |= self._changed_at == context.global_step
        if self._last_loss is not None:
            logging.info("Loss for final step: %.6g.", self._last_loss)
        elif context.stop_reason == "input":
            logging.warning("Training with estimator made no steps. Perhaps input is empty or misspecified.")
        return state_of(self._carry, self._key_data)

    def _runs(self, batches: Batches, size: _steps_per_loop.LoopSize) -> Iterator[tuple[Run, Sequence[Hook]]]:
        """The programs to run, each with the hooks to call around it, their input made ready by a thread."""
        context = self.context
        plan = Plan(self.hooks, context.global_step, self.last_step, size.most)

        def make(pairs: list[Pair], piece: Chunk) -> list[Run]:
            return self.programs.runs(pairs, piece.most, piece.alone, piece.reports)

        for got, due in read_ahead(batches, plan, context, make):
            self._position = got.position
            for run in got.batches[:-1]:
                yield run, ()
            yield got.batches[-1], due

    def _start(self, run: Run, reporting: bool) -> tuple[StepOutputs, dict[str, Any]]:
        """Starts a program. Waits for the last but one, but not for this one."""
        context = self.context
        program = run.reporting if reporting and run.reporting else run.program
        number = self._skipped_batches + context.batches + 1  # of the program's first batch in the input
        is_new = self.programs.is_new(program)
        context.phase = "compile" if is_new else "step"
        if is_new:
            self.programs.guard(number, run.batch, compile_first, program, self._carry, self._key_data, *run.args)
        self._carry, seen, reported = self.programs.guard(
            number, run.batch, program, self._carry, self._key_data, *run.args
        )
        context.phase = "step"
        self._losses.append((seen, run.steps))
        if len(self._losses) > _PROGRAMS_IN_FLIGHT:
            self._losses[-1 - _PROGRAMS_IN_FLIGHT][0].losses.block_until_ready()
        context.global_step += run.steps
        context.count(run.steps, rows_of(*run.batch) * context.group.count)
        self._bar.update(run.steps)
        if self._clock is None:  # started after the first program, since compiling is no part of the rate
            seen.losses.block_until_ready()
            self._clock = context.clock = context.global_step, time.monotonic()
            if (self.config.log_step_count_steps or 1) > 1:  # else it is logged with the others, or not at all
                first = context.global_step - run.steps + 1
                self._log([first], first, *_of_steps(self._losses))
        return seen, reported

    def _look(self, but: int = 0) -> None:
        """Looks at the losses since the last look, none of which may be NaN, and logs; `but` not at those of the last
        program. To read the loss of each step at once would cost every step, on several CPU devices, a tenth of its
        time."""
        programs = self._losses[: len(self._losses) - but]
        if not programs:
            return
        losses, rates = _of_steps(programs)
        self._losses = self._losses[len(programs) :]
        step = self._looked_step + len(losses)
        self.context.rates = rates
        self.context.saw_losses(self._looked_step + 1, losses)
        if self.programs.traits.on_nan == "raise":
            raise_if_any(self._carry)
        elif self.programs.traits.on_nan == "skip":
            self._skipped = log_if_more(self._carry, self._skipped)
        if np.isnan(losses).any():
            self._found_nan(self._looked_step + 1 + int(np.argmax(np.isnan(losses))))
        self._looked_step = step
        self._last_loss = losses[-1]
        every = self.config.log_step_count_steps
        if every and step - self._logged_step >= every:
            now = time.monotonic()
            since, start = self._clock or (step, now)
            rate = f" ({(step - since) / (now - start):.4g} steps/sec)" if step > since else ""
            self._clock = step, now
            due = range(self._logged_step + every, step + 1, every)  # some may lie within a program of several
            self._log(due, step - len(losses) + 1, losses, rates, rate)
            self._logged_step = due[-1]

    def _found_nan(self, step: int) -> None:
        advice = (
            f"NaN loss during training, at step {step}. {self._newest()} Look for a division by zero or a "
            "logarithm of zero, lower the learning rate, or run with jax.config.update('jax_debug_nans', True)."
        )
        if all(hook.fail_on_nan_loss for hook in self.hooks if isinstance(hook, NanTensorHook)):
            raise NanLossDuringTrainingError(advice)
        if not self._ended_by_nan:
            logging.warning("%s", advice)
        self._ended_by_nan = self.context.found_nan = True
        self.context.request_stop("NaN loss")

    def _log(
        self, due: Sequence[int], first: int, losses: np.ndarray, rates: dict[str, np.ndarray], speed: str = ""
    ) -> None:
        """Logs some of the steps whose losses and learning rates these are, from the step `first` on."""
        with self._bar.external_write_mode():  # so that the line does not go into the bar
            for step in due:
                shown = "".join(f", {tag} = {of_steps[step - first]:.6g}" for tag, of_steps in rates.items())
                logging.info("loss = %.6g, step = %d%s%s", losses[step - first], step, shown, speed)
        self._bar.set_postfix(loss=f"{losses[-1]:.4g}", refresh=False)

    def _change(self, change: Callable[[Carry], Carry]) -> None:
        self._carry = change(self._carry)
        if self.saved_step == self.context.global_step:
            self._changed_at = self.saved_step

    def _checked_state(self) -> State:
        """The state now, unless a loss that led to it is NaN."""
        self._look()
        return state_of(self._carry, self._key_data)

    def _save(self) -> str | None:
        """Saves the state, if it is not saved and has no NaN; returns the newest checkpoint."""
        state, step = self._checked_state(), self.context.global_step
        if self.saved_step == step or self._ended_by_nan:
            return self.saved_path
        phase, self.context.phase = self.context.phase, "checkpoint"
        self.context.flush()  # a run that goes on from here will not write it
        bad = sorted(_names_with_nan(state.variables))
        if bad:
            raise NanLossDuringTrainingError(
                f"NaN in the variables {bad} after step {step}, of which no checkpoint was saved. "
                f"{self._newest()} Look for a gradient that is not a number, or lower the learning rate."
            )
        taken = self._skipped_batches + self.context.batches
        positions = self.context.group.all_gather(self._position)
        host = {"input": {"batches": taken, "positions": positions}, "hooks": _hook_calls.states(self.hooks)}
        self.saved_path, self.saved_step = self.checkpoints.save(state, host), step
        self.context.phase = phase
        return self.saved_path

    def _newest(self) -> str:
        if self.saved_step < 0:
            return "There is no checkpoint."
        return f"The newest checkpoint is that of step {self.saved_step}; nothing later was saved."


def _of_steps(programs: Sequence[tuple[StepOutputs, int]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The losses and the learning rates of each step of some programs."""
    counts = [count for _, count in programs]

    def joined(*of_programs: jax.Array) -> np.ndarray:
        pairs = zip(of_programs, counts, strict=True)
        return np.concatenate([np.atleast_1d(x.addressable_data(0))[:count] for x, count in pairs])

    return jax.tree.map(joined, *(seen for seen, _ in programs))


def _bar(total: int | None, initial: int) -> Any:
    """A progress bar, silent where stderr is no terminal."""
    return tqdm.tqdm(total=total, initial=initial, unit="step", disable=not shows_bars())


@uninterrupted
def _names_with_nan(variables: dict[str, PyTree]) -> list[str]:
    by_devices: dict[Any, dict[str, PyTree]] = {}  # a program takes arrays of the same devices
    for name, value in variables.items():
        devices = frozenset(device for leaf in jax.tree.leaves(value) for device in leaf.devices())
        by_devices.setdefault(devices, {})[name] = value
    flags = jax.device_get([_has_nan(group) for group in by_devices.values()])
    return [name for group in flags for name, has_nan in group.items() if has_nan]


@jax.jit
def _has_nan(variables: dict[str, PyTree]) -> dict[str, jax.Array]:
    def has_nan(value: PyTree) -> jax.Array:
        floats = [x for x in jax.tree.leaves(value) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return jnp.any(jnp.array([jnp.isnan(x).any() for x in floats], bool))

    return {name: has_nan(value) for name, value in variables.items()}
