"""The inputs of several processes, read in step: before each piece they agree on what is in it.

In training all of them give batches of the same shapes, and stop with the first whose input ends. In evaluation each
may have as many rows and batches as it likes: the i-th batch is made of the i-th batches of all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from absl import logging

from estimator.core._batch import check_batch, named_leaves
from estimator.core._bcoo import has_sparse
from estimator.core._mode_keys import ModeKeys
from estimator.core._typing import PyTree
from estimator.inputs._prefetch import pull_batches
from estimator.loop._context import RunContext
from estimator.loop._plan import Chunk, Plan
from estimator.multihost._preemption import SIGTERM, preempt
from estimator.multihost._process_group import Team

Pair = tuple[PyTree, PyTree]


def first_batch(team: Team, batch: Pair | None, mode: ModeKeys) -> Pair | None:
    """The first batch of this process, or, where it has none, zeros like that of another; None where there is none in
    any process, or, in training, in one of them.

    Raises:
      TypeError: it is sparse.
      ValueError: those of the processes do not fit together.
    """
    trains = mode == ModeKeys.TRAIN
    found = team.exchange(None if batch is None else _without_rows(batch))
    there = [other for other in found if other is not None]
    if not there or (trains and len(there) < len(found)):
        return None
    _check_alike(there, with_rows=trains)
    (like, rows) = there[0]
    return batch or jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), (rows, *x.shape[1:])), like)


class Uneven(NamedTuple):
    """A batch of which the processes have different numbers of rows.

    Attributes:
      pair: features and labels of this process, maybe without a row.
      rows: how many rows each process has.
    """

    pair: Pair
    rows: list[int]


class Stopped(Exception):
    """The processes have agreed to stop before a piece; holds why."""


class _Offer(NamedTuple):
    """What a process has for a piece: of each batch the same without its rows, and how many these are."""

    batches: list[tuple[Pair, int]]
    ended: bool = False
    failed: str | None = None
    stop: str | None = None  # why


class SharedPlan:
    """The plan of process 0, in all of them: hooks that go by the clock would make others elsewhere.

    Args:
      plan: that of this process; its hooks are of the same classes in all processes.
      team: the processes.
    """

    def __init__(self, plan: Plan, team: Team) -> None:
        self._plan, self._team = plan, team

    def next(self) -> Chunk | None:
        piece, due = self._team.from_chief(self._next)
        return piece and piece._replace(due=tuple(self._plan.hooks[i] for i in due))

    def _next(self) -> tuple[Chunk | None, list[int]]:
        """The piece, and its hooks by their numbers."""
        piece = self._plan.next()
        if piece is None:
            return None, []
        due = {id(hook) for hook in piece.due}
        return piece._replace(due=()), [i for i, hook in enumerate(self._plan.hooks) if id(hook) in due]


class SynchronizedReader:
    """How the thread of each process that reads pieces keeps step with the others.

    Args:
      context: of the run.
      team: the processes.
    """

    def __init__(self, context: RunContext, team: Team) -> None:
        self._context, self._towers = context, team.towers
        self._team = team.channel("input")
        self._lock = threading.Lock()
        self._stop_at: int | None = None  # the round that the main thread has answered in the place of this one
        self._taken = 0

    def pull(
        self, pairs: Iterator[Pair], n: int, closed: threading.Event
    ) -> tuple[list[Pair | Uneven], BaseException | None]:
        """The next batches, up to `n`, as all processes agree, and what came instead of more; for the thread."""
        pulled, error = pull_batches(pairs, n, closed)
        ended = isinstance(error, StopIteration)
        offered: list[tuple[Pair, int]] = []
        if error is None or ended:
            try:
                offered = [_without_rows(pair) for pair in pulled]
            except Exception as wrong:
                error, ended = wrong, False
        failed = None if error is None or ended else f"{type(error).__name__}: {error}"
        with self._lock:
            if self._stop_at is not None or closed.is_set():
                return [], Stopped(SIGTERM)
            number = self._team.offer(_Offer(offered, ended, failed, self._context.wished))
        offers = self._team.finish(number, closed)
        if failed is not None:
            return [], error
        for i, offer in enumerate(offers):
            if offer.failed is not None:
                return [], RuntimeError(f"The input of process {i} failed: {offer.failed}. See there.")
        if reasons := [offer.stop for offer in offers if offer.stop]:
            return [], Stopped(SIGTERM if SIGTERM in reasons else reasons[0])
        try:
            if self._context.mode == ModeKeys.TRAIN:
                return self._in_training(pulled, offers)
            return self._in_evaluation(pulled, offers)
        except ValueError as wrong:
            return [], wrong

    def interrupted(self) -> bool:
        """Whether to stop now since SIGTERM came here or elsewhere; for the main thread while it waits for input.

        Pieces that were agreed on before are still run: other processes may have begun with them.
        """
        if self._stop_at is None:
            if not self._context.preempted and not self._team.is_flagged():
                return False
            self._team.flag()
            with self._lock:
                self._stop_at = self._team.offer(_Offer([], stop=SIGTERM))
        if self._taken < self._stop_at:
            return False
        self._team.finish(self._stop_at)
        return True

    def took(self) -> None:
        """Notes that a piece was taken."""
        self._taken += 1

    def stop(self, reason: str) -> None:
        """Ends the run: all processes do so here."""
        if reason == SIGTERM:
            preempt()
        self._context.stop(reason)

    def _in_training(
        self, pulled: list[Pair], offers: list[_Offer]
    ) -> tuple[list[Pair | Uneven], BaseException | None]:
        count = min(len(offer.batches) for offer in offers)
        for i in range(count):
            _check_alike([offer.batches[i] for offer in offers], with_rows=True)
        ended = [i for i, offer in enumerate(offers) if offer.ended and len(offer.batches) == count]
        if not ended:
            return list(pulled[:count]), None
        if len(ended) < len(offers):
            logging.info("The input of process %d has ended, and the training of all with it.", ended[0])
        return list(pulled[:count]), StopIteration()

    def _in_evaluation(
        self, pulled: list[Pair], offers: list[_Offer]
    ) -> tuple[list[Pair | Uneven], BaseException | None]:
        made: list[Pair | Uneven] = []
        for i in range(max(len(offer.batches) for offer in offers)):
            there = [offer.batches[i] for offer in offers if i < len(offer.batches)]
            _check_alike(there, with_rows=False)
            rows = [offer.batches[i][1] if i < len(offer.batches) else 0 for offer in offers]
            pair = pulled[i] if i < len(pulled) else there[0][0]
            even = len(set(rows)) == 1 and rows[0] % self._towers == 0
            made.append(pair if even else Uneven(pair, rows))
        return made, StopIteration() if all(offer.ended for offer in offers) else None


def _without_rows(pair: Pair) -> tuple[Pair, int]:
    if has_sparse(pair):
        raise TypeError(
            "Sparse features and labels cannot be trained on by several processes. Give dense ones, or ids and weights "
            "in dense arrays for `est.embedding_lookup`."
        )
    rows = check_batch(*pair)
    return jax.tree.map(lambda x: np.zeros((0, *x.shape[1:]), x.dtype), pair), rows


def _check_alike(batches: list[tuple[Pair, int]], with_rows: bool) -> None:
    described = [_described(*batch, with_rows) for batch in batches]
    for i, other in enumerate(described):
        if other != described[0]:
            names = [name for name in {**described[0], **other} if described[0].get(name) != other.get(name)]
            raise ValueError(
                f"The processes gave batches that do not fit together: {names[0]} is "
                f"{described[0].get(names[0], 'missing')} in process 0, {other.get(names[0], 'missing')} in process "
                f"{i}. Each has to give arrays of the same names, dtypes and shapes"
                + (", and as many rows (`drop_remainder=True`)." if with_rows else ", but for the number of rows.")
            )


def _described(pair: Pair, rows: int, with_rows: bool) -> dict[str, str]:
    first = str(rows) if with_rows else "rows"
    return {
        name: f"{leaf.dtype}[{','.join([first, *map(str, leaf.shape[1:])])}]"
        for name, leaf in named_leaves(*pair).items()
    }
