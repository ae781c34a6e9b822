"""Values of the model_fn in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from absl import logging

from estimator.core._argument_checks import check_intervals
from estimator.core._frame import current_frame
from estimator.core._hook import Context, Hook, RunValues
from estimator.core._record import Rows, Scalar, as_reported_array, metric_of, report
from estimator.hooks._timer import SecondOrStepTimer


class LoggingTensorHook(Hook):
    """Logs values at the first step of a run, and every N steps or seconds from there.

    Values are given by name: "loss", or what the model_fn reports by `est.summary` or `est.record`. A hook that is made
    in the model_fn may get the values themselves, as in TensorFlow; it then reports them.

    >>> hook = LoggingTensorHook(["loss"], every_n_iter=100)
    >>> def model_fn(features, labels, mode):
    ...     error = abs(labels - features).mean()
    ...     hook = LoggingTensorHook({"error": error}, every_n_iter=100)
    ...     return est.EstimatorSpec(mode, loss=error, train_op=train_op, training_hooks=[hook])

    Args:
      tensors: a dict of names (or, in a model_fn, of scalars and batch-major arrays) by tag, logged in the order of the
        tags; or a list of names. Scalars given are averaged over towers, as by `est.record`.
      every_n_iter, every_n_secs: how often. Give one of both; with `at_end`, at most one.
      at_end: whether to log the values of the last step at the end of a run that did not fail. The last step is not
        known beforehand, so each step is then a separate program.
      formatter: function from a dict of values by tag to the text to log.

    Raises:
      ValueError: not exactly one interval is given, or it is not positive.
      TypeError: `tensors` is neither a dict nor a list of names, or a value is not an array of numbers.
      RuntimeError: values are given outside of a model_fn.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self._timer = None
        if not at_end or (every_n_iter, every_n_secs) != (None, None):
            caller = "LoggingTensorHook (or at_end=True alone)"
            check_intervals(caller, every_n_iter=every_n_iter, every_n_secs=every_n_secs)
            self._timer = SecondOrStepTimer(every_n_secs, every_n_iter)
        self._at_end = at_end
        self._formatter = formatter
        self._last: RunValues | None = None
        if isinstance(tensors, Mapping):
            self._names = {tag: _name(tag, tensors[tag]) for tag in sorted(tensors)}
            return
        names = None if isinstance(tensors, str) or not isinstance(tensors, Iterable) else list(tensors)
        if names is None or not all(isinstance(name, str) for name in names):
            raise TypeError(
                "LoggingTensorHook takes a list of names, or a dict by tag of names or, in a model_fn, of values: "
                f'`LoggingTensorHook({{"loss": loss}}, every_n_iter=100)`; got {tensors!r}.'
            )
        self._names = {name: name for name in names}

    def begin(self) -> None:
        self._last = None
        if self._timer:
            self._timer.reset()

    def next_step(self, step: int) -> int | None:
        # The last step is known only after it: the values of each step are requested, and only the last step's
        # are read.
        return step + 1 if self._at_end or self._timer is None else self._timer.next_step(step)

    def before_run(self, context: Context) -> dict[str, str]:
        return self._names

    def after_run(self, context: Context, values: RunValues) -> None:
        if self._timer and self._timer.should_trigger_for_step(context.step):
            self._log(values, self._timer.update_last_triggered_step(context.step)[0])
        # Not read yet, since reading waits for the step.
        self._last = values if self._at_end else None

    def end(self, context: Context) -> None:
        if context.error is None and self._last is not None:
            self._log(self._last, None)
        self._last = None

    def _log(self, values: RunValues, seconds: float | None) -> None:
        results = values.results
        if self._formatter is not None:
            logging.info("%s", self._formatter(results))
            return
        shown = ", ".join(f"{tag} = {_format_value(results[tag])}" for tag in self._names)
        logging.info("%s%s", shown, "" if seconds is None else f" ({seconds:.3f} sec)")


def _name(tag: str, value: Any) -> str:
    """Returns `value`, if it is a name; else reports it and returns its name. It is the same in every run of a
    model_fn, since the hooks of the first run are used, and never one that the model_fn may want for itself."""
    if isinstance(value, str):
        return value
    caller = "est.LoggingTensorHook"
    current_frame(f"{caller}({{{tag!r}: <a value, not a name>}})")
    array = as_reported_array(caller, tag, value)
    name = f"LoggingTensorHook/{tag}"
    return report(caller, name, Scalar(array, metric_of(value)) if array.ndim == 0 else Rows(array))


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return np.array_str(value, precision=6, suppress_small=True) if isinstance(value, np.ndarray) else str(value)
