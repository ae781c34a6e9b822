"""The rates of a training run, for its log and its summaries."""

from __future__ import annotations

import time

from estimator.core._hook import Context


class RateMeter:
    """Measures from one reading to the next; the first time since the first program was done (`Context.clock`).

    The tags are TensorFlow's "global_step/sec" and "examples/sec"; "input_wait", the share of the time that the run
    waited for input while its devices had nothing to do; and, where the peak of the devices is known,
    "flops_utilization", the share of it.
    """

    def __init__(self) -> None:
        self._before: tuple[int, float, float] | None = None  # step, time, seconds of waiting

    def read(self, context: Context, step: int, at_least: float = 0.0) -> dict[str, float]:
        """The rates by tag.

        Args:
          context: of a training run.
          step: the last step that is known to be done. If none was since the last reading, there are no rates.
          at_least: no rates within as many seconds of the last reading, either.
        """
        now, waited, before = time.monotonic(), context.input_wait, self._before
        if before is None:
            before, at_least = (*(context.clock or (step, now)), 0.0), 0.0
        first, since, waited_before = before
        if step <= first or now < since + at_least:
            return {}
        self._before = step, now, waited
        seconds = now - since
        rate = (step - first) / seconds
        # Examples by the mean size of a batch: the newest batches that were counted are not done yet.
        rates = {"global_step/sec": rate, "examples/sec": rate * context.examples / context.batches}
        rates["input_wait"] = (waited - waited_before) / seconds
        if context.least_step_seconds is not None:
            rates["flops_utilization"] = rate * context.least_step_seconds
        return rates
