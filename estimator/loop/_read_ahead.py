"""Input read ahead by a thread, chunk by chunk, and the loop of evaluation and prediction over it."""

from __future__ import annotations

import collections
import sys
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
from estimator.loop._plan import Chunk, Plan
from estimator.loop._synchronized_input import Stopped, SynchronizedInput, next_chunk
from estimator.multihost._preemption import SIGTERM, Preempted, is_ended_at_once, preempt
from estimator.runtime._interrupts import in_main_thread, raise_dropped_interrupt

_CHUNKS_AHEAD = 2
_TITLES = {ModeKeys.EVAL: "Evaluation", ModeKeys.PREDICT: "Prediction"}


def chunks_with_hooks(
    batches: Batches, hooks: Sequence[Hook], context: RunContext, last_batch: int | None, most: int = 1
) -> Iterator[tuple[list[tuple[PyTree, PyTree]], Sequence[Hook]]]:
    """Yields batches, and the hooks to call around the last of them. A thread reads them ahead.

    A bar on stderr shows their number, if stderr is a terminal.

    Args:
      batches: pairs of features and labels.
      hooks: in the order in which they are called; they have begun.
      context: kept up to date.
      last_batch: the number of batches to take at most; None: all.
      most: the number of batches that come together at most; the first then waits for the last.
    """
    import tqdm

    _hook_calls.create_state(hooks, context)
    plan = Plan(hooks, 0, last_batch, lambda: most)
    bar = tqdm.tqdm(  # not left behind within the bar of `train`
        desc=_TITLES[context.mode], total=last_batch, unit="batch", leave=None, disable=not shows_bars(context)
    )
    with bar:
        for ready, due in read_ahead(batches, plan, context, lambda pairs, chunk: pairs):
            bar.update(ready.size)
            context.phase = "step" if context.batches else "compile"
            yield ready.batches, due


def shows_bars(context: RunContext) -> bool:
    """Says whether to show progress: on a terminal, by one process. A daemon may have no stderr."""
    return context.verbose and sys.stderr is not None and sys.stderr.isatty() and jax.process_index() == 0


def read_ahead(
    batches: Batches, plan: Plan, context: RunContext, make: Callable[[list[Any], Chunk], Any]
) -> Iterator[tuple[BatchChunk, Sequence[Hook]]]:
    """Yields the chunks of a plan, each with the hooks to call around the last of its steps.

    A thread makes them ready, unless the input is quick and cannot block; in `predict`, whose caller waits for it
    anyway, it may. Without a thread, `context.read_on` makes the next one ready. It ends with the plan or the input, or
    where somebody wants the run to stop.

    Args:
      batches: the input.
      plan: says which batches make a chunk.
      context: its `phase` is kept up to date, and it is stopped with the reason why the run ends.
      make: function of the pairs of a chunk and of the `Chunk` that was planned; called where they are read.
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
    # The last chunk is smaller than requested. The next `get` returns the reason, the end of the input or its error:
    # steps are still made of the batches before an error.
    is_short = False
    pull = pull_batches if shared is None else shared.pull
    may_end = shared is None and context.mode == ModeKeys.PREDICT and is_ended_at_once()
    by_caller = may_end or (shared is None and batches.is_in_memory)
    with Prefetcher(
        batches, lambda pairs: make(pairs, to_make.popleft()), _CHUNKS_AHEAD, pull, by_caller
    ) as prefetcher:
        if batches.is_in_memory:
            context.read_on = prefetcher.read_on
        while not context.stop_requested:
            raise_dropped_interrupt()
            while not is_short and len(requested) < _CHUNKS_AHEAD and (chunk := next_chunk(plan, context.group)):
                requested.append(chunk)
                # Before the request, at which the thread begins to read: it takes the chunk from here.
                to_make.append(chunk)
                prefetcher.request(chunk.steps)
            if not requested and not is_short:
                context.stop("steps")
                return
            context.phase = "input"
            try:
                context.reads_input = may_end and in_main_thread()
                ready = prefetcher.get_unless(is_stopped)
            except Stopped as agreed:  # in all processes, here
                # The signal may have come to another process: this one then ends with the same exit code.
                if str(agreed) == SIGTERM:
                    preempt()
                context.stop(str(agreed))
                return
            except Preempted:
                if not context.preempted:
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
            chunk = requested.popleft()
            is_short = ready.size < chunk.steps
            # Hooks are due after the last step that was planned, which a short chunk does not reach.
            yield ready, () if is_short else chunk.due
