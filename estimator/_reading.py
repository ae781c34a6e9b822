"""The loop of the runs that only read the state, evaluation and prediction: batch by batch, with hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from estimator._frame import PyTree
from estimator._prefetch import Prefetcher
from estimator.hooks import _run
from estimator.hooks._hook import Context, Hook

_BATCHES_AHEAD = 2


def batches_with_hooks(
    batches: Iterable[tuple[PyTree, PyTree]], hooks: Sequence[Hook], context: Context, last_batch: int | None
) -> Iterator[tuple[PyTree, PyTree, Sequence[Hook]]]:
    """Features and labels of each batch, and the hooks to call around it. A thread reads two batches ahead.

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
    with Prefetcher(batches, lambda pairs: pairs[0], _BATCHES_AHEAD) as ready:
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
            yield features, labels, pieces.pop(0).due
