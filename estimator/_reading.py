"""The loop of the runs that only read the state, evaluation and prediction: batch by batch, with hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import tqdm

from estimator._frame import PyTree
from estimator._input import Batches
from estimator._modes import ModeKeys
from estimator._prefetch import Prefetcher
from estimator.hooks import _run
from estimator.hooks._hook import Context, Hook

_PIECES_AHEAD = 2
_TITLES = {ModeKeys.EVAL: "Evaluation", ModeKeys.PREDICT: "Prediction"}


def pieces_with_hooks(
    batches: Batches, hooks: Sequence[Hook], context: Context, last_batch: int | None, most: int = 1
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
    for hook in hooks:
        hook.after_create_state(context)
    plan = _run.Plan(hooks, 0, last_batch, lambda: most)
    asked: list[_run.Piece] = []
    bar = tqdm.tqdm(  # not left behind within that of `train`
        desc=_TITLES[context.mode], total=last_batch, unit="batch", leave=None, disable=not sys.stderr.isatty()
    )
    with bar, Prefetcher(batches, lambda pairs: pairs, _PIECES_AHEAD) as ready:
        while not context.stop_requested:
            while len(asked) < _PIECES_AHEAD and (piece := plan.next()):
                asked.append(piece)
                ready.request(piece.steps)
            if not asked:
                context.request_stop("steps")
                return
            context.phase = "input"
            got = ready.get_unless(lambda: context.stop_requested)
            if got is None:
                return
            if not got.size:
                context.request_stop("input")
                return
            bar.update(got.size)
            piece = asked.pop(0)
            context.phase = "step" if context.batches else "compile"
            yield got.batches, piece.due if got.size == piece.steps else ()
