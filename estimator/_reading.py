"""The loop of the runs that only read the state, evaluation and prediction: batch by batch, with hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import tqdm

from estimator._frame import PyTree
from estimator._modes import ModeKeys
from estimator._prefetch import Prefetcher
from estimator.hooks import _run
from estimator.hooks._hook import Context, Hook

_BATCHES_AHEAD = 2
_TITLES = {ModeKeys.EVAL: "Evaluation", ModeKeys.PREDICT: "Prediction"}


def batches_with_hooks(
    batches: Iterable[tuple[PyTree, PyTree]], hooks: Sequence[Hook], context: Context, last_batch: int | None
) -> Iterator[tuple[PyTree, PyTree, Sequence[Hook]]]:
    """Features and labels of each batch, and the hooks to call around it. A thread reads two batches ahead.

    A bar on stderr shows how many were taken; there is none where stderr is no terminal.

    Hooks that see `after_run` of a batch, or of none, may end the run by `context.request_stop`.

    Args:
      batches: pairs of features and labels.
      hooks: in the order in which they are called; they have begun.
      context: kept up to date.
      last_batch: how many batches to take at most; None: all.
    """
    for hook in hooks:
        hook.after_create_state(context)
    plan = _run.Plan(hooks, 0, last_batch, lambda: 1)
    pieces: list[_run.Piece] = []
    bar = tqdm.tqdm(  # not left behind within that of `train`
        desc=_TITLES[context.mode], total=last_batch, unit="batch", leave=None, disable=not sys.stderr.isatty()
    )
    with bar, Prefetcher(batches, lambda pairs: pairs[0], _BATCHES_AHEAD) as ready:
        while not context.stop_requested:
            while len(pieces) < _BATCHES_AHEAD and (piece := plan.next()):
                pieces.append(piece)
                ready.request(1)
            if not pieces:
                context.request_stop("steps")
                return
            context.phase = "input"
            got = ready.get()
            if not got.size:
                context.request_stop("input")
                return
            features, labels = got.batches
            context.phase = "step"
            bar.update()
            yield features, labels, pieces.pop(0).due
