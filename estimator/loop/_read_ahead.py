"""Input read ahead by a thread, chunk by chunk, and the loop of evaluation and prediction over it."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from estimator.core._hook import Hook
from estimator.core._mode_keys import ModeKeys
from estimator.core._typing import PyTree
from estimator.inputs._input_fn import Batches
from estimator.inputs._prefetch import BatchChunk, Prefetcher, pull_batches
from estimator.loop import _hook_calls
from estimator.loop._context import RunContext
from estimator.loop._plan import Bounds, Chunk, Plan
from estimator.loop._synchronized_input import Stopped, SynchronizedInput, next_chunk
from estimator.multihost._preemption import SIGNALS, Preempted, ask_all, is_ended_at_once
from estimator.runtime._progress_bar import is_interactive, progress_bar
from estimator.runtime._uninterrupted import in_main_thread

_CHUNKS_AHEAD = 2
_FIRST_SECONDS_TO_LOOK = 1e-4
_TITLES = {ModeKeys.EVAL: "Evaluation", ModeKeys.PREDICT: "Prediction"}


def chunks_with_hooks(
    batches: Batches, hooks: Sequence[Hook], context: RunContext, last_batch: int | None, most: int = 1
) -> Iterator[tuple[list[tuple[PyTree, PyTree]], Sequence[Hook]]]:
    """Yields batches, and the hooks to call around the last of them. A thread reads them ahead.

    A bar shows their number, on a terminal or in a notebook.

    Args:
      batches: pairs of features and labels.
      hooks: in the order in which they are called; they have begun.
      context: kept up to date.
      last_batch: the number of batches to take at most; all if None.
      most: the number of batches that come together at most; the first then waits for the last.
    """
    _hook_calls.create_state(hooks, context)
    plan = Plan(hooks, 0, last_batch, lambda: Bounds(most))
    bar = progress_bar(  # not left behind within the bar of `train`
        desc=_TITLES[context.mode], total=last_batch, unit="batch", leave=None, disable=not shows_bars(context)
    )
    with bar:
        for ready, chunk in read_ahead(batches, plan, context, lambda pairs, chunk: pairs):
            bar.update(ready.size)
            context.phase = "step" if context.batches else "compile"
            yield ready.batches, chunk.due


def shows_bars(context: RunContext) -> bool:
    """Returns whether to show progress: to somebody who sees it, by one process."""
    return context.verbose and is_interactive() and jax.process_index() == 0


def read_ahead(
    batches: Batches, plan: Plan, context: RunContext, make: Callable[[list[Any], Chunk], Any], secs: float = math.inf
) -> Iterator[tuple[BatchChunk, Chunk]]:
    """Yields the batches of a plan's chunks. What comes of a chunk before its last step has no hooks due.

    A thread makes them ready, unless the input is quick and cannot block; in `predict`, whose caller waits for it
    anyway, it may. It ends with the plan or the input, or where somebody wants the run to stop.

    Args:
      batches: the input.
      plan: says which batches make a chunk.
      context: its `phase` is kept up to date, and it is stopped with the reason why the run ends.
      make: function of the pairs of a chunk and of the `Chunk` that was planned; called where they are read.
      secs: how long to read for a chunk, whose first steps then come by themselves. Only a single process does that: of
        several, each would have read another part.
    """
    shared = SynchronizedInput(context) if context.group.count > 1 else None
    taken = 0  # chunks

    def is_stopped() -> bool:
        if shared is not None:
            shared.raise_if_stopped(taken)
        # A signal's handler may have stopped a single process. One of several must not leave alone: others would wait.
        return shared is None and context.stop_requested

    requested: collections.deque[Chunk] = collections.deque()
    to_make: collections.deque[Chunk] = collections.deque()  # the same, for the thread

    def make_next(pairs: list[Any]) -> Any:
        return make(pairs, _take(to_make, len(pairs)))

    pull = functools.partial(pull_batches, secs=secs) if shared is None else shared.pull
    may_end = shared is None and context.mode == ModeKeys.PREDICT and is_ended_at_once()
    by_caller = may_end or (shared is None and batches.is_in_memory)
    with Prefetcher(batches, make_next, pull, by_caller) as prefetcher:
        while not context.stop_requested:
            while len(requested) < _CHUNKS_AHEAD and (planned := next_chunk(plan, context.group)):
                requested.append(planned)
                # Before the request, at which the thread begins to read: it takes the chunk from here.
                to_make.append(planned)
                prefetcher.request(planned.steps)
            if not requested:
                context.stop("steps")
                return
            context.phase = "input"
            try:
                context.reads_input = may_end and in_main_thread()
                _wait_beside_devices(prefetcher, context)
                ready = prefetcher.get_unless(is_stopped)
            except Stopped as agreed:  # in all processes, here
                # The signal may have come to another process: this one then ends with the same exit code.
                if str(agreed) in SIGNALS:
                    ask_all(str(agreed))
                context.stop(str(agreed))
                return
            except (Preempted, KeyboardInterrupt) as error:
                if not context.is_asked_by(error):
                    raise
                return
            finally:
                context.reads_input = False
            if ready is None:
                return
            taken += 1
            if not ready.size:
                context.stop("input")
                return
            yield ready, _take(requested, ready.size)


def _wait_beside_devices(prefetcher: Prefetcher, context: RunContext) -> None:
    """Waits for the next chunk while devices work on earlier steps: that time is theirs, and not lost to the input."""
    if not context.devices_are_busy():
        return
    before, seconds = context.stopwatch.switch("device"), _FIRST_SECONDS_TO_LOOK
    # jax does not tell when devices are done. It looks now and then, so it notices that late by a fifth of the wait.
    while not prefetcher.wait(seconds) and context.devices_are_busy():
        seconds *= 1.2
    context.stopwatch.switch(before)


def _take(chunks: collections.deque[Chunk], steps: int) -> Chunk:
    """Takes the first steps of the first chunk. Its hooks are due after the last of them."""
    chunk = chunks.popleft()
    if steps == chunk.steps:
        return chunk
    chunks.appendleft(chunk._replace(steps=chunk.steps - steps))
    return chunk._replace(steps=steps, due=())
