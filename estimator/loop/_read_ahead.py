"""Input read ahead by a thread, piece by piece, and the loop of evaluation and prediction over it."""

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
from estimator.inputs._prefetch import Piece, Prefetcher
from estimator.loop import _hook_calls
from estimator.loop._context import RunContext
from estimator.loop._plan import Chunk, Plan
from estimator.loop._synchronized_input import SharedPlan, Stopped, SynchronizedReader
from estimator.multihost._preemption import SIGTERM

_PIECES_AHEAD = 2
_TITLES = {ModeKeys.EVAL: "Evaluation", ModeKeys.PREDICT: "Prediction"}


def pieces_with_hooks(
    batches: Batches, hooks: Sequence[Hook], context: RunContext, last_batch: int | None, most: int = 1
) -> Iterator[tuple[list[tuple[PyTree, PyTree]], Sequence[Hook]]]:
    """Some batches, and the hooks to call around the last of them. A thread reads them ahead.

    A bar on stderr shows how many were taken; there is none where stderr is no terminal.

    Args:
      batches: pairs of features and labels.
      hooks: in the order in which they are called; they have begun.
      context: kept up to date.
      last_batch: how many batches to take at most; None: all.
      most: how many batches come together at most; the first then waits for the last.
    """
    import tqdm

    _hook_calls.create_state(hooks, context)
    plan = Plan(hooks, 0, last_batch, lambda: most)
    bar = tqdm.tqdm(  # not left behind within that of `train`
        desc=_TITLES[context.mode], total=last_batch, unit="batch", leave=None, disable=not shows_bars()
    )
    with bar:
        for got, due in read_ahead(batches, plan, context, lambda pairs, piece: pairs):
            bar.update(got.size)
            context.phase = "step" if context.batches else "compile"
            yield got.batches, due


def shows_bars() -> bool:
    """Whether to show progress: on a terminal, by one process. A daemon may have no stderr."""
    return sys.stderr is not None and sys.stderr.isatty() and jax.process_index() == 0


def read_ahead(
    batches: Batches, plan: Plan, context: RunContext, make: Callable[[list[Any], Chunk], Any]
) -> Iterator[tuple[Piece, Sequence[Hook]]]:
    """The pieces of a plan, made ready by a thread, each with the hooks to call around the last of its steps, until the
    plan or the input ends, or somebody wants the run to stop.

    Args:
      batches: the input.
      plan: says how many batches make a piece.
      context: its `phase` is kept up to date, and it is told why the run ends.
      make: function of the pairs of a piece and of what was planned; called in the thread.
    """
    lockstep = SynchronizedReader(context, context.team) if context.team else None
    planned = SharedPlan(plan, context.team) if context.team else plan
    stopped = lockstep.interrupted if lockstep else lambda: context.stop_requested
    asked: collections.deque[Chunk] = collections.deque()
    to_make: collections.deque[Chunk] = collections.deque()  # the same, for the thread
    pull = lockstep.pull if lockstep else None
    with Prefetcher(batches, lambda pairs: make(pairs, to_make.popleft()), _PIECES_AHEAD, pull) as ready:
        while not context.stop_requested:
            while len(asked) < _PIECES_AHEAD and (piece := planned.next()):
                asked.append(piece)
                to_make.append(piece)
                ready.request(piece.steps)
            if not asked:
                context.stop("steps")
                return
            context.phase = "input"
            why = SIGTERM
            try:
                got = ready.get_unless(stopped)
            except Stopped as agreed:
                got, why = None, str(agreed)
            if got is None:
                if lockstep:
                    lockstep.stop(why)
                return
            if lockstep:
                lockstep.took()
            if not got.size:
                context.stop("input")
                return
            piece = asked.popleft()
            yield got, piece.due if got.size == piece.steps else ()
