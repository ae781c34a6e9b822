"""The calls of an Estimator, once their arguments are checked."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.checkpoint._restore import StateSource, take_part
from estimator.core._batch import rows_of
from estimator.core._hook import Hook, as_hooks
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._typing import Features, PyTree
from estimator.hooks._checkpoint_saver import CheckpointSaverListener
from estimator.hooks._defaults import hooks_for_process, with_default_hooks
from estimator.hooks._summary_saver import write_evaluation
from estimator.inputs._input_fn import Batches, batches, call_input_fn
from estimator.loop import _hook_calls
from estimator.loop._context import RunContext
from estimator.loop._evaluate import EvalSteps, evaluate_batches
from estimator.loop._predict import PredictSteps, predict_batches
from estimator.loop._programs import Programs
from estimator.loop._resume_input import resume_input
from estimator.loop._start_lines import StartLines
from estimator.loop._stopwatch import Stopwatch
from estimator.loop._synchronized_input import first_batch
from estimator.loop._train import NO_STEPS, Training
from estimator.multihost._preemption import Call, ends_by_signals
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.steps._pure_steps import variables_in
from estimator.steps._transform import transform
from estimator.storage._files import is_url

if TYPE_CHECKING:
    from estimator.checkpoint._warm_start import WarmStartSettings

InputFn = Callable[..., Any]


class _Start(NamedTuple):
    """The start of a training run.

    Attributes:
      path: the newest checkpoint, or None.
      step: its global step.
      host: what it holds beside arrays.
    """

    path: str | None
    step: int
    host: dict[str, Any]


class _OpenInput(NamedTuple):
    """The input of a training run.

    Attributes:
      rest: the batches, the first one included.
      first: the first batch.
      skipped: how many batches earlier runs have taken.
    """

    rest: Batches
    first: tuple[PyTree, PyTree]
    skipped: int


class Runs:
    """Trains, evaluates and predicts with a model_fn. Programs, and the newest state, stay alive between runs.

    Attributes:
      checkpoints: in the model_dir.
      states: where the state of a run comes from.
      stopwatch: measures training and evaluations, and stands still between them.
    """

    def __init__(
        self, model_fn: ModelFn, params: Any, config: RunConfig, warm_start_from: WarmStartSettings | None
    ) -> None:
        self._params = params
        self._config = config
        self._model_dir = str(config.model_dir)
        # Steps donate their state. Training gets a copy (`take_for_training`), so that predictions can read theirs on.
        self._model = transform(model_fn, copy.deepcopy(params), config, donate=True)
        self.checkpoints = Checkpoints(
            self._model_dir, config.keep_checkpoint_max, config.keep_checkpoint_every_n_hours
        )
        self._resumes = True  # a run of another process, or one that failed: with its position in the input
        self._programs: Programs | None = None  # made for the first batch
        self._lines = StartLines()
        self.stopwatch = Stopwatch()
        self.eval_steps = EvalSteps(self._model)
        self._predict_steps = PredictSteps(self._model)
        self.states = StateSource(self._model_dir, self.checkpoints, config.seed, warm_start_from)

    def train(
        self,
        input_fn: InputFn,
        hooks: tuple[Hook, ...],
        listeners: tuple[CheckpointSaverListener, ...],
        steps: int | None,
        max_steps: int | None,
        group: ProcessGroup,
        call: Call,
    ) -> None:
        """Trains from the newest checkpoint on."""
        # Each step needs the result of the one before. The checkpoint says whether there is anything to do, before
        # the user's input_fn is called, and where its input resumes; the first batch, without which nothing is made,
        # says for which shapes to build; and the state is taken out of memory last, when nothing else can fail.
        start = self._locate(group)
        if max_steps is not None and start.step >= max_steps:
            logging.info("Skipping training since max_steps has already saved.")
            return
        if self._resumes:
            self.stopwatch.resume(start.host.get("time"), group.index)
        with self.stopwatch.part("input"):
            opened = self._open_input(input_fn, start, group)
        call.raise_if_asked()
        if opened is None:
            return
        with self.stopwatch.part("compilation"):
            training = self._build(opened, start, hooks, listeners, steps, max_steps, group)
        if training is None:
            return
        with self.stopwatch.part("host"):
            state = self._run(training, opened, start, call)
        self._remember(training, state)

    def _locate(self, group: ProcessGroup) -> _Start:
        path = self.states.find_newest(group, writes=True)
        return _Start(None, 0, {}) if path is None else _Start(path, *Checkpoint(path).progress())

    def _open_input(self, input_fn: InputFn, start: _Start, group: ProcessGroup) -> _OpenInput | None:
        """The input at its position; None if it has no batch."""
        group.progress.enter("input")
        rest, skipped = self._batches(input_fn, ModeKeys.TRAIN), 0
        if self._resumes and start.path is not None:
            skipped = resume_input(rest, start.path, start.host, self._config)
        first = first_batch(group, rest.peek(), ModeKeys.TRAIN)
        # The run before has made all its steps with the last batch of the input: this one begins the next pass.
        if first is None and skipped and Checkpoint(str(start.path)).is_end("steps"):
            rest, skipped = self._batches(input_fn, ModeKeys.TRAIN), 0
            first = first_batch(group, rest.peek(), ModeKeys.TRAIN)
        if first is not None:
            return _OpenInput(rest, first, skipped)
        if start.path is None or not skipped:
            logging.warning(NO_STEPS)
            return None
        logging.warning(
            "Training made no steps: %s is of the end of the input. The next training run begins it again.", start.path
        )
        # Without the mark each further run would end here as well.
        if self._config.is_chief:
            Checkpoint(start.path).note_end("input")
            Checkpoint(start.path).note_training_end()
        return None

    def _build(
        self,
        opened: _OpenInput,
        start: _Start,
        own_hooks: tuple[Hook, ...],
        listeners: tuple[CheckpointSaverListener, ...],
        steps: int | None,
        max_steps: int | None,
        group: ProcessGroup,
    ) -> Training | None:
        """The run; None if a warm start has reached `max_steps` already."""
        self._lines.say_compiling(ModeKeys.TRAIN)
        group.progress.enter("begin")
        rest, first = opened.rest, opened.first
        if self._programs is None:
            self._programs = Programs(self._model, *first)
        info = self._programs.info
        self._lines.say_where(ModeKeys.TRAIN, info, rows_of(*first))
        self._lines.say_resuming(start.step, start.host.get("towers"), info.placement.towers)
        rest.place(info.placement)
        first = rest.peek() or first
        group.set_placement(info.placement)
        chief_hooks, spec_hooks = map(as_hooks, info.hooks)
        hooks = with_default_hooks(chief_hooks, [*as_hooks(own_hooks), *spec_hooks], self._config, listeners)
        hooks = hooks_for_process(group, hooks, chief_hooks)
        with self.stopwatch.part("checkpoint" if start.path else "compilation"):
            init = functools.partial(self._model.init, features=first[0], labels=first[1])
            state = self.states.take_for_training(start.path, group, info, init)
        # Before the first step, which donates the state.
        self._model.compare(ModeKeys.TRAIN, state, *first)
        step = start.step
        if start.path is None and self.states.settings is not None:
            step = int(state.global_step)  # a warm start may bring one
            if max_steps is not None and step >= max_steps:
                logging.info("Skipping training since the warm start is at max_steps already.")
                return None
        last_step = max_steps if steps is None else step + steps
        if rest.is_one_batch and last_step is not None and last_step - step > 1:
            logging.warning(
                "input_fn returned one batch, so that training ends after one step, not after %d. Return "
                "`itertools.repeat(batch)` to train on it again and again, or an iterable of batches.",
                last_step - step,
            )
        return Training(
            self._programs,
            self._config,
            self.checkpoints,
            group,
            state,
            hooks,
            last_step,
            start.path,
            opened.skipped,
            self.stopwatch,
        )

    def _run(self, training: Training, opened: _OpenInput, start: _Start, call: Call) -> State:
        if start.path is not None and self._config.is_chief:
            Checkpoint(start.path).note_training_start()
        try:
            call.begin(training)
            with _hook_calls.around(training.hooks, training):
                training.track(self._config, self._params)
                _hook_calls.set_states(training.hooks, start.host.get("hooks", {}))
                state = training.run(opened.rest)
            # Hooks have saved the last state in their `end`.
            call.raise_if_asked(training.describe_end())
            return state
        except BaseException:
            # The newest checkpoint has a position of this run, or, without a save, of an earlier one.
            self._resumes = self._resumes or training.saver.step > start.step
            raise

    def _remember(self, training: Training, state: State) -> None:
        """Keeps the state in memory, and notes where the next training run begins its input."""
        # A further `train` of this object begins with the first batch of its input_fn, as in TensorFlow.
        self._resumes = False
        if training.saver.path and self._config.is_chief:
            Checkpoint(training.saver.path).note_training_end()
        if training.saver.path and training.saver.step == training.global_step:
            if self._config.is_chief:
                Checkpoint(training.saver.path).note_end(training.stop_reason)
            # After `restore_best` the checkpoint has the values of an earlier step, and the state in memory has not.
            if not training.restored:
                self.states.keep(training.saver.path, state)

    def evaluate(
        self,
        source: State | str | None,
        checkpoint_path: str | None,
        input_fn: InputFn,
        steps: int | None,
        hooks: tuple[Hook, ...],
        name: str | None,
        group: ProcessGroup,
        call: Call,
    ) -> dict[str, Any]:
        """The metrics over an input, of a state in memory or saved at a path; if None, of initial values."""
        group.progress.enter("input")
        rest = self._batches(input_fn, ModeKeys.EVAL)
        first = first_batch(group, rest.peek(), ModeKeys.EVAL)
        if first is None:
            raise ValueError(
                "`evaluate` got no batch from input_fn. Check that it starts again at each call; a generator made "
                "outside of input_fn is empty the second time."
            )
        self._lines.say_compiling(ModeKeys.EVAL)
        context = RunContext(ModeKeys.EVAL, self._model_dir, group=group, verbose=self._config.verbose)
        info = self._model.info(*first, mode=ModeKeys.EVAL)
        self._lines.say_where(ModeKeys.EVAL, info, rows_of(*first))
        rest.place(info.placement)
        # The peeked batch has moved to the devices; a process without one keeps the zeros of `first_batch`.
        first = rest.peek() or first
        context.output_dir = eval_dir(self._model_dir, name)
        context.set_model_info(info)
        hooks = as_hooks((*hooks, *info.hooks[1]))
        group.set_placement(info.placement)
        hooks = hooks_for_process(group, hooks)
        call.begin(context)
        with _hook_calls.around(hooks, context):
            # The shapes of variables may depend on the first batch.
            if not isinstance(source, State):
                init = functools.partial(self._model.init, features=first[0], labels=first[1], mode=ModeKeys.EVAL)
                state, path = self.states.read_state(ModeKeys.EVAL, source, checkpoint_path, group, info, init)
            else:
                state, path = take_part(source, info.placed_state), None
            context.set_readonly_state(state)
            context.track(self._config, self._params)
            self._model.compare(ModeKeys.EVAL, state, *first)
            results = evaluate_batches(
                self.eval_steps, state, rest, first, hooks, context, steps, self._config.eval_loss_over
            )
            # Before the hooks end, which find it in their `end`.
            context.metrics = results
            write_evaluation(context, path)
        call.raise_if_asked()
        shown = ", ".join(
            f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}"
            for key, value in sorted(results.items())
        )
        logging.info("Evaluation%s: %s", f" {name!r}" if name else "", shown)
        return results

    def predict(
        self,
        input_fn: InputFn,
        keys: tuple[str, ...] | None,
        hooks: tuple[Hook, ...],
        path: str | None,
        checkpoint_path: str | None,
    ) -> Generator[PyTree, None, None]:
        """The predictions of each batch, of the state saved at `path`."""
        with ends_by_signals() as call:
            rest = self._batches(input_fn, ModeKeys.PREDICT)
            first = rest.peek()
            if first is None:
                return
            self._lines.say_compiling(ModeKeys.PREDICT)
            context = RunContext(ModeKeys.PREDICT, self._model_dir, verbose=self._config.verbose)
            info = self._model.info(first[0], mode=ModeKeys.PREDICT)
            self._lines.say_where(ModeKeys.PREDICT, info, rows_of(first[0]))
            rest.place(info.placement)
            features, _ = rest.peek() or first
            context.set_model_info(info)
            hooks = as_hooks((*hooks, *info.hooks[1]))
            call.begin(context)
            with _hook_calls.around(hooks, context):
                init = functools.partial(self._model.init, features=features, mode=ModeKeys.PREDICT)
                state, _ = self.states.read_state(ModeKeys.PREDICT, path, checkpoint_path, SingleProcess(), info, init)
                context.set_readonly_state(state)
                yield from predict_batches(self._predict_steps, state, rest, features, keys, hooks, context)

    def read_for_export(self, features: Features, path: str | None, checkpoint_path: str | None) -> State:
        """The state saved at `path`, with the values of variables that an export has."""
        info = self._model.info(features, mode=ModeKeys.PREDICT)
        init = functools.partial(self._model.init, features=features, mode=ModeKeys.PREDICT)
        state, _ = self.states.read_state(ModeKeys.PREDICT, path, checkpoint_path, SingleProcess(), info, init)
        return state._replace(variables=variables_in(ModeKeys.PREDICT, info, state.variables))

    def _batches(self, input_fn: InputFn, mode: ModeKeys) -> Batches:
        return batches(call_input_fn(input_fn, mode, copy.deepcopy(self._params), self._config))


def check_eval_dir(model_dir: str, name: str | None) -> None:
    """Checks, before an evaluation or a training run with evaluations, that no file is where it writes."""
    directory = eval_dir(model_dir, name)
    if not is_url(directory) and os.path.exists(directory) and not os.path.isdir(directory):
        raise NotADirectoryError(
            f"An evaluation with name={name!r} writes into the directory {directory!r}, but a file is there. Move it "
            "away, or give the evaluation another `name`."
        )


def eval_dir(model_dir: str, name: str | None) -> str:
    """The directory of the evaluation `name`."""
    return os.path.join(model_dir, f"eval_{name}" if name else "eval")
