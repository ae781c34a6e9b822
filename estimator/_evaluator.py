"""The evaluator: a process of its own that evaluates the checkpoints which training processes save."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from absl import logging

from estimator._estimator import Estimator
from estimator._train_spec import EvalSpec
from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._checkpoints_iterator import poll_secs, sleep
from estimator.checkpoint._model_dir import list_sound
from estimator.storage._files import is_url, lock_if_possible, write
from estimator.storage._sealed_folder import DamagedError
from estimator.storage._small_files import read_or_set_aside
from estimator.summary._history import read_eval_metrics

_LOCK_FILE = "evaluator.lock"
_DONE_FILE = "evaluated.json"


class _Done(NamedTuple):
    """An evaluation with its exports; a later one is greater.

    Attributes:
      step: of the checkpoint.
      is_final: whether training was known to have ended with it.
    """

    step: int
    is_final: bool


def evaluate_checkpoints(
    estimator: Estimator, specs: Mapping[str | None, EvalSpec], max_steps: int | None
) -> dict[str | None, tuple[dict[str, Any], list[str | None]]]:
    """Evaluates each checkpoint that training saves, until training has ended.

    Args:
      estimator: of the model_dir that training writes to.
      specs: the EvalSpecs by their names.
      max_steps: the step at which training ends, if nothing ends it before.

    Returns:
      The metrics and the exports of the last checkpoint, by the names of the EvalSpecs.
    """
    evaluators = {name: _Evaluator(estimator, spec, name, max_steps) for name, spec in specs.items()}
    logging.info("The evaluator looks for checkpoints in %s.", estimator.model_dir)
    while True:
        have_evaluated = [each.evaluate_next() for each in evaluators.values()]  # each EvalSpec has its turn
        if all(each.has_ended for each in evaluators.values()):
            return {name: (each.metrics, each.exports) for name, each in evaluators.items()}
        if not any(have_evaluated):
            sleep(poll_secs(estimator.model_dir))


class _Evaluator:
    """The evaluations of one EvalSpec.

    What is done is noted in the eval_dir, for an evaluator that is started again, and for others beside this one: a
    lock lets one at a time work on an EvalSpec, and another one takes over when it ends, however it ends.

    Attributes:
      metrics: of the last evaluation.
      exports: the results of its exporters.
      has_ended: whether the last checkpoint of the training is evaluated and exported.
    """

    def __init__(self, estimator: Estimator, spec: EvalSpec, name: str | None, max_steps: int | None) -> None:
        self._estimator, self._spec, self._name, self._max_steps = estimator, spec, name, max_steps
        self._dir = estimator.eval_dir(name)
        self._not_before = time.monotonic() + spec.start_delay_secs
        self._damaged: _Done | None = None  # at the first try
        self.metrics: dict[str, Any] = {}
        self.exports: list[str | None] = []
        self.has_ended = False

    def evaluate_next(self) -> bool:
        """Evaluates the oldest checkpoint that is not evaluated, with `throttle_secs` the newest, if there is one;
        returns whether there was one."""
        if self.has_ended:
            return False
        with _claim(self._dir) as is_mine:
            return is_mine and self._evaluate_next()

    def _evaluate_next(self) -> bool:
        saved = list_sound(self._estimator.model_dir)
        if not saved:
            return False
        # Asked after the listing: what is listed after an end is asked about in the next call.
        has_ended = saved[-1].is_training_end(self._max_steps)
        todo = {_Done(each.step, has_ended and each == saved[-1]): each for each in saved}
        done = self._read_done(saved[-1])
        pending = [each for each in todo if each > done]
        if not pending:
            self.has_ended = has_ended
            if has_ended and self.metrics.get("global_step") != done.step:  # another evaluator has done the last one
                recorded = read_eval_metrics(self._dir).get(done.step, {})
                self.metrics, self.exports = {**recorded, "global_step": done.step}, []
            return False
        chosen = pending[-1] if self._spec.throttle_secs else pending[0]
        if not chosen.is_final and time.monotonic() < self._not_before:
            return False
        try:
            self._evaluate(todo[chosen], chosen.is_final, again=done.step < chosen.step)
        except NotACheckpointError:
            logging.info("%s was removed before it was evaluated.", todo[chosen].path)
            return True
        except DamagedError as error:
            # In a store, a file that is written while it is read looks like damage: it gets a second try.
            if is_url(self._dir) and self._damaged != chosen:
                self._damaged = chosen
                return False
            logging.error("%s", error)
        write(os.path.join(self._dir, _DONE_FILE), json.dumps(chosen._asdict()).encode())
        return True

    def _evaluate(self, checkpoint: Checkpoint, is_final: bool, again: bool) -> None:
        spec, estimator = self._spec, self._estimator
        # Held until it is exported, too: training removes checkpoints meanwhile.
        with checkpoint.hold():
            # Where it is known only after the evaluation that training has ended here, only exporters are called.
            if again or self.metrics.get("global_step") != checkpoint.step:
                self._not_before = time.monotonic() + spec.throttle_secs
                self.metrics = estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, checkpoint.path, self._name)
            self.exports = [
                each.export(
                    estimator,
                    os.path.join(estimator.model_dir, "export", each.name),
                    checkpoint.path,
                    self.metrics,
                    is_final,
                )
                for each in spec.exporters
            ]

    def _read_done(self, newest: Checkpoint) -> _Done:
        done = read_or_set_aside(os.path.join(self._dir, _DONE_FILE), _parse_done, "All is evaluated again.")
        # Training has begun again from an earlier step than was evaluated, or from the first.
        return done if done is not None and done.step <= newest.step else _Done(-1, False)


def _parse_done(text: bytes) -> _Done:
    match json.loads(text):
        case {"step": int(step), "is_final": bool(is_final)}:
            return _Done(step, is_final)
        case other:
            raise ValueError(f"it is {other!r:.50}")


@contextlib.contextmanager
def _claim(directory: str) -> Iterator[bool]:
    """Yields whether no other evaluator works in a directory, and locks it for the block; a store has no locks."""
    if is_url(directory):
        yield True
        return
    os.makedirs(directory, exist_ok=True)
    file = os.open(os.path.join(directory, _LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock_if_possible(file, exclusive=True)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)
